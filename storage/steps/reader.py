"""Reads of any range of a tensor by name, independently of the partition in which it is stored.

A `RangeReader` reads the newest bytes; a `StepReader` reads one committed step, which it holds while training goes on.
Both read through one tile buffer at a time. This module must not keep a buffer while a client takes the bytes, because
a client may be slow and the optimizer needs the buffers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

import torch
import xxhash

from storage.base.codec import EncodedLayout, decode
from storage.base.errors import ConflictError, NotFoundError
from storage.base.shard import DType, Kind
from storage.base.slices import in_slices
from storage.base.waiting import finish_all
from storage.catalog.records import CommitRecord
from storage.memory.gathering import Gathering, InPlace, bytes_in_place, parts_of
from storage.memory.host_cache import HostCache
from storage.state.slab import Group, HostCopy, Slab
from storage.state.versions import Job
from storage.steps.transform import TilePool
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Move, Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority

# At most this many bytes of host memory are copied before other tasks of the event loop run. Copying them takes a
# millisecond.
COPIED_AT_ONCE = 4 << 20
# A function that fills a buffer with whole checksum blocks of a slab, from a byte offset on.
ReadBlocks = Callable[[int, memoryview], Awaitable[None]]


class RangeReader:
    """Reads ranges of tensors as their newest bytes are, committed or not. Each read holds at most one tile buffer."""

    def __init__(self, host: HostTier, host_cache: HostCache, backing: BackingTiers, tiles: TilePool) -> None:
        self._host = host
        self._host_cache = host_cache
        self._backing = backing
        self._tiles = tiles

    async def describe(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> tuple[DType, int]:
        """Return the element type and the newest version of elements `[offset, offset + numel)` of one tensor.

        Raises:
            NotFoundError: this store does not have all of these elements.
        """
        first = (await self.slabs(job, fqn, kind, offset, numel))[0]
        return first.spec.dtype, first.latest or 0

    async def slabs(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> list[Slab]:
        """Return the slabs that hold elements `[offset, offset + numel)` of one tensor, in order. `numel` is above 0.

        Raises:
            NotFoundError: this store does not have all of these elements.
        """
        return [slab async for slab, _, _ in in_slices(parts_of(job, fqn, kind, offset, numel))]

    async def read(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> AsyncGenerator[bytes, None]:
        """Yield the newest bytes of elements `[offset, offset + numel)` of one tensor, in pieces.

        Raises:
            NotFoundError: this store does not have all of these elements.
            ConflictError: an update changed the bytes during the read.
            DeviceError: the bytes cannot be read.
        """
        for slab, start, count in parts_of(job, fqn, kind, offset, numel):
            itemsize, stamp = slab.layout.itemsize, slab.stamp
            async for piece in self._read_slab(slab, start * itemsize, count * itemsize):
                if slab.stamp != stamp:
                    raise ConflictError(f"{slab.key} changed while {fqn!r} was read from it; read it again")
                yield piece

    async def _read_slab(self, slab: Slab, start: int, nbytes: int) -> AsyncIterator[bytes]:
        end = start + nbytes
        while start < end:
            piece = await self.piece(slab, start, end, lambda at, buffer: self._read_newest(slab, at, buffer))
            yield piece
            start += len(piece)

    async def piece(self, slab: Slab, start: int, end: int, read: ReadBlocks) -> bytes:
        """Return as many bytes `[start, end)` of a slab's elements, from `start` on, as are read with one tile buffer.

        `read` fills the buffer in whole checksum blocks. The result is a copy, because a client may take the bytes
        slowly, and the optimizer needs the tile buffer meanwhile.

        Raises:
            DeviceStuckError: a device does not answer.
        """
        return await self._backing.watch.unless_stuck(self._piece(slab, start, end, read))

    async def _piece(self, slab: Slab, start: int, end: int, read: ReadBlocks) -> bytes:
        async with self._tiles.buffer() as buffer:
            layout = slab.layout
            if isinstance(layout, EncodedLayout):
                return await _decoded(layout, start, end, buffer, read)
            block = layout.block_bytes
            first = start // block * block
            whole = min(round_up(end, block), round_up(slab.nbytes)) - first
            length = min(len(buffer) // block * block, whole)
            await read(first, buffer[:length])
            return bytes(buffer[start - first : min(end, first + length) - first])

    async def digest(self, job: Job, group: str, kind: Kind) -> tuple[int | None, bytes]:
        """Return the newest version of a slab, committed or not, and the digest of its bytes.

        Returns:
            The step that wrote the bytes and `slab_digest` of them; (None, b"") for a slab that was never written.

        Raises:
            NotFoundError: the job has no such slab.
            DataLossError, DeviceError: the bytes are damaged, or cannot be read.
            DeviceStuckError: a device does not answer.
        """
        return await self._backing.watch.unless_stuck(self._digest(job, group, kind))

    async def _digest(self, job: Job, group: str, kind: Kind) -> tuple[int | None, bytes]:
        slab = job.slab(group, kind)
        if slab.latest is None:
            return None, b""
        version, region = slab.latest, slab.versions.get(slab.latest)
        if region is not None:
            # The region is held while its bytes are read, because otherwise a roll-back could free it meanwhile.
            self._backing.hold(region)
        try:
            return version, await self.slab_digest(job.group(group), slab, region)
        finally:
            if region is not None:
                self._backing.free(region)

    async def slab_digest(self, group: Group, slab: Slab, region: Region | None) -> bytes:
        """Return the XXH3-128 of the elements of a group's shards, by position, without the padding between them.

        The bytes come from `region`, not from a copy in host memory; without a region they are the newest ones.
        """

        async def read(start: int, buffer: memoryview) -> None:
            if region is None:
                await self._read_newest(slab, start, buffer)
            else:
                await self._backing.read_into(region, start, buffer)

        itemsize, size, state, start = slab.layout.itemsize, slab.layout.element_bytes, xxhash.xxh3_128(), 0
        shards = iter(group.spec.shards)
        shard = next(shards, None)
        while start < size and shard is not None:
            piece = memoryview(await self.piece(slab, start, size, read))
            stop = start + len(piece)
            while shard is not None:
                begin, end = (n * itemsize for n in (shard.group_offset, shard.group_offset + shard.numel))
                state.update(piece[max(begin, start) - start : max(min(end, stop), start) - start])
                if end > stop:
                    break
                shard = next(shards, None)
            start = stop
        return state.digest()

    async def read_version(self, slab: Slab, region: Region, start: int, buffer: memoryview) -> None:
        """Read whole blocks of the version in a region: from host memory if its copy is there, else from the region."""
        copy = slab.copy_of(region)
        if copy is not None:
            await self._read_copy(slab, copy, start, buffer)
        else:
            await self._backing.read_into(region, start, buffer)

    async def _read_copy(self, slab: Slab, copy: HostCopy, start: int, buffer: memoryview) -> None:
        """Copy bytes of a slab's host copy into `buffer`, in pieces, so that gigabytes do not block the event loop."""
        if len(buffer) <= COPIED_AT_ONCE:
            await self._host.read_into(copy.arena_range, start, buffer)
            return
        # The host copy is pinned, so that its bytes are not changed or moved while other tasks run between two pieces.
        self._host_cache.pin(copy)
        try:
            async for at in in_slices(range(0, len(buffer), COPIED_AT_ONCE)):
                await self._host.read_into(copy.arena_range, start + at, buffer[at : at + COPIED_AT_ONCE])
        finally:
            self._host_cache.unpin(slab, copy, copy.next_use)

    async def _read_newest(self, slab: Slab, start: int, buffer: memoryview) -> None:
        copy = slab.current_copy
        if slab.latest is None:
            buffer[:] = bytes(len(buffer))
        elif copy is not None:
            await self._host.read_into(copy.arena_range, start, buffer)
        else:
            await self._backing.read_into(slab.source(slab.latest), start, buffer)


