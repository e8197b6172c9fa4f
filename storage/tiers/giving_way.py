"""The choice of copies that give way to another one in memory of which only a directory is here.

This module owns nothing. The directories of the gpu tier and of the remote tier use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from storage.tiers.free_runs import FreeRuns


class PlacedCopy(Protocol):
    """A copy that has bytes [offset, offset + room_bytes) of the memory."""

    @property
    def offset(self) -> int: ...
    @property
    def room_bytes(self) -> int: ...


PlacedT = TypeVar("PlacedT", bound=PlacedCopy)


def giving_way(free: FreeRuns, room_bytes: int, candidates: Iterable[PlacedT]) -> Sequence[PlacedT]:
    """Return the copies without which `room_bytes` are free in one piece; none if there is no such piece.

    Args:
        free: the free room, in which no piece is long enough; it is not changed.
        candidates: the copies that may give way, in the order in which they do.
    """
    runs = FreeRuns()
    for index in range(len(free)):
        runs.add(*free[index])
    passed: list[PlacedT] = []
    for copy in candidates:
        passed.append(copy)
        runs.add(copy.offset, copy.offset + copy.room_bytes)
        if (index_ := runs.shortest_fit(room_bytes)) is not None:
            start = runs.cut(index_, room_bytes)
            # The piece begins where a run does, so no copy reaches into it from before.
            return [one for one in passed if start <= one.offset < start + room_bytes]
    return ()
