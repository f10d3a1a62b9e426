"""The entry point: Hydra's configuration becomes dataclasses, errors become messages and exit codes.

Exit codes: 0 done; 1 a defect (with traceback); 2 something the user can mend (one message); 130 interrupted. A sweep
in which jobs failed goes to its end, lists them, and exits with 1 if one of them met a defect, else with 2.
"""

import gc
import hashlib
import logging
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import interrupts, release, server
from pipeline.check import check
from pipeline.config import Config, Tracking
from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.tracking import Run

log = logging.getLogger("draftsmith")


def _schema() -> DictConfig:
    """The types of all keys. OmegaConf takes frozen for read-only, which composition must be allowed to fill."""
    schema = OmegaConf.structured(Config)
    for node in (schema, *(schema._get_node(key) for key in schema)):
        OmegaConf.set_readonly(node, None)
    return schema


ConfigStore.instance().store("schema", _schema())


@dataclass
class _Progress:
    """How far this process is: whether Hydra has handed over, and the run of the sweep that it leads, if it leads one."""

    begun: bool = False  # a file error before that is about Hydra's output folder
    sweep: "Run | None" = None


_progress = _Progress()


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def _entry(composed: DictConfig) -> float:
    """One execution. Returns the measured speed ratio, so that sweepers can optimise it; NaN if nothing was decoded."""
    _progress.begun = True
    config: Config = OmegaConf.to_object(composed)  # type: ignore[assignment]
    token = _token()
    if token is None:
        check(config)
    work = _work_folder(config.paths.work)
    from pipeline.flow import execute  # torch and its company are not needed to print help

    hydra_config = HydraConfig.get()
    output = Path(hydra_config.runtime.output_dir)
    shared = output if token is None else Path(hydra_config.sweep.dir)
    try:
        config = replace(config, tracking=server.settled(config.tracking, shared, token is not None))
        return execute(config, work, output, flat(composed), list(hydra_config.overrides.task), token)
    except Exception as error:
        if token is not None:
            told = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            log.error("job %s failed: %s", hydra_config.job.num, told)  # its turn to be printed comes hours later
            release.clear(error)
        raise
    finally:
        if token is not None:
            gc.collect()  # trainers and their modules hold each other, and the next job needs the room


class Sweep(Callback):
    """Opens the run of a sweep before Hydra launches its jobs; ``main`` closes it, for Hydra does not call after a failure."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        values = OmegaConf.merge(_schema(), OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
        assert isinstance(values, DictConfig)
        try:
            work = _work_folder(values.paths.work)
            from pipeline import sweep

            tracking: Tracking = OmegaConf.to_object(values.tracking)  # type: ignore[assignment]
            tracking = server.settled(tracking, Path(config.hydra.sweep.dir), False)
            overrides = list(config.hydra.overrides.task)
            _progress.sweep = sweep.begin(tracking, work, overrides, flat(values), _sign(config.hydra.sweep.dir))
        except PipelineError as error:
            _quit(str(error), 2)
        except Exception:  # Hydra would make a warning of it and go on
            traceback.print_exc()
            sys.exit(1)


def _token() -> str | None:
    """What the jobs of one sweep share, in whichever process they are; None outside sweeps."""
    settings = HydraConfig.get()
    return None if OmegaConf.is_missing(settings.job, "num") else _sign(settings.sweep.dir)


def _sign(sweep_folder: str) -> str:
    return hashlib.sha256(str(Path(sweep_folder).absolute()).encode()).hexdigest()


def _work_folder(path: str) -> Path:
    work = Path(path).expanduser().resolve()
    probe = work / f".writable-{os.getpid()}"
    try:
        work.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise PipelineError(f"paths.work={path}: not writable ({error.strerror}); choose another folder") from error
    return work


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
    if sys.argv[1:2] == ["advise"]:
        from pipeline import advise

        return advise.main(sys.argv[2:])
    error: BaseException | None = None
    try:
        _entry()
    except (Exception, KeyboardInterrupt) as caught:
        error = KeyboardInterrupt() if interrupts.received() else caught
    if _progress.sweep is not None:
        _conclude(_progress.sweep, error)
    if error is not None:
        message, code = _words(error)
        _quit(message, code)


def _conclude(run: "Run", error: BaseException | None) -> None:
    """Close the run of a sweep; if jobs failed, say which and why, and quit."""
    from pipeline import sweep

    _progress.sweep = None
    failures = sweep.end(run, error)
    if failures and not isinstance(error, KeyboardInterrupt):
        _quit(sweep.message(failures), 1 if any(failure.defect for failure in failures) else 2)


def _words(error: BaseException) -> tuple[str, int]:
    """The message and exit code for an error; one that is a defect is raised again."""
    if isinstance(error, PipelineError):
        return str(error), 2
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _explain(error), 2
    if isinstance(error, OSError) and not _progress.begun:
        return f"paths.work: {error}; choose a folder that can be written", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command continues from the last finished shard or checkpoint", 130
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
