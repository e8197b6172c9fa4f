"""Where ranges of tensors lie: in which slabs, and for many small ranges at once, in which windows of these slabs.

A slab's blocks are read once for all ranges that lie in them. Reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage.errors import NotFoundError
from storage.integrity import BLOCK_BYTES
from storage.shard import DType, Kind
from storage.slab import Slab
from storage.slices import in_slices
from storage.tiers.base import round_up
from storage.versions import Job

# Each range of a gathering begins at a multiple of this, which every element type's size divides.
GATHER_ALIGNMENT = 16
# What lies farther apart than a block is read apart, and no window is longer than this but for one range.
_MOST_WINDOW_BYTES = 8 * BLOCK_BYTES


class TensorRange(NamedTuple):
    """Elements `[offset, offset + numel)` of one kind of a flattened tensor; `numel` > 0."""

    fqn: str
    kind: Kind
    offset: int
    numel: int


class _Piece(NamedTuple):
    """Bytes `[start, stop)` of a slab, which go to byte `at` of the buffer."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Window:
    """Pieces of one slab that are read together: all of them are in bytes `[start, stop)`."""

    start: int
    stop: int
    pieces: Sequence[_Piece]

    async def copy(self, first: int, data: bytes, view: memoryview) -> None:
        """Copy what the pieces need of `data`, the slab's bytes from byte `first` on, to its places in `view`."""
        end = first + len(data)
        async for start, stop, at in in_slices(self.pieces):
            lower, upper = max(start, first), min(stop, end)
            if lower < upper:
                view[at + lower - start : at + upper - start] = data[lower - first : upper - first]


class Gathering:
    """Many ranges of a job's tensors, to be read into one buffer of `nbytes`, in their order, each from a multiple of
    GATHER_ALIGNMENT on. `dtype`: the element type of the first."""

    def __init__(self, dtype: DType) -> None:
        """For `of`."""
        self.dtype = dtype
        self.nbytes = 0
        self._pieces: dict[Slab, list[_Piece]] = {}

    @classmethod
    async def of(cls, job: Job, ranges: Sequence[TensorRange]) -> Gathering:
        """Find the ranges, of which there is at least one.

        Raises:
            NotFoundError: this store does not have all of them.
        """
        first = next(parts_of(job, *ranges[0]))[0]
        gathering = cls(first.spec.dtype)
        async for range_ in in_slices(ranges):
            gathering.nbytes = round_up(gathering.nbytes, GATHER_ALIGNMENT)
            async for slab, position, count in in_slices(parts_of(job, *range_)):
                start, stop = (n * slab.spec.dtype.itemsize for n in (position, position + count))
                gathering._pieces.setdefault(slab, []).append(_Piece(start, stop, gathering.nbytes))
                gathering.nbytes += stop - start
        return gathering

    def windows(self) -> Iterator[tuple[Slab, Window]]:
        """Return what to read of each slab."""
        return ((slab, window) for slab, pieces in self._pieces.items() for window in _windows(sorted(pieces)))


def parts_of(job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> Iterator[tuple[Slab, int, int]]:
    """Return the slabs that hold elements `[offset, offset + numel)` of a tensor, in order, and of each the position
    and the number of the elements there.

    Raises:
        NotFoundError: this store does not have all of them.
    """
    end = offset + numel
    while offset < end:
        placed = job.index.locate(fqn, offset)
        if placed is None:
            raise NotFoundError(f"job {job.spec.name!r} has no element {offset} of {fqn!r} on this node")
        shard, group = placed
        count = min(end, shard.offset + shard.numel) - offset
        yield group.slab(kind, job.spec.name), shard.position + offset - shard.offset, count
        offset += count


def _windows(pieces: Iterable[_Piece]) -> Iterator[Window]:
    """Cut ascending pieces into windows."""
    together: list[_Piece] = []
    start = stop = 0
    for piece in pieces:
        if together and (piece.start - stop > BLOCK_BYTES or piece.stop - start > _MOST_WINDOW_BYTES):
            yield Window(start, stop, together)
            together = []
        if not together:
            start = stop = piece.start
        together.append(piece)
        stop = max(stop, piece.stop)
    if together:
        yield Window(start, stop, together)
