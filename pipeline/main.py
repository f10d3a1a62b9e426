"""The entry point: Hydra's configuration becomes dataclasses, errors become messages and exit codes.

Exit codes: 0 done; 1 a defect (with traceback); 2 something the user can mend (one message); 130 interrupted.
"""

import logging
import os
import sys
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import interrupts
from pipeline.check import check
from pipeline.config import Config
from pipeline.errors import PipelineError


def _schema() -> DictConfig:
    """The types of all keys. OmegaConf takes frozen for read-only, which composition must be allowed to fill."""
    schema = OmegaConf.structured(Config)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        OmegaConf.set_readonly(node, None)
    return schema


ConfigStore.instance().store("schema", _schema())


_begun = False  # whether Hydra has handed over; a file error before that is about its output folder


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def _entry(composed: DictConfig) -> float:
    """One execution. Returns the measured speed ratio, so that sweepers can optimise it; NaN if nothing was decoded."""
    global _begun
    _begun = True
    config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    check(config)
    work = Path(config.paths.work).expanduser().resolve()
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / ".writable").touch()
        (work / ".writable").unlink()
    except OSError as error:
        raise PipelineError(
            f"paths.work={config.paths.work}: not writable ({error.strerror}); choose another folder"
        ) from error
    from pipeline.flow import execute  # torch and its company are not needed to print help

    output = Path(HydraConfig.get().runtime.output_dir)
    return execute(config, work, output, flat(composed), HydraConfig.get().overrides.task)


def flat(node: DictConfig) -> dict[str, object]:
    """Dotted keys and their values."""
    container = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    flattened: dict[str, object] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flattened[prefix] = value

    walk("", container)
    return flattened


def main() -> None:
    """Console script ``draftsmith``."""
    os.umask(0o077)  # responses may hold private text
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach this function, which turns them into messages
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.pop("MLFLOW_RUN_ID", None)  # it would hijack our runs
    interrupts.watch()
    try:
        _entry()
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or interrupts.received():
            _quit("interrupted; the same command continues from the last finished shard or checkpoint", 130)
        _fail(error)


def _fail(error: Exception) -> None:
    """Leave with a message for what the user can mend; a defect goes on with its traceback."""
    if isinstance(error, PipelineError):
        _quit(str(error), 2)
    if isinstance(error, HydraException | OmegaConfBaseException):
        _quit(_explain(error), 2)
    if isinstance(error, OSError) and not _begun:
        _quit(f"paths.work: {error}; choose a folder that can be written", 2)
    raise error


def _explain(error: Exception) -> str:
    """Hydra's message with its cause, in one piece, and where to look."""
    parts = [str(error)]
    if error.__cause__ is not None and str(error.__cause__) not in parts[0]:
        parts.append(str(error.__cause__))
    lines = [
        line
        for part in parts
        for line in part.splitlines()
        if not line.strip().startswith(("full_key", "object_type", "reference_type"))
    ]
    return "configuration: " + "\n".join(lines) + "\nsee `draftsmith --cfg job` for all keys and values"


def _quit(message: str, code: int) -> None:
    logging.getLogger("draftsmith").debug("exit %d", code, exc_info=True)
    sys.stderr.write(f"draftsmith: {message}\n")
    sys.exit(code)
