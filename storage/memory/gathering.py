"""The mapping of tensor ranges to slabs, and of many ranges to the parts of these slabs that are read for them.

Bytes that can be read directly to their place in the buffer are read so. The others are copied out of stretches; each
stretch is read once for all ranges that lie in it. This module must not read anything itself, because `reader.py` does
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage.base.codec import EncodedLayout
from storage.base.errors import NotFoundError
from storage.base.integrity import BLOCK_BYTES
from storage.base.shard import DType, Kind
from storage.base.slices import in_slices
from storage.state.slab import Slab
from storage.state.versions import Job
from storage.tiers.base import PAGE_BYTES, round_up

# The store reads several ranges of tensors into one buffer. Each range begins there at a multiple of this many bytes,
# which is a multiple of all element sizes.
GATHER_ALIGNMENT = 16
# The most bytes of one slab that are read at once for several ranges. A read also ends before a gap of more than one
# block between two ranges. Only a single range that is longer makes a longer read.
_MOST_STRETCH_BYTES = 8 * BLOCK_BYTES


class TensorRange(NamedTuple):
    """The elements `[offset, offset + numel)` of one kind of a flattened tensor; `numel` > 0."""

    fqn: str
    kind: Kind
    offset: int
    numel: int


class InPlace(NamedTuple):
    """The bytes `[start, start + nbytes)` of a plain slab, which are whole blocks and go to byte `at` of the buffer.

    Byte `at` is the first one of a page.
    """

    slab: Slab
    start: int
    at: int
    nbytes: int


class _Piece(NamedTuple):
    """The bytes `[start, stop)` of a slab's elements, which are copied to byte `at` of the buffer after the read."""

    start: int
    stop: int
    at: int

    def continues(self, before: _Piece) -> bool:
        """Return whether this piece is as far behind `before` in the slab as in the buffer.

        The two are then read as one piece. Between them there is only the padding that aligns the second one.
        """
        gap = self.start - before.stop
        return 0 <= gap < GATHER_ALIGNMENT and self.at - before.at == self.start - before.start


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pieces of one slab that are read together. All of them are in bytes `[start, stop)` of its elements."""

    start: int
    stop: int
    pieces: Sequence[_Piece]

    async def copy(self, first: int, data: bytes, view: memoryview) -> None:
        """Copy the parts of the pieces that are in `data` to their places in `view`.

        Args:
            first: the byte of the slab's elements at which `data` begins.
            data: some consecutive bytes of the elements.
            view: the whole buffer of the gathering.
        """
        end = first + len(data)
        async for start, stop, at in in_slices(self.pieces):
            lower, upper = max(start, first), min(stop, end)
            if lower < upper:
                view[at + lower - start : at + upper - start] = data[lower - first : upper - first]


class Gathering:
    """The plan for a read of many ranges of a job's tensors into one buffer: which bytes of which slab go where.

    The buffer has the ranges in their order, each from a multiple of GATHER_ALIGNMENT on.

    Attributes:
        dtype: the element type of the first range.
        nbytes: the size of the buffer.
        in_place: the parts that are read directly into the buffer, without a copy.
    """

    def __init__(self, dtype: DType) -> None:
        """Make an empty gathering; only `of` calls this."""
        self.dtype = dtype
        self.nbytes = 0
        self.in_place: list[InPlace] = []
        self._pieces: dict[Slab, list[_Piece]] = {}

    @classmethod
    async def of(cls, job: Job, ranges: Sequence[TensorRange]) -> Gathering:
        """Return the gathering of at least one range.

        Raises:
            NotFoundError: this store does not have all elements of the ranges.
        """
        first = next(parts_of(job, *ranges[0]))[0]
        gathering = cls(first.spec.dtype)
        run: tuple[Slab, _Piece] | None = None
        async for range_ in in_slices(ranges):
            gathering.nbytes = round_up(gathering.nbytes, GATHER_ALIGNMENT)
            async for slab, offset, count in in_slices(parts_of(job, *range_)):
                start, stop = (n * slab.layout.itemsize for n in (offset, offset + count))
                piece = _Piece(start, stop, gathering.nbytes)
                gathering.nbytes += stop - start
                if run is not None and run[0] is slab and piece.continues(run[1]):
                    run = slab, run[1]._replace(stop=stop)
                    continue
                if run is not None:
                    gathering._add(*run)
                run = slab, piece
        if run is not None:
            gathering._add(*run)
        return gathering

    def _add(self, slab: Slab, piece: _Piece) -> None:
        start, stop, at = piece
        if whole := bytes_in_place(slab, start, stop, at):
            self.in_place.append(InPlace(slab, start, at, whole))
        if start + whole < stop:
            self._pieces.setdefault(slab, []).append(_Piece(start + whole, stop, at + whole))

    def stretches(self) -> Iterator[tuple[Slab, Stretch]]:
        """Return the stretches of all slabs, each with its slab. The reader reads them and copies their pieces."""
        return ((slab, stretch) for slab, pieces in self._pieces.items() for stretch in _stretches(sorted(pieces)))


def parts_of(job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> Iterator[tuple[Slab, int, int]]:
    """Find the slabs that hold elements `[offset, offset + numel)` of one kind of a tensor.

    Yields:
        For each slab, in the order of the elements: the slab, the offset of its first wanted element there, and the
        number of wanted elements.

    Raises:
        NotFoundError: this store does not have all of the elements.
    """
    end = offset + numel
    while offset < end:
        placed = job.index.locate(fqn, offset)
        if placed is None:
            raise NotFoundError(f"job {job.spec.name!r} has no element {offset} of {fqn!r} on this node")
        shard, group = placed
        count = min(end, shard.offset + shard.numel) - offset
        yield group.slab(kind, job.spec.name), shard.group_offset + offset - shard.offset, count
        offset += count


def bytes_in_place(slab: Slab, start: int, stop: int, at: int) -> int:
    """Return how many of a slab's bytes `[start, stop)`, from `start` on, can be read directly to byte `at` of a range.

    A direct read needs whole checksum blocks of a plain slab, whose place begins with a page.
    """
    if isinstance(slab.layout, EncodedLayout) or start % BLOCK_BYTES or at % PAGE_BYTES:
        return 0
    return (stop - start) // BLOCK_BYTES * BLOCK_BYTES


def _stretches(pieces: Iterable[_Piece]) -> Iterator[Stretch]:
    """Group pieces, which are sorted by `start`, into stretches."""
    together: list[_Piece] = []
    start = stop = 0
    for piece in pieces:
        if together and (piece.start - stop > BLOCK_BYTES or piece.stop - start > _MOST_STRETCH_BYTES):
            yield Stretch(start, stop, together)
            together = []
        if not together:
            start = stop = piece.start
        together.append(piece)
        stop = max(stop, piece.stop)
    if together:
        yield Stretch(start, stop, together)
