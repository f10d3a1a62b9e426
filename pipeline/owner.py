"""Which process a run belongs to, and whether that process is gone. It knows host names and process numbers, no store."""

import os
import socket
from collections.abc import Mapping

_HOST, _PROCESS = "draftsmith.host", "draftsmith.pid"


def tags() -> dict[str, str]:
    """What marks a run as this process's."""
    return {_HOST: socket.gethostname(), _PROCESS: str(os.getpid())}


def gone(marked: Mapping[str, str]) -> bool:
    """Whether the process of a run with these tags was on this machine and is no more."""
    number = marked.get(_PROCESS, "")
    return marked.get(_HOST) == socket.gethostname() and number.isdigit() and not _alive(int(number))


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
