"""One tile of an update: the memory of its bytes in each kind, and the work of a kernel on them, part by part.

This module owns no memory and no region. It must never touch a part whose bytes are not all verified.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from storage.base.codec import EncodedLayout, SlabLayout
from storage.base.errors import DamagedBlockError
from storage.base.shard import DType, Kind
from storage.state.slab import HostCopy, Slab
from storage.tiers.base import round_up
from storage.tiers.contract import Move, Region

MAX_TILE_ELEMENTS = 1 << 21
# The most elements that an optimizer kernel gets at a time. The bytes of such a part of a tile are verified, updated
# and recorded while they are in the processor's cache. Where nothing is verified or recorded, a kernel gets the whole
# tile, because threads wait for the interpreter's lock at each part.
PART_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTile:
    """The part of a group that one call of a kernel works on, in each kind, as 1-D tensors.

    Attributes:
        start: the first element in the group.
        numel: the number of elements, at most MAX_TILE_ELEMENTS.
        tensors: the parameter, master weight and states of these elements.
        gradient: the gradient of these elements, in its own dtype.
        scratch: `numel` fp32 elements with undefined contents.
    """

    start: int
    numel: int
    tensors: Mapping[Kind, torch.Tensor]
    gradient: torch.Tensor
    scratch: torch.Tensor


Kernel = Callable[[UpdateTile], None]


@dataclass(slots=True, kw_only=True)
class Passage:
    """The state of one slab while a kernel updates it: where its old bytes are, and where its new bytes go."""

    slab: Slab
    reads: bool
    # The host copy of the slab that the kernel works on in place; None if the kernel works in a tile's buffer.
    copy: HostCopy | None
    # The region that the old bytes are read from if no copy holds them. It is held until the update ends.
    source: Region | None
    # The new extents that the result is written to; None for a slab without a backing tier.
    target: Region | None
    # The host copy of the old bytes, if the kernel writes its result to another copy.
    before: HostCopy | None = None
    # The step of the bytes that `copy` still has if the update fails; None once a kernel may have changed them.
    kept_step: int | None = None
    # True while this update waits for the update of another group. The host cache may then evict `copy`, because many
    # waiting groups would otherwise fill the host tier.
    evictable: bool = False


def pages_of(span: slice) -> slice:
    """Return the whole pages that begin with the bytes of a tile, which begins with a page."""
    return slice(span.start, span.start + round_up(span.stop - span.start))


class Scratch(threading.local):
    """Scratch tensors for each thread that runs kernels, so that they stay in that processor's cache."""

    def __init__(self) -> None:
        self.tensor = torch.empty(MAX_TILE_ELEMENTS, dtype=torch.float32)
        self._decoded: dict[Kind, torch.Tensor] = {}

    def decoded(self, kind: Kind) -> torch.Tensor:
        """Return room for the decoded elements of one part of a tile."""
        if kind not in self._decoded:
            self._decoded[kind] = torch.empty(PART_ELEMENTS, dtype=torch.float32)
        return self._decoded[kind]


class Mapped:
    """The bytes of one kind in one tile, which are in `view`, whole pages of host memory.

    Attributes:
        source: the region from which the bytes are read; None if they are in memory already.
    """

    def __init__(
        self, view: memoryview, start: int, dtype: DType, layout: SlabLayout, source: Region | None = None
    ) -> None:
        """Make the part of a tile that begins with element `start` of the group."""
        self.source = source
        self._view = view
        self._start = start
        self._offset = layout.bytes_of(start, start).start
        self._dtype = dtype.torch
        self._layout = layout

    @cached_property
    def elements(self) -> torch.Tensor:
        """The elements of plain bytes, in the same memory."""
        return torch.frombuffer(self._view, dtype=self._dtype)

    def move(self, region: Region, first: int, end: int | None) -> Move[Region]:
        """Return elements `[first, end)` of the tile as a move from or to a region.

        Without `end` the move goes to the end of the tile's last page.
        """
        span = self._span(first, first + 1 if end is None else end)
        return Move(region, self._offset + span.start, self._view[span.start : None if end is None else span.stop])

    def _span(self, first: int, end: int) -> slice:
        """Return the bytes of `view` that hold elements `[first, end)` of the tile."""
        span = self._layout.bytes_of(self._start + first, self._start + end)
        return slice(span.start - self._offset, span.stop - self._offset)


