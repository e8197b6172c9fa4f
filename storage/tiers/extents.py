"""Which blocks of the NVMe data file are free: an allocator of extents. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from storage.tiers.base import round_up
from storage.tiers.free_runs import FreeRuns


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` (whole blocks) at byte `offset` of data file number `file`."""

    offset: int
    nbytes: int
    file: int = 0


class ExtentAllocator:
    """The free extents. Allocation is best fit, and splits only where no run is long enough."""

    def __init__(self) -> None:
        self._free = FreeRuns()

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self._free.free_bytes

    def add(self, extent: Extent) -> None:
        """Makes an extent free."""
        self._free.add(extent.offset, extent.offset + extent.nbytes)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Takes extents of `nbytes` (rounded up to blocks) in all; None where there is not that much."""
        need = round_up(nbytes)
        if need > self.free_bytes:
            return None
        taken: list[Extent] = []
        while need:
            run = self._best_run(need)
            start, end = self._free[run]
            length = min(need, end - start)
            taken.append(Extent(self._free.cut(run, length), length))
            need -= length
        return tuple(taken)

    def _best_run(self, need: int) -> int:
        """The shortest run that holds `need`, else the longest one."""
        lengths = list(self._free.lengths())
        fitting = [(length, i) for i, length in enumerate(lengths) if length >= need]
        return min(fitting)[1] if fitting else max(range(len(lengths)), key=lengths.__getitem__)


def unused_runs(size_bytes: int, used: Iterable[Extent]) -> list[Extent]:
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
