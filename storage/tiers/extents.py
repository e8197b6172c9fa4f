"""The allocator of extents in a data file: it knows which parts of the file are free. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from storage.tiers.base import round_up
from storage.tiers.free_runs import FreeRuns

# Extents are split at multiples of this many bytes. It is less than a checksum's block, so that little of a free run
# stays unused. A block may then lie in several extents; see NvmeRegion.blocks_are_whole.
SPLIT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a data file: `nbytes` (whole pages) at byte `offset` of data file number `file`."""

    offset: int
    nbytes: int
    file: int = 0

    @property
    def end(self) -> int:
        """The byte after the last one of the extent."""
        return self.offset + self.nbytes


class ExtentAllocator:
    """Allocates and frees extents of one data file.

    Allocation is best fit. Only if no free run is long enough, an allocation is split over several runs, at multiples
    of SPLIT_BYTES.
    """

    def __init__(self, file: int = 0) -> None:
        self._file = file
        self._free = FreeRuns()

    def __len__(self) -> int:
        """Return the number of runs in which the free bytes of the file lie."""
        return len(self._free)

    @property
    def free_bytes(self) -> int:
        """The bytes of the file that are in no allocated extent."""
        return self._free.free_bytes

    @property
    def usable_bytes(self) -> int:
        """The bytes that one allocation can certainly get.

        This leaves out the rests of runs below SPLIT_BYTES, because only the last part of an allocation can use them.
        """
        return self._free.whole_units(SPLIT_BYTES) * SPLIT_BYTES

    def add(self, extent: Extent) -> None:
        """Add an extent of the file to the free bytes."""
        self._free.add(extent.offset, extent.end)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Allocate extents of `nbytes` in all, rounded up to pages; None if the free runs do not suffice."""
        need = round_up(nbytes)
        taken: list[Extent] = []
        while need:
            extent = self._take(need)
            if extent is None:
                for part in taken:
                    self.add(part)
                return None
            taken.append(extent)
            need -= extent.nbytes
        return tuple(taken)

    def _take(self, need: int) -> Extent | None:
        """Allocate one extent: `need` bytes of the shortest run that holds them, else the longest run's whole units.

        Return None if no run has a unit of SPLIT_BYTES left.
        """
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
    """Return the parts of a file of `size_bytes` that are in none of the `used` extents.

    Raises:
        ValueError: two used extents overlap, or one ends behind the file's end.
    """
    runs: list[Extent] = []
    free_from = 0
    for extent in sorted(used, key=lambda extent: extent.offset):
        if extent.offset < free_from or extent.end > size_bytes:
            raise ValueError(f"extent at {extent.offset} of {extent.nbytes} bytes overlaps another or leaves the file")
        if extent.offset > free_from:
            runs.append(Extent(free_from, extent.offset - free_from, file))
        free_from = extent.end
    if free_from < size_bytes:
        runs.append(Extent(free_from, size_bytes - free_from, file))
    return runs


def without(extent: Extent, holes: Iterable[Extent]) -> Iterator[Extent]:
    """Yield the parts of an extent that none of the holes in the same file covers."""
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
    """Yield the parts of `extents` that hold the bytes `[offset, offset + nbytes)` of their concatenation."""
    for extent in extents:
        start, end = max(offset, 0), min(offset + nbytes, extent.nbytes)
        if start < end:
            yield Extent(extent.offset + start, end - start, extent.file)
        offset -= extent.nbytes