class MappedSlab(Mapped):
    """The bytes of one plain slab in one tile, with the regions that they are read from and written to.

    A kernel works on them in place.
    """

    def __init__(self, passage: Passage, view: memoryview, start: int, before: memoryview | None) -> None:
        super().__init__(view, start, passage.slab.spec.dtype, passage.slab.layout, passage.source)
        self.passage = passage
        self.kind = passage.slab.key.kind
        self.target = passage.target
        self.begins_as_zeros = passage.reads and passage.slab.latest is None
        # The slab's old bytes, if the kernel writes its result to another copy than theirs; None if it works in place.
        self._before = before

    def load(self, first: int, end: int, _: Scratch) -> torch.Tensor:
        """Return elements `[first, end)` of the tile, which the kernel changes: the old ones if it reads them."""
        elements = self.elements[first:end]
        if self.begins_as_zeros:
            elements.zero_()
        elif self._before is not None:
            elements.copy_(torch.frombuffer(self._before, dtype=self._dtype)[first:end])
        return elements

    def store(self, first: int, end: int, elements: torch.Tensor) -> None:
        """Put the elements that `load` returned, and the kernel has changed, into the bytes of the tile.

        The elements of a plain slab are there already.
        """


class EncodedSlab(MappedSlab):
    """The bytes of one encoded slab in one tile. A kernel works on its elements in scratch memory."""

    _layout: EncodedLayout

    def load(self, first: int, end: int, scratch: Scratch) -> torch.Tensor:
        """Return decoded elements; see `MappedSlab.load`."""
        elements = scratch.decoded(self.kind)[: end - first]
        if self.begins_as_zeros:
            elements.zero_()
        elif self.passage.reads:
            old = self._view if self._before is None else self._before
            self._layout.decode(old[self._span(first, end)], self._start + first, elements)
        return elements

    def store(self, first: int, end: int, elements: torch.Tensor) -> None:
        """Encode the elements; see `MappedSlab.store`."""
        self._layout.encode(elements, self._start + first, self._view[self._span(first, end)])


class Parts:
    """The work on one tile in an optimizer thread, part by part, so that each part stays in the processor's cache.

    The bytes of all kinds are verified before the kernel touches a part, so a part is either done or unchanged.
    """

    def __init__(
        self,
        start: int,
        numel: int,
        mapped: Sequence[MappedSlab],
        gradient: Mapped,
        kernel: Kernel,
        scratch: Scratch,
    ) -> None:
        self._start = start
        self._numel = numel
        self._mapped = mapped
        self._gradient = gradient
        self._kernel = kernel
        self._scratch = scratch
        in_memory = gradient.source is None and all(
            m.source is None and m.target is None and not isinstance(m, EncodedSlab) for m in mapped
        )
        self._part = numel if in_memory else PART_ELEMENTS

    def end_of(self, first: int) -> int:
        """Return the end of the part that begins at element `first` of the tile."""
        return min(first + self._part, self._numel)

    def reads(self, first: int, end: int) -> list[Move[Region]]:
        """Return the reads from backing tiers that elements `[first, end)` of the tile need."""
        return self._moves(((m, m.source) for m in (*self._mapped, self._gradient)), first, end)

    def writes(self, first: int = 0, end: int | None = None) -> list[Move[Region]]:
        """Return the writes to backing tiers of elements `[first, end)` of the tile, by default of the whole tile."""
        return self._moves(((m, m.target) for m in self._mapped), first, self._numel if end is None else end)

    def _moves(self, places: Iterable[tuple[Mapped, Region | None]], first: int, end: int) -> list[Move[Region]]:
        """Return the moves between elements `[first, end)` of the tile and their regions, as far as they have bytes."""
        stop = end if end < self._numel else None
        moves = [mapped.move(region, first, stop) for mapped, region in places if region is not None]
        return [move for move in moves if move.buffer]

    def work(self, first: int) -> int:
        """Work on the parts from element `first` on.

        Returns:
            The first element of a part whose bytes are wrong, or the tile's number of elements if all parts are done.
        """
        while first < self._numel:
            end = self.end_of(first)
            try:
                for region, offset, buffer in self.reads(first, end):
                    region.verify(offset, buffer)
            except DamagedBlockError:
                return first
            for m in self._mapped:
                # From here on the kernel may change the slab's host copy, so if the update fails, the copy no longer
                # counts as the bytes of its step.
                m.passage.kept_step = None
            tensors = {m.kind: m.load(first, end, self._scratch) for m in self._mapped}
            self._kernel(
                UpdateTile(
                    start=self._start + first,
                    numel=end - first,
                    tensors=tensors,
                    gradient=self._gradient.elements[first:end],
                    scratch=self._scratch.tensor[: end - first],
                )
            )
            for m in self._mapped:
                m.store(first, end, tensors[m.kind])
            for region, offset, buffer in self.writes(first, end):
                region.record(offset, buffer)
            first = end
        return self._numel
