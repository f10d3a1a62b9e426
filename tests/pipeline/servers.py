"""MLflow's own server as a process on 127.0.0.1, for tests that ask it or look at its page."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline import server
from pipeline.errors import PipelineError
from tests.pipeline.conftest import ENVIRONMENT

SECONDS = 180  # until it must answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(kind: str, folder: Path, *options: str) -> Iterator[str]:
    """``mlflow KIND`` in ``folder`` with its log beside it, one worker; gives its URI once it answers."""
    port = free_port()
    arguments = [sys.executable, "-m", "mlflow", kind, "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(arguments, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
    uri, limit = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit, (folder / "log").read_text()
            with contextlib.suppress(PipelineError):
                server.demand(uri)
                break
            time.sleep(0.5)
        yield uri
    finally:
        process.terminate()
        process.wait(60)
