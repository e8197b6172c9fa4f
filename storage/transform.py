"""Streams the slabs of a group through a kernel, tile by tile: read-ahead | kernel | write-behind, all three busy.

Optimizers ride on this. The bytes of a committed version on NVMe are never overwritten: results go to new extents. A
copy in the host tier is worked on in place; a slab without one passes through tile buffers, so that the room needed
does not depend on the size of the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from storage.errors import BudgetExceededError
from storage.integrity import BLOCK_BYTES
from storage.placement import Residents
from storage.shard import MAX_OPTIMIZER_STATES, DType, Kind
from storage.slab import Group, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.base import round_up
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.tiers.nvme import NvmeRegion, NvmeTier, Transfer, settle
from storage.turns import Turns

# Tiles are cut at whole blocks of the narrowest element type, so that each tile can be verified on its own everywhere.
TILE_QUANTUM = BLOCK_BYTES // 2
MAX_TILE_ELEMENTS = 1 << 20
# Master weight, optimizer states and the gradient's scratch in fp32, and the parameter in 16 bits.
BYTES_PER_TILE_ELEMENT = 4 * (2 + MAX_OPTIMIZER_STATES) + 2
TILE_SETS = 4
# What the tile sets may take of the host budget.
TILE_BUDGET_FRACTION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a kernel works on: elements `[start, start + numel)` of the group, in every kind, as 1-D tensors.

    `gradient` has its own dtype; `scratch` is fp32, of the same length, with undefined contents.
    """

    start: int
    numel: int
    tensors: Mapping[Kind, torch.Tensor]
    gradient: torch.Tensor
    scratch: torch.Tensor


