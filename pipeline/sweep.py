"""A sweep: one run that holds the runs of its jobs, begun before the first job and ended after the last.

The same command, given again, goes on below the same run: jobs whose results are all there are not repeated. It knows
neither Hydra nor how jobs are launched; jobs find their sweep by its token, in whichever process they are.
"""

import math
from pathlib import Path

from data.artifact import fingerprint
from pipeline import tracking
from pipeline.config import Tracking
from pipeline.tracking import Failure, Run

_PLACES = ("paths.", "tracking.")  # where things lie does not make another sweep


def begin(config: Tracking, work: Path, overrides: list[str], values: dict[str, object], token: str) -> Run:
    """Open the run of the sweep.

    Args:
        overrides: the command's, with the choices that are swept.
        values: the configuration that the jobs have in common, by dotted key.
        token: what the jobs of this execution of the sweep, and they alone, know.

    Raises:
        PipelineError: the store cannot be used.
    """
    chosen = sorted(text for text in overrides if not text.startswith(_PLACES))
    shared = {key: value for key, value in values.items() if not key.startswith(_PLACES)}
    name = f"sweep {' '.join(chosen)}"[:200]
    return tracking.open_sweep(config, work, name, fingerprint({"overrides": chosen, "values": shared}), token)


def end(run: Run, error: BaseException | None) -> list[Failure]:
    """Close the run of the sweep as ``error`` demands, and give the jobs that failed.

    A sweep that was refused before its first job leaves no run.
    """
    failures = run.failures()
    if isinstance(error, KeyboardInterrupt):
        run.end("KILLED")
    elif error is None and not failures:
        run.end("FINISHED")
    elif error is not None and not run.children():
        run.remove()
    else:
        run.end("FAILED")
    return failures


def message(failures: list[Failure]) -> str:
    """What went wrong, job by job."""
    lines = [f"  {failure.overrides}\n    {failure.error.strip().replace(chr(10), chr(10) + '    ')}" for failure in failures]
    jobs = "one job" if len(lines) == 1 else f"{len(lines)} jobs"
    return "\n".join([f"{jobs} of the sweep failed, the others are finished:", *lines])


def outcome(config: Tracking, work: Path, token: str, results: str) -> float | None:
    """The speed ratio of the job below this sweep that has these results (NaN if it decoded nothing); None if none has."""
    done = tracking.finished(config, work, token, results)
    return None if done is None else done.get("speed/ratio", math.nan)
