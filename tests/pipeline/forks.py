"""Processes of the pipeline that begin at once: forked from one that has imported everything, each leading its own session.

A fresh interpreter spends ten seconds on imports before it does anything, and a test that kills or interrupts a run is not
about them. What only a fresh interpreter shows is begun as one: the smoke run, what is said before anything is imported.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pipeline.main", "pipeline.flow"])  # threads of imports do not survive a fork; none is left


class Fork:
    """A process that has begun; used like a ``subprocess.Popen``."""

    def __init__(self, arguments: list[str], cwd: Path, environment: Mapping[str, str], output: Path, errors: Path) -> None:
        self._process = _CONTEXT.Process(target=_live, args=(arguments, cwd, dict(environment), output, errors), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pipeline", seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _live(arguments: list[str], cwd: Path, environment: dict[str, str], output: Path, errors: Path) -> None:
    """The life of a fork: ``python -m pipeline`` with these arguments."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as in a fresh process
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["draftsmith", *arguments]
    from pipeline.main import main

    main()
