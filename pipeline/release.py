"""What a job of a sweep that failed must not leave in memory: its models, in the frames of its traceback.

Hydra keeps the exception of each job until the sweep ends, and an exception holds every local variable on its way up.
It knows no job and no store.
"""

import traceback


def clear(error: BaseException) -> None:
    """Forget the local variables in the tracebacks of ``error`` and of what led to it; the traces stay readable."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
