"""Streams the slabs of a group through a kernel, tile by tile: read-ahead | kernel | write-behind, all three busy.

Optimizers ride on this. The bytes of a committed version on NVMe are never overwritten: results go to new extents. A
copy in the host tier is worked on in place; a slab without one passes through tile buffers, so that the room needed
does not depend on the size of the group.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from storage.errors import BudgetExceededError, DamagedBlockError
from storage.host_cache import HostCache
from storage.integrity import BLOCK_BYTES
from storage.position_lock import PositionLock
from storage.shard import MAX_OPTIMIZER_STATES, Kind
from storage.slab import NEVER, Group, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Region, Transfer
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.waiting import settle

# Tiles are cut at whole blocks of the narrowest element type, so that each tile can be verified on its own everywhere.
TILE_QUANTUM = BLOCK_BYTES // 2
MAX_TILE_ELEMENTS = 1 << 21
# What a kernel gets at a time: a part of a tile whose bytes are verified, updated and recorded while they are in the
# processor's cache.
PART_ELEMENTS = 1 << 18
# Master weight and optimizer states in fp32, and the parameter in 16 bits.
BYTES_PER_TILE_ELEMENT = 4 * (1 + MAX_OPTIMIZER_STATES) + 2
# One is read, one worked on, two are written; the smallest budgets have to do with fewer.
TILE_SETS = 4
LEAST_TILE_SETS = 2
# What the tile sets take of the host budget, as far as that is between the next two.
TILE_BUDGET_FRACTION = 8
LEAST_TILE_BYTES = LEAST_TILE_SETS * TILE_QUANTUM * BYTES_PER_TILE_ELEMENT
MOST_TILE_BYTES = TILE_SETS * MAX_TILE_ELEMENTS * BYTES_PER_TILE_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a kernel works on: elements `[start, start + numel)` of the group, at most PART_ELEMENTS, in every kind, as
    1-D tensors.

    `gradient` has its own dtype; `scratch` is fp32, of the same length, with undefined contents.
    """

    start: int
    numel: int
    tensors: Mapping[Kind, torch.Tensor]
    gradient: torch.Tensor
    scratch: torch.Tensor


Kernel = Callable[[Tile], None]


@dataclass(slots=True, kw_only=True)
class _Stream:
    """How one slab passes through: where its old bytes come from and its new ones go."""

    slab: Slab
    reads: bool
    copy: HostCopy | None  # worked on in place, where there is one
    source: Region | None  # read from, where there is no usable copy; held meanwhile
    target: Region | None  # new extents
    lent: bool = False  # while the update waits, the copy may be dropped


