"""Whether a tracking server answers, asked once and briefly: MLflow's own client goes on asking for minutes.

A server that need not answer is given up for the local store, with a warning and a note in the output folder. It knows
nothing of MLflow but that its servers speak HTTP.
"""

import http.client
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from pipeline.config import Tracking
from pipeline.errors import PipelineError

SECONDS = 5.0  # for a server to answer
NOTE = "tracking-server-unreachable.txt"
_GATEWAY = (502, 503, 504)  # something answers in the server's place


class UnreachableError(PipelineError):
    """No tracking server answers."""


def demand(uri: str) -> None:
    """Refuse a server that does not answer; a ``uri`` that is no server's has nothing to answer.

    Raises:
        UnreachableError: naming the URI, what was met, and what to do.
    """
    if not uri.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SECONDS):
            return
    except urllib.error.HTTPError as error:  # who asks for a password or does not know this page is there
        if error.code not in _GATEWAY:
            return
        met = str(error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # it is there; MLflow's own settings say which certificates will do
            return
        met = str(reason) or type(reason).__name__
    raise UnreachableError(
        f"tracking.uri={uri}: no server answers there ({met}); start it, correct the address, or give "
        "tracking.required=false to keep the runs in a local store under paths.work"
    )


def settled(tracking: Tracking, folder: Path, joins: bool) -> Tracking:
    """The tracking that will be used: as configured, or the local store if the server is away and not required.

    Args:
        folder: the output folder of an execution, or the one that all jobs of a sweep share.
        joins: this is a job, whose sweep has decided before; it never goes to another store than its sweep.

    Raises:
        UnreachableError: the server does not answer and is required, or holds the sweep.
    """
    note = folder / NOTE
    if joins and note.is_file():
        return _local(tracking)
    try:
        demand(tracking.uri or "")
    except UnreachableError as error:
        if joins or tracking.required:
            raise
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{error}\nNothing was sent there.\n")
        return _local(tracking)
    note.unlink(missing_ok=True)
    return tracking


def _local(tracking: Tracking) -> Tracking:
    sys.stderr.write(
        f"draftsmith: warning: tracking.uri={tracking.uri} did not answer and tracking.required=false: NOTHING IS SENT THERE, "
        "neither now nor later; this run is kept in the local store under paths.work alone\n"
    )
    return replace(tracking, uri=None)