Kernel = Callable[[Tile], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """How one slab passes through: where its old bytes come from and its new ones go."""

    slab: Slab
    reads: bool
    copy: HostCopy | None  # worked on in place, where there is one
    source: NvmeRegion | None  # read from, where there is no usable copy
    target: NvmeRegion | None  # new extents


def host_budget_for(other_bytes: int) -> int:
    """The smallest host budget that leaves `other_bytes` beside the tile buffers, whose share grows with it."""
    largest_tiles = TILE_SETS * MAX_TILE_ELEMENTS * BYTES_PER_TILE_ELEMENT
    share = -(-other_bytes // (TILE_BUDGET_FRACTION - 1))
    return round_up(other_bytes + min(share, largest_tiles))


class TilePool:
    """Equal buffers of the arena, taken at start and lent out in turn."""

    def __init__(self, host: HostTier) -> None:
        """Takes up to a quarter of the host budget.

        Raises:
            BudgetExceededError: the budget is too small for the smallest tiles.
        """
        self._host = host
        room = host.budget_bytes // TILE_BUDGET_FRACTION // TILE_SETS // BYTES_PER_TILE_ELEMENT
        self.elements = min(MAX_TILE_ELEMENTS, room // TILE_QUANTUM * TILE_QUANTUM)
        if self.elements < TILE_QUANTUM:
            smallest = TILE_BUDGET_FRACTION * TILE_SETS * BYTES_PER_TILE_ELEMENT * TILE_QUANTUM
            raise BudgetExceededError(
                f"host_budget {host.budget_bytes} is too small to run an optimizer; raise it to at least {smallest}"
            )
        self._free: asyncio.Queue[ArenaRange] = asyncio.Queue()
        for _ in range(TILE_SETS):
            region = host.arena.allocate(self.elements * BYTES_PER_TILE_ELEMENT)
            assert region is not None
            self._free.put_nowait(region)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return TILE_SETS * round_up(self.elements * BYTES_PER_TILE_ELEMENT)

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
    """Runs kernels over groups, one after the other, the one that is needed first before the others; the tiles of two
    overlap."""

    def __init__(
        self, host: HostTier, nvme: NvmeTier, residents: Residents, tiles: TilePool, executor: Executor
    ) -> None:
        self._host = host
        self._nvme = nvme
        self._residents = residents
        self._tiles = tiles
        self._executor = executor
        self._turns = Turns()

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

        Of the groups that wait, the one with the lowest `position` is next. All or nothing: on an error the slabs'
        versions are as before, except that a copy in the host tier whose bytes are not on NVMe as well is lost.

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
                async with self._turns.at(position):
                    for slab in group.slabs:
                        streams.append(await self._open_stream(slab, step, slab.key.kind in reads, undo))
                    for start in range(0, group.spec.numel, self._tiles.elements):
                        region = await self._tiles.take()
                        tile = self._tile(region, group, start, streams, gradient, kernel)
                        tasks.append(asyncio.ensure_future(tile))
            finally:
                await settle(tasks)
            undo.pop_all()
        for stream in streams:
            self._finish(stream, step)

    async def _open_stream(self, slab: Slab, step: int, reads: bool, undo: AsyncExitStack) -> _Stream:
        await self._idle(slab)
        copy = _copy_to_work_on(slab)
        source = None
        if copy is not None:
            if reads and slab.latest is not None and copy.step != slab.latest:
                source = slab.source(slab.latest)
            self._residents.pin(copy)
            copy.step = None
            undo.callback(self._residents.unpin, slab, copy)
        elif reads and slab.latest is not None:
            source = slab.source(slab.latest)
        target = None
        if slab.backed:
            target = await self._nvme.allocate(slab.nbytes, slab.label(step))
            undo.callback(self._nvme.free, target)
        return _Stream(slab=slab, reads=reads, copy=copy, source=source, target=target)

    async def _idle(self, slab: Slab) -> None:
        """Waits until the slab may be worked on in place, where it will be."""
        while True:
            if slab.snapshot is not None:
                await slab.snapshot.wait()
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
            tensors, views = self._map(region, start, numel, streams)
            for stream in streams:
                if stream.reads and stream.slab.latest is None:
                    tensors[stream.slab.key.kind].zero_()
            await self._nvme.read_many(
                [Transfer(s.source, _offset(s, start), views[s.slab]) for s in streams if s.source], Priority.UPDATE
            )
            tile = Tile(
                start=start,
                numel=numel,
                tensors=tensors,
                gradient=gradient[start : start + numel],
                scratch=self._host.tensor(region, DType.FLOAT32, numel),
            )
            await asyncio.get_running_loop().run_in_executor(self._executor, kernel, tile)
            await self._nvme.write_many(
                [Transfer(s.target, _offset(s, start), views[s.slab]) for s in streams if s.target], Priority.UPDATE
            )
        finally:
            self._tiles.give(region)

    def _map(
        self, region: ArenaRange, start: int, numel: int, streams: Sequence[_Stream]
    ) -> tuple[dict[Kind, torch.Tensor], dict[Slab, memoryview]]:
        """Where each slab's part of the tile is: in its copy, or in the tile's buffer behind the scratch."""
        tensors: dict[Kind, torch.Tensor] = {}
        views: dict[Slab, memoryview] = {}
        used = self._tiles.elements * DType.FLOAT32.itemsize
        for stream in streams:
            dtype = stream.slab.spec.dtype
            length = round_up(numel * dtype.itemsize)
            if stream.copy is not None:
                base, offset = self._host.view(stream.copy.region), start * dtype.itemsize
            else:
                base, offset = self._host.view(region), used
                used += self._tiles.elements * dtype.itemsize
            views[stream.slab] = base[offset : offset + length]
            tensors[stream.slab.key.kind] = torch.frombuffer(
                base[offset : offset + numel * dtype.itemsize], dtype=dtype.torch
            )
        return tensors, views

    def _finish(self, stream: _Stream, step: int) -> None:
        slab = stream.slab
        slab.latest = step
        if stream.target is not None:
            slab.versions[step] = stream.target
        if stream.copy is not None:
            stream.copy.step = step
            self._residents.unpin(slab, stream.copy, stream.copy.next_use)
        elif slab.copy is not None:
            # Read by others while the update ran; what they hold is the old version.
            self._residents.detach(slab)


def _copy_to_work_on(slab: Slab) -> HostCopy | None:
    """The slab's copy, if it is idle. One away from home that is in use is left to its readers."""
    copy = slab.copy
    if copy is None or copy.pins or (copy.step is None and not copy.at_home):
        return None
    return copy


def _offset(stream: _Stream, start: int) -> int:
    """The byte of the slab where a tile begins."""
    return start * stream.slab.spec.dtype.itemsize
