"""Which blocks of a data file are free: an allocator of extents. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage.tiers.base import round_up
from storage.tiers.free_runs import FreeRuns

# Less than a checksum's block, for little to be lost of a run that is split: see NvmeRegion.blocks_are_whole.
SPLIT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` (whole pages) at byte `offset` of data file number `file`."""

    offset: int
    nbytes: int
    file: int = 0

    @property
    def end(self) -> int:
        """Where the next extent can begin."""
        return self.offset + self.nbytes


class ExtentAllocator:
    """The free extents of one file.

    Allocation is best fit, and splits only where no run is long enough: then at multiples of SPLIT_BYTES.
    """

    def __init__(self, file: int = 0) -> None:
        self._file = file
        self._free = FreeRuns()

    def __len__(self) -> int:
        """The number of free runs."""
        return len(self._free)

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return self._free.free_bytes

    @property
    def usable_bytes(self) -> int:
        """What one allocation can get at most: runs shorter than SPLIT_BYTES can only be the last part of one."""
        return self._free.whole_units(SPLIT_BYTES) * SPLIT_BYTES

    def add(self, extent: Extent) -> None:
        """Makes an extent free."""
        self._free.add(extent.offset, extent.end)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Takes extents of `nbytes` (rounded up to pages) in all; None where there is not that much."""
        need = round_up(nbytes)
        taken: list[Extent] = []
        while need:
            extent = self._take(need)
            if extent is None:
                for taken_back in taken:
                    self.add(taken_back)
                return None
            taken.append(extent)
            need -= extent.nbytes
        return tuple(taken)

    def _take(self, need: int) -> Extent | None:
        """`need` from the shortest run that holds it, else all of the longest one that a split may take."""
        shortest = self._free.shortest_fit(need)
        if shortest is not None:
            return Extent(self._free.cut(shortest, need), need, self._file)
        longest = self._free.longest()
        if longest is None:
            return None
        start, end = self._free[longest]
        whole = (end - start) // SPLIT_BYTES * SPLIT_BYTES
        return Extent(self._free.cut(longest, whole), whole, self._file) if whole else None


def unused_runs(size_bytes: int, used: Iterable[Extent], file: int = 0) -> list[Extent]:
    """What `used` leaves free of a file of `size_bytes`.

    Raises:
        ValueError: two used extents overlap, or one leaves the file.
    """
    runs: list[Extent] = []
    position = 0
    for extent in sorted(used, key=lambda extent: extent.offset):
        if extent.offset < position or extent.end > size_bytes:
            raise ValueError(f"extent at {extent.offset} of {extent.nbytes} bytes overlaps another or leaves the file")
        if extent.offset > position:
            runs.append(Extent(position, extent.offset - position, file))
        position = extent.end
    if position < size_bytes:
        runs.append(Extent(position, size_bytes - position, file))
    return runs


def without(extent: Extent, holes: Iterable[Extent]) -> Iterator[Extent]:
    """The parts of an extent that no hole, of those in the same file, covers."""
    start = extent.offset
    for hole in sorted(holes, key=lambda hole: hole.offset):
        if hole.file != extent.file or hole.end <= start or hole.offset >= extent.end:
            continue
        if hole.offset > start:
            yield Extent(start, hole.offset - start, extent.file)
        start = hole.end
    if start < extent.end:
        yield Extent(start, extent.end - start, extent.file)


def overlapping(extents: Iterable[Extent], offset: int, nbytes: int) -> Iterator[Extent]:
    """Where bytes `[offset, offset + nbytes)` of the sequence of `extents` are."""
    for extent in extents:
        start, end = max(offset, 0), min(offset + nbytes, extent.nbytes)
        if start < end:
            yield Extent(extent.offset + start, end - start, extent.file)
        offset -= extent.nbytes