async def _decoded(layout: EncodedLayout, start: int, end: int, buffer: memoryview, read: ReadBlocks) -> bytes:
    """Return as many bytes `[start, end)` of an encoded slab's elements as the records have that fit into `buffer`."""
    size = layout.itemsize
    first, stop = layout.records_within(start // size, -(-end // size), len(buffer))
    span = layout.bytes_of(first, stop)
    records = buffer[: span.stop - span.start]
    await read(span.start, records)
    elements = torch.empty(stop - first)
    await decode(layout, records, first, elements)
    return elements.view(torch.uint8)[start - first * size : min(end, stop * size) - first * size].numpy().tobytes()


class StepReader:
    """A reader of one committed step. The step's bytes stay the same, also after later steps, roll-backs or deletion.

    The space of the step's versions is freed when no reader, retained step or slab needs them any more.
    """

    def __init__(self, job: Job, record: CommitRecord, ranges: RangeReader, backing: BackingTiers) -> None:
        """Make a reader of the step of `record` that holds nothing yet. `Committer.hold` fills `regions`."""
        self.job = job
        self.step = record.step
        # The record of the commit that this reader reads. If the job is rolled back and commits a step of the same
        # number again, that step has another record.
        self.record = record
        # The region of each slab's bytes, held until `close` frees it. It is None if the slab was never written; its
        # bytes are then zeros.
        self.regions: dict[Slab, Region | None] = {}
        # For each slab, the step that wrote the bytes that this reader sees; None if the slab was never written.
        self.versions: dict[Slab, int | None] = {}
        self._ranges = ranges
        self._backing = backing

    @property
    def nbytes(self) -> int:
        """The bytes of the regions on backing tiers that the reader holds, so that they are not freed."""
        return sum(region.nbytes for region in self.regions.values() if region is not None)

    def client_state(self, rank: int) -> bytes:
        """Return the state that a rank stored with the commit.

        Raises:
            NotFoundError: no rank of this number stored a state on this node.
        """
        if rank not in self.record.client_states:
            raise NotFoundError(
                f"step {self.step} of job {self.job.spec.name!r} has no client state of rank {rank} on this node"
            )
        return self.record.client_states[rank]

    async def describe(self, fqn: str, kind: Kind, offset: int, numel: int) -> DType:
        """Return the element type of elements `[offset, offset + numel)` of one tensor.

        Raises:
            NotFoundError: this store does not have all of these elements.
        """
        return (await self._ranges.describe(self.job, fqn, kind, offset, numel))[0]

    async def gather(self, gathering: Gathering, view: memoryview) -> None:
        """Read many ranges into whole pages of the arena. Ranges that are close together in a slab are read together.

        Raises:
            NotFoundError, DataLossError, DeviceError: see `read`.
        """
        reads = (self._read_in_place(gathering.in_place, view), self._copy_stretches(gathering, view))
        await finish_all([asyncio.ensure_future(read) for read in reads])

    async def _read_in_place(self, places: Sequence[InPlace], view: memoryview) -> None:
        moves: list[Move[Region]] = []
        async for slab, start, at, nbytes in in_slices(places):
            region, buffer = self._region_of(slab), view[at : at + nbytes]
            if region is None or slab.copy_of(region) is not None:
                await self._read_held(slab, start, buffer)
            else:
                moves.append(Move(region, start, buffer))
        if moves:
            await self._backing.read_many(moves, Priority.DEMAND)

    async def _copy_stretches(self, gathering: Gathering, view: memoryview) -> None:
        for slab, stretch in gathering.stretches():
            start = stretch.start
            while start < stretch.stop:
                data = await self._ranges.piece(slab, start, stretch.stop, functools.partial(self._read_held, slab))
                await stretch.copy(start, data, view)
                start += len(data)

    async def fill(self, fqn: str, kind: Kind, offset: int, numel: int, view: memoryview) -> None:
        """Read elements `[offset, offset + numel)` of one tensor into whole pages of the arena.

        Whole blocks of the slab whose place in the range begins at a page are read there directly. Other bytes are
        copied through a tile buffer.

        Raises:
            NotFoundError, DataLossError, DeviceError: see `read`.
        """
        at = 0
        for slab, first, count in parts_of(self.job, fqn, kind, offset, numel):
            start, stop = (n * slab.layout.itemsize for n in (first, first + count))
            while start < stop:
                if length := bytes_in_place(slab, start, stop, at):
                    await self._read_held(slab, start, view[at : at + length])
                else:
                    piece = await self._ranges.piece(slab, start, stop, functools.partial(self._read_held, slab))
                    length = len(piece)
                    view[at : at + length] = piece
                start, at = start + length, at + length

    async def read(self, fqn: str, kind: Kind, offset: int, numel: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of elements `[offset, offset + numel)` of one tensor at the step, in pieces.

        Raises:
            NotFoundError: this store does not have all of these elements, or the reader is closed.
            DataLossError: the bytes are damaged.
            DeviceError: the bytes cannot be read.
        """
        for slab, first, count in parts_of(self.job, fqn, kind, offset, numel):
            start, stop = (n * slab.layout.itemsize for n in (first, first + count))
            while start < stop:
                piece = await self._ranges.piece(slab, start, stop, functools.partial(self._read_held, slab))
                yield piece
                start += len(piece)

    async def digest(self, group: str, kind: Kind) -> tuple[int | None, bytes]:
        """Return the version of a slab at the step, and the digest of its bytes; see `RangeReader.digest`.

        Raises:
            NotFoundError: the job has no such slab, or the reader is closed.
            DataLossError, DeviceError: see `read`.
        """
        slab = self.job.slab(group, kind)
        region = self._region_of(slab)
        if region is None:
            return None, b""
        self._backing.hold(region)
        try:
            return self.versions[slab], await self._ranges.slab_digest(self.job.group(group), slab, region)
        finally:
            self._backing.free(region)

    def _region_of(self, slab: Slab) -> Region | None:
        if slab not in self.regions:
            raise NotFoundError(f"the reader of step {self.step} of job {self.job.spec.name!r} is closed; open another")
        return self.regions[slab]

    async def _read_held(self, slab: Slab, start: int, buffer: memoryview) -> None:
        region = self._region_of(slab)
        if region is None:
            buffer[:] = bytes(len(buffer))
        else:
            await self._ranges.read_version(slab, region, start, buffer)

    def close(self) -> None:
        """Free the regions that the reader holds; a repeated call has no effect."""
        regions, self.regions = self.regions, {}
        for region in regions.values():
            if region is not None:
                self._backing.free(region)
