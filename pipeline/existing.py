"""A draft that exists already: loaded from a folder or the hub, and refused unless its tokenizer is the target's.

Equal sizes prove nothing; every id must stand for the same string, or the draft proposes other text than it means. Measured
as it is, a draft with another tokenizer proposes the tokens that both have, which is exact.
Whether it is distilled further or measured as it is, the stages say: without logits, distil and export nothing trains it.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.artifact import MANIFEST, file_hash, fingerprint
from pipeline.choices import Stage
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.target import TargetFiles, hub_folder, is_hub_name
from speculative import Draft, shared_draft
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


def look_ahead(config: Config, target: TargetFiles) -> None:
    """Refuse a ``draft.path`` that is no model, or none that could be trained, without loading it.

    Raises:
        PipelineError: as ``find``; a pair as it is may have two tokenizers, and keeps its head.
    """
    path, rank = str(config.draft.path), config.draft.head_rank
    if rank is not None and (as_it_is(config) or distilled(path)):
        how = "is measured as it is" if as_it_is(config) else "goes on as it was distilled"
        fix = "leave it out" + (", or add distil to stages" if not distilled(path) else "")
        raise PipelineError(f"draft.head_rank={rank}: the draft at draft.path={path} {how}, with its own head; {fix}")
    if distilled(path):
        _check_target(path, target.fingerprint)
    elif as_it_is(config):
        _tokenizer(path, located(path))
    else:
        find(path, target.tokenizer())


def distilled(path: str) -> bool:
    """Whether a draft that the stage distil kept lies at ``draft.path``: it goes on as it is, with its own vocabulary."""
    return (Path(path).expanduser() / "draft.safetensors").is_file()


def _check_target(path: str, target: str) -> None:
    """Refuse a distilled draft of another target than that with the fingerprint ``target``, if its result folder tells."""
    manifest = Path(path).expanduser().resolve().parent / MANIFEST
    theirs = json.loads(manifest.read_text())["identity"].get("target") if manifest.is_file() else target
    if theirs != target:
        raise PipelineError(
            f"draft.path={path}: this draft was distilled from the target {theirs}, this run's is {target}; "
            "name a draft of this target"
        )


def find(path: str, target_tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder at ``draft.path``.

    Raises:
        PipelineError: no such model, or a tokenizer that differs; the first differing id is named.
    """
    folder = located(path)
    difference = first_difference(target_tokenizer, _tokenizer(path, folder))
    if difference:
        raise PipelineError(
            f"draft.path={path}: its tokenizer is not the target's ({difference}); choose a sibling of the target, or measure "
            "the pair as it is (stages=[speculate,report])"
        )
    return folder


def load(path: str, target_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The float32 model at ``draft.path``.

    Raises:
        PipelineError: as ``find``, or the files hold no causal language model.
    """
    return _model(path, find(path, target_tokenizer))


def of_other_tokenizer(path: str, target_tokenizer: PreTrainedTokenizerBase, target_size: int) -> Draft | None:
    """A draft of the model at ``draft.path`` over the tokens that it shares with a target of ``target_size`` logits; None
    where both tokenizers are one.

    Raises:
        PipelineError: no such model, or too few tokens in common; the first differing id is named.
    """
    folder = located(path)
    tokenizer = _tokenizer(path, folder)
    if first_difference(target_tokenizer, tokenizer) is None:
        return None
    try:
        return shared_draft(_model(path, folder), tokenizer, target_tokenizer, target_size)
    except ValueError as error:
        raise PipelineError(f"draft.path={path}: {error}; choose a sibling of the target") from error


def _tokenizer(path: str, folder: Path) -> PreTrainedTokenizerBase:
    if not (folder / "config.json").is_file():
        raise PipelineError(
            f"draft.path={path}: no model folder; give a folder with config.json and *.safetensors, or a hub name"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise PipelineError(f"draft.path={path}: {error}") from error


def _model(path: str, folder: Path) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    except (ValueError, OSError) as error:
        raise PipelineError(f"draft.path={path}: {error}") from error


def located(path: str) -> Path:
    """Where the files of ``draft.path`` lie: a folder, or where a hub model was fetched to."""
    folder = Path(path).expanduser()
    return hub_folder("draft.path", path) if not folder.is_dir() and is_hub_name(path) else folder


def fingerprint_of(path: str | Path | None) -> str | None:
    """A hash of the files of an existing draft; None where there is none."""
    folder = Path(path).expanduser() if path else None
    if folder is None or not folder.is_dir():
        return None
    return fingerprint({p.name: file_hash(p) for p in sorted(folder.iterdir()) if p.suffix in (".safetensors", ".json")})
