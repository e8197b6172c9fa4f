"""The choice of copies to drop for a new one, in memory of another process of which this store has a directory only.

This module owns nothing. The directories of the gpu tier and of the remote tier use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from storage.tiers.free_runs import FreeRuns


class PlacedCopy(Protocol):
    """A copy of a slab in the other process's memory, where it takes bytes `[offset, offset + room_bytes)`."""

    @property
    def offset(self) -> int: ...
    @property
    def room_bytes(self) -> int: ...


PlacedT = TypeVar("PlacedT", bound=PlacedCopy)


def giving_way(free: FreeRuns, room_bytes: int, candidates: Iterable[PlacedT]) -> Sequence[PlacedT]:
    """Return the copies to drop so that `room_bytes` are free in one piece; none if dropping copies cannot do it.

    Args:
        free: the free runs of the memory, none of which is long enough. This function does not change them.
        candidates: the copies that may be dropped; the first ones are dropped first.
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
            # The piece that becomes free begins where a free run begins, so no copy that begins before the piece
            # reaches into it, and only copies that begin within it must be dropped.
            return [one for one in passed if start <= one.offset < start + room_bytes]
    return ()
