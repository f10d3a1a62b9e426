"""A few of many, at even distances: what is timed should be like what is not.

Answers come longest prompt first, so the first few would be the longest alone. It knows nothing of what it is given.
"""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of ``items`` in their order, the middle one of each of ``count`` equal parts; all, if there are no more."""
    count = min(count, len(items))
    return [items[(2 * part + 1) * len(items) // (2 * count)] for part in range(count)]