def host_budget_for(other_bytes: int) -> int:
    """The smallest host budget that leaves `other_bytes` beside the tile buffers, whose share grows with it."""
    share = -(-other_bytes // (TILE_BUDGET_FRACTION - 1))
    return round_up(other_bytes + max(LEAST_TILE_BYTES, min(share, MOST_TILE_BYTES)))


class TilePool:
    """Equal buffers of the arena, taken at start and lent out in turn."""

    def __init__(self, host: HostTier) -> None:
        """Takes an eighth of the host budget, within limits; of the smallest budgets, half.

        Raises:
            BudgetExceededError: the budget is too small for the smallest tiles.
        """
        if host.budget_bytes < 2 * LEAST_TILE_BYTES:
            raise BudgetExceededError(
                f"host_budget {host.budget_bytes} is too small to run an optimizer; raise it to at least "
                f"{2 * LEAST_TILE_BYTES}"
            )
        self._host = host
        room = max(LEAST_TILE_BYTES, min(host.budget_bytes // TILE_BUDGET_FRACTION, MOST_TILE_BYTES))
        quanta = room // BYTES_PER_TILE_ELEMENT // TILE_QUANTUM
        self._sets = min(quanta, TILE_SETS)
        self.elements = quanta // self._sets * TILE_QUANTUM
        self._free: asyncio.Queue[ArenaRange] = asyncio.Queue()
        for _ in range(self._sets):
            region = host.arena.allocate(self.elements * BYTES_PER_TILE_ELEMENT)
            assert region is not None
            self._free.put_nowait(region)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._sets * round_up(self.elements * BYTES_PER_TILE_ELEMENT)

    async def take(self) -> ArenaRange:
        """One buffer, when there is one; to be given back with `give`."""
        return await self._free.get()

    def give(self, region: ArenaRange) -> None:
        """Gives a buffer back."""
        self._free.put_nowait(region)

    @asynccontextmanager
    async def buffer(self) -> AsyncIterator[memoryview]:
        """One buffer as plain bytes."""
        region = await self.take()
        try:
            yield self._host.view(region)
        finally:
            self.give(region)


class Transformer:
    """Runs kernels over groups: of those that wait, the next tile is of the one that is needed first. Tiles overlap."""

    def __init__(
        self, host: HostTier, backing: BackingTiers, host_cache: HostCache, tiles: TilePool, executor: Executor
    ) -> None:
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._tiles = tiles
        self._executor = executor
        self._position_lock = PositionLock()
        self._scratch = _Scratch()

    async def run(
        self,
        group: Group,
        step: int,
        *,
        reads: frozenset[Kind],
        gradient: torch.Tensor,
        kernel: Kernel,
        position: float,
    ) -> None:
        """Gives every slab of the group a new version `step`; `reads` are the kinds whose old bytes the kernel needs.

        A group with a lower `position` goes first, also between two tiles of this one. All or nothing: on an error the
        slabs' versions are as before, except that a copy in the host tier whose bytes are not on NVMe as well is lost.

        Raises:
            BudgetExceededError: there is no room for the new versions.
            DeviceError: a read or a write failed.
        """
        async with AsyncExitStack() as undo:
            # Not within the turn: what is in use now may be so for long.
            for slab in group.slabs:
                await self._idle(slab)
            streams: list[_Stream] = []
            tasks: list[asyncio.Task[None]] = []
            try:
                async with self._position_lock.at(position) as give_way:
                    streams = [await self._open_stream(slab, step, reads, position, undo) for slab in group.slabs]
                    for start in range(0, group.spec.numel, self._tiles.elements):
                        await give_way(partial(self._lend, streams, tasks))
                        self._take_back(streams)
                        region = await self._tiles.take()
                        tile = self._tile(region, group, start, streams, gradient, kernel)
                        tasks.append(asyncio.ensure_future(tile))
            finally:
                await settle(tasks)
            for stream in streams:
                self._finish(stream, step)

    async def _open_stream(
        self, slab: Slab, step: int, kinds_read: frozenset[Kind], position: float, undo: AsyncExitStack
    ) -> _Stream:
        await self._idle(slab)
        reads = slab.key.kind in kinds_read
        copy = self._copy_to_work_on(slab, position if slab.key.kind is Kind.PARAM else NEVER)
        stream = _Stream(slab=slab, reads=reads, copy=copy, source=None, target=None)
        undo.callback(self._release_source, stream)
        is_newest = copy is not None and copy.step == slab.latest
        if copy is not None:
            self._host_cache.pin(copy)
            copy.step = None
            undo.callback(self._drop_copy, stream)
        if not is_newest:
            self._hold_source(stream)
        if slab.backing is not None:
            new = self._backing.new_version(slab.backing, slab.nbytes, slab.label(step))
            stream.target = await undo.enter_async_context(new)
        return stream

    async def _lend(self, streams: Sequence[_Stream], tasks: Sequence[asyncio.Task[None]]) -> None:
        """While a group waits for one that is needed sooner, its copies give their room to whoever needs it: there may
        be many such groups. What they hold is on NVMe, too, tile by tile as it was or as it is now."""
        if tasks:
            await asyncio.wait(tasks)
        for stream in streams:
            if stream.copy is not None and not stream.copy.at_home:
                self._host_cache.lend(stream.slab, stream.copy)
                stream.lent = True

    def _take_back(self, streams: Sequence[_Stream]) -> None:
        """What is left of what was lent; the rest passes through tiles from here on."""
        for stream in streams:
            if stream.lent:
                stream.lent = False
                if stream.copy is not None and stream.slab.copy is stream.copy:
                    self._host_cache.pin(stream.copy)
                else:
                    stream.copy = None
                    self._hold_source(stream)

    def _hold_source(self, stream: _Stream) -> None:
        """Find where the old bytes are, if they are needed and there are any, and hold them there.

        A snapshot that runs beside the update may give their version another region: a durable one for a volatile one.
        """
        slab = stream.slab
        if stream.source is None and stream.reads and slab.latest is not None:
            stream.source = slab.source(slab.latest)
            self._backing.hold(stream.source)

    def _release_source(self, stream: _Stream) -> None:
        if stream.source is not None:
            self._backing.free(stream.source)

    def _drop_copy(self, stream: _Stream) -> None:
        """Drop the half-written copy of an update that failed. A finished stream has no copy left to drop."""
        self._take_back([stream])
        if stream.copy is not None:
            self._host_cache.unpin(stream.slab, stream.copy)

    def _copy_to_work_on(self, slab: Slab, next_use: float) -> HostCopy | None:
        """The slab's copy, or a new one where there is room that nobody needs sooner: what stays in host memory is not
        read again. A copy away from home that is in use is left to its readers.

        States have no next use: each update needs all of them once, so that none would take the place of another.
        """
        copy = slab.copy
        if copy is None and (region := self._host.try_allocate(slab.nbytes, next_use)) is not None:
            copy = slab.copy = HostCopy(region, step=None, at_home=slab.at_home_in_host)
        elif copy is None or copy.pins or (copy.step is None and not copy.at_home):
            return None
        copy.next_use = next_use
        return copy

    async def _idle(self, slab: Slab) -> None:
        """Waits until the slab may be worked on in place, where it will be."""
        while True:
            if slab.copy_write is not None:
                await slab.unclaimed()
            elif slab.copy is not None and slab.copy.at_home and slab.copy.pins:
                await slab.copy.idle.wait()
            else:
                return

    async def _tile(
        self,
        region: ArenaRange,
        group: Group,
        start: int,
        streams: Sequence[_Stream],
        gradient: torch.Tensor,
        kernel: Kernel,
    ) -> None:
        try:
            numel = min(self._tiles.elements, group.spec.numel - start)
            parts = _Parts(start, numel, self._map(region, start, numel, streams), gradient, kernel, self._scratch)
            await self._backing.read_raw(parts.reads(0, numel), Priority.UPDATE)
            loop, done = asyncio.get_running_loop(), 0
            while (done := await loop.run_in_executor(self._executor, parts.work, done)) < numel:
                # It may not be the disk's mistake: what is wrong is read once more before that counts.
                await self._backing.read_many(parts.reads(done, parts.end_of(done)), Priority.UPDATE)
            await self._backing.write_raw(parts.writes(), Priority.UPDATE)
        finally:
            self._tiles.give(region)

    def _map(self, region: ArenaRange, start: int, numel: int, streams: Sequence[_Stream]) -> list[_Mapped]:
        """Where each slab's part of the tile is: in its copy, or in the tile's buffer."""
        mapped, used = [], 0
        for stream in streams:
            itemsize = stream.slab.spec.dtype.itemsize
            if stream.copy is not None:
                base, offset = self._host.view(stream.copy.region), start * itemsize
            else:
                base, offset = self._host.view(region), used
                used += self._tiles.elements * itemsize
            mapped.append(_Mapped(stream, base[offset : offset + round_up(numel * itemsize)], start * itemsize))
        return mapped

    def _finish(self, stream: _Stream, step: int) -> None:
        slab = stream.slab
        slab.latest = step
        slab.updated_at = time.monotonic()
        if stream.target is not None:
            slab.add_version(step, stream.target)
        if stream.copy is not None:
            stream.copy.step = step
            copy, stream.copy = stream.copy, None
            self._host_cache.unpin(slab, copy, copy.next_use)
        elif slab.copy is not None:
            # Read by others while the update ran; what they hold is the old version.
            self._host_cache.detach(slab)


class _Scratch(threading.local):
    """One buffer for each thread that runs kernels: it stays in that one's cache."""

    def __init__(self) -> None:
        self.tensor = torch.empty(PART_ELEMENTS, dtype=torch.float32)


class _Mapped:
    """A stream's bytes of one tile: `view`, whole pages of host memory, is at byte `offset` of the slab."""

    def __init__(self, stream: _Stream, view: memoryview, offset: int) -> None:
        dtype = stream.slab.spec.dtype
        self.kind = stream.slab.key.kind
        self.source = stream.source
        self.target = stream.target
        self.begins_as_zeros = stream.reads and stream.slab.latest is None
        self.tensor = torch.frombuffer(view, dtype=dtype.torch)
        self._view = view
        self._offset = offset
        self._itemsize = dtype.itemsize

    def transfer(self, region: Region, first: int, end: int | None) -> Transfer[Region]:
        """Elements `[first, end)` of the tile as bytes of a region; to the end of the last page without an `end`."""
        start = first * self._itemsize
        stop = None if end is None else end * self._itemsize
        return Transfer(region, self._offset + start, self._view[start:stop])


class _Parts:
    """A tile's work on the optimizer's thread, part after part, each while it is in the processor's cache.

    The bytes of all kinds are verified before the kernel touches a part, so that a part is done or as it was.
    """

    def __init__(
        self,
        start: int,
        numel: int,
        mapped: Sequence[_Mapped],
        gradient: torch.Tensor,
        kernel: Kernel,
        scratch: _Scratch,
    ) -> None:
        self._start = start
        self._numel = numel
        self._mapped = mapped
        self._gradient = gradient
        self._kernel = kernel
        self._scratch = scratch

    def end_of(self, first: int) -> int:
        """Where the part that begins at element `first` of the tile ends."""
        return min(first + PART_ELEMENTS, self._numel)

    def reads(self, first: int, end: int) -> list[Transfer[Region]]:
        """What elements `[first, end)` of the tile need from NVMe."""
        stop = end if end < self._numel else None
        return [m.transfer(m.source, first, stop) for m in self._mapped if m.source is not None]

    def writes(self, first: int = 0, end: int | None = None) -> list[Transfer[Region]]:
        """What goes to NVMe of them; by default of all."""
        stop = end if end is not None and end < self._numel else None
        return [m.transfer(m.target, first, stop) for m in self._mapped if m.target is not None]

    def work(self, first: int) -> int:
        """Does the parts from element `first` on. Returns the element where one with wrong bytes begins, or `numel`."""
        while first < self._numel:
            end = self.end_of(first)
            try:
                for region, offset, buffer in self.reads(first, end):
                    region.verify(offset, buffer)
            except DamagedBlockError:
                return first
            tensors = {m.kind: m.tensor[first:end] for m in self._mapped}
            for m in self._mapped:
                if m.begins_as_zeros:
                    tensors[m.kind].zero_()
            start = self._start + first
            self._kernel(
                Tile(
                    start=start,
                    numel=end - first,
                    tensors=tensors,
                    gradient=self._gradient[start : self._start + end],
                    scratch=self._scratch.tensor[: end - first],
                )
            )
            for region, offset, buffer in self.writes(first, end):
                region.record(offset, buffer)
            first = end
        return self._numel
