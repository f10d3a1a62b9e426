"""A draft that exists already: loaded from a folder, and refused unless its tokenizer is the target's.

Equal sizes prove nothing; every id must stand for the same string, or the draft proposes other text than it means.
Whether it is distilled further or measured as it is, the stages say: without logits, distil and export nothing trains it.
"""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.artifact import file_hash, fingerprint
from pipeline.config import Config, Stage
from pipeline.errors import PipelineError
from speculative.vocabulary import first_difference

TRAINING = {Stage.logits, Stage.distil, Stage.export}  # stages that ask for a draft distilled here
MEASURING = {Stage.speculate, Stage.report}
WHOLE = {"layers": [], "width": None, "fit_head": False, "vocabulary_size": 0, "coverage": None}  # settings of all of it


def as_it_is(config: Config) -> bool:
    """Whether the draft at ``draft.path`` is to be measured as it is: all of it, undistilled."""
    wanted = set(config.stages)
    return config.draft.path is not None and bool(wanted & MEASURING) and not wanted & TRAINING


def settled(config: Config) -> Config:
    """The configuration of measuring the whole draft: nothing is cut from it, and nothing kept for training."""
    return replace(config, draft=replace(config.draft, **WHOLE), generate=replace(config.generate, keep_states=False))


def find(path: str, target_tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder at ``draft.path``.

    Raises:
        PipelineError: no such model, or a tokenizer that differs; the first differing id is named.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise PipelineError(f"draft.path={path}: no model folder; give a folder with config.json and *.safetensors")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise PipelineError(f"draft.path={path}: {error}") from error
    difference = first_difference(target_tokenizer, tokenizer)
    if difference:
        raise PipelineError(
            f"draft.path={path}: its tokenizer is not the target's ({difference}); choose a sibling of the target"
        )
    return folder


def load(path: str, target_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The float32 model at ``draft.path``.

    Raises:
        PipelineError: as ``find``, or the files hold no causal language model.
    """
    folder = find(path, target_tokenizer)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise PipelineError(f"draft.path={path}: {error}") from error
    return model.eval()


def fingerprint_of(path: str | None) -> str | None:
    """A hash of the files of an existing draft; None where there is none."""
    folder = Path(path).expanduser() if path else None
    if folder is None or not folder.is_dir():
        return None
    return fingerprint({p.name: file_hash(p) for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".json")})
