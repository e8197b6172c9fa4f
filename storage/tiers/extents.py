"""Which blocks of the NVMe data file are free: an allocator of extents. Does no I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from storage.tiers.base import round_up


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` (whole blocks) at byte `offset` of the data file."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Free space as sorted, disjoint runs that never touch.

    Allocation is best fit, and splits only where no run is long enough.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.free_bytes = 0

    def add(self, extent: Extent) -> None:
        """Makes an extent free; joins it with its neighbours."""
        start, end = extent.offset, extent.offset + extent.nbytes
        self.free_bytes += extent.nbytes
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Takes extents of `nbytes` (rounded up to blocks) in all; None where there is not that much."""
        need = round_up(nbytes)
        if need > self.free_bytes:
            return None
        taken: list[Extent] = []
        while need:
            i = self._best_run(need)
            start, end = self._starts[i], self._ends[i]
            length = min(need, end - start)
            taken.append(Extent(start, length))
            if start + length == end:
                del self._starts[i], self._ends[i]
            else:
                self._starts[i] = start + length
            self.free_bytes -= length
            need -= length
        return tuple(taken)

    def _best_run(self, need: int) -> int:
        """The shortest run that holds `need`, else the longest one."""
        lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        fitting = [(length, i) for i, length in enumerate(lengths) if length >= need]
        if fitting:
            return min(fitting)[1]
        return max(range(len(lengths)), key=lengths.__getitem__)


def free_runs(size_bytes: int, used: Iterable[Extent]) -> list[Extent]:
    """What `used` leaves free of a file of `size_bytes`.

    Raises:
        ValueError: two used extents overlap, or one leaves the file.
    """
    runs: list[Extent] = []
    position = 0
    for extent in sorted(used, key=lambda extent: extent.offset):
        if extent.offset < position or extent.offset + extent.nbytes > size_bytes:
            raise ValueError(f"extent at {extent.offset} of {extent.nbytes} bytes overlaps another or leaves the file")
        if extent.offset > position:
            runs.append(Extent(position, extent.offset - position))
        position = extent.offset + extent.nbytes
    if position < size_bytes:
        runs.append(Extent(position, size_bytes - position))
    return runs
