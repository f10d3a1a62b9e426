"""Ctrl-C and SIGTERM, remembered: a run that was asked to stop ends as interrupted, whatever exception reaches the top.

Native code that is interrupted may turn KeyboardInterrupt into an error of its own (safetensors makes it a ValueError).
It knows no run and no exit code.
"""

import signal
from types import FrameType

_received = False


def watch() -> None:
    """Raise KeyboardInterrupt on both signals from now on, and forget those of before.

    A signal that the shell had us ignore (a job in the background) stays ignored.
    """
    global _received
    _received = False
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def received() -> bool:
    """Whether one of the signals has come since ``watch``."""
    return _received


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    _received = True
    raise KeyboardInterrupt
