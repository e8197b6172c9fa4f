"""Reads of any range of a tensor by name, whatever the partition it is stored in, through one small buffer: of the
newest bytes, or of one committed step that is held while training goes on."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from storage.catalog.records import CommitRecord
from storage.errors import ConflictError, NotFoundError
from storage.gathering import Gathering, parts_of
from storage.integrity import BLOCK_BYTES
from storage.shard import DType, Kind
from storage.slab import Slab
from storage.slices import in_slices
from storage.tiers.backing import BackingTiers
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.transform import TilePool
from storage.versions import Job

# Fills a buffer with whole blocks of a slab from a byte on.
ReadBlocks = Callable[[int, memoryview], Awaitable[None]]


class RangeReader:
    """Reads the newest bytes. Holds at most one tile buffer per read under way."""

    def __init__(self, host: HostTier, backing: BackingTiers, tiles: TilePool) -> None:
        self._host = host
        self._backing = backing
        self._tiles = tiles

    async def describe(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> tuple[DType, int]:
        """Element type and newest version of elements `[offset, offset + numel)` of one tensor.

        Raises:
            NotFoundError: this store does not have all of them.
        """
        first = (await self.slabs(job, fqn, kind, offset, numel))[0]
        return first.spec.dtype, first.latest or 0

    async def slabs(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> list[Slab]:
        """The slabs that hold elements `[offset, offset + numel)` of one tensor, `numel` > 0, in order.

        Raises:
            NotFoundError: this store does not have all of them.
        """
        return [slab async for slab, _, _ in in_slices(parts_of(job, fqn, kind, offset, numel))]

    async def read(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> AsyncGenerator[bytes, None]:
        """The bytes of that range, in pieces.

        Raises:
            NotFoundError: this store does not have all of them.
            ConflictError: an update changed them meanwhile.
            DeviceError: they cannot be read.
        """
        for slab, start, count in parts_of(job, fqn, kind, offset, numel):
            itemsize = slab.spec.dtype.itemsize
            version = slab.latest
            async for piece in self._read_slab(slab, start * itemsize, count * itemsize):
                if slab.latest != version:
                    raise ConflictError(f"{slab.key} changed while {fqn!r} was read from it; read it again")
                yield piece

    async def _read_slab(self, slab: Slab, start: int, nbytes: int) -> AsyncIterator[bytes]:
        end = start + nbytes
        while start < end:
            piece = await self.piece(slab, start, end, lambda at, buffer: self._read_newest(slab, at, buffer))
            yield piece
            start += len(piece)

    async def piece(self, slab: Slab, start: int, end: int, read: ReadBlocks) -> bytes:
        """As many of a slab's bytes `[start, end)` as one buffer holds, filled by `read` in whole blocks.

        The buffer is taken for them only: the reader may be slow, and optimizers need the buffers.

        Raises:
            DeviceStuckError: a device does not answer.
        """
        return await self._backing.watch.unless_stuck(self._piece(slab, start, end, read))

    async def _piece(self, slab: Slab, start: int, end: int, read: ReadBlocks) -> bytes:
        async with self._tiles.buffer() as buffer:
            first = start // BLOCK_BYTES * BLOCK_BYTES
            whole = min(round_up(end, BLOCK_BYTES), round_up(slab.nbytes)) - first
            length = min(len(buffer) // BLOCK_BYTES * BLOCK_BYTES, whole)
            await read(first, buffer[:length])
            return bytes(buffer[start - first : min(end, first + length) - first])

    async def read_version(self, slab: Slab, region: Region, start: int, buffer: memoryview) -> None:
        """Whole blocks of the version that a region holds: from host memory, where it is the newest and is there."""
        copy = slab.current_copy
        if copy is not None and copy.step is not None and slab.versions.get(copy.step) is region:
            await self._host.read_into(copy.region, start, buffer)
        else:
            await self._backing.read_into(region, start, buffer)

    async def _read_newest(self, slab: Slab, start: int, buffer: memoryview) -> None:
        copy = slab.current_copy
        if slab.latest is None:
            buffer[:] = bytes(len(buffer))
        elif copy is not None:
            await self._host.read_into(copy.region, start, buffer)
        else:
            await self._backing.read_into(slab.source(slab.latest), start, buffer)


class StepReader:
    """A committed step, held whole: what it reads stays the same whatever is trained, rolled back or deleted meanwhile.

    The space of what it holds is free when the last reader has closed.
    """

    def __init__(self, job: Job, record: CommitRecord, ranges: RangeReader, backing: BackingTiers) -> None:
        """Make a reader of the step of `record` that holds nothing yet; see `Committer.hold`."""
        self.job = job
        self.step = record.step
        # Each region is held, and freed by `close`. None: the slab was never written, and reads as zeros.
        self.regions: dict[Slab, Region | None] = {}
        self._client_states = record.client_states
        self._ranges = ranges
        self._backing = backing

    @property
    def nbytes(self) -> int:
        """Bytes on NVMe that it holds."""
        return sum(region.nbytes for region in self.regions.values() if region is not None)

    def client_state(self, rank: int) -> bytes:
        """What a rank gave to the commit. Raises NotFoundError where no such rank gave anything here."""
        if rank not in self._client_states:
            raise NotFoundError(
                f"step {self.step} of job {self.job.spec.name!r} has no client state of rank {rank} on this node"
            )
        return self._client_states[rank]

    async def describe(self, fqn: str, kind: Kind, offset: int, numel: int) -> DType:
        """Element type of elements `[offset, offset + numel)` of one tensor.

        Raises:
            NotFoundError: this store does not have all of them.
        """
        return (await self._ranges.describe(self.job, fqn, kind, offset, numel))[0]

    async def gather(self, gathering: Gathering, view: memoryview) -> None:
        """Reads many ranges into whole pages of the arena, each slab's pieces together.

        Raises:
            NotFoundError, DataLossError, DeviceError: as `read`.
        """
        for slab, window in gathering.windows():
            start = window.start
            while start < window.stop:
                data = await self._ranges.piece(slab, start, window.stop, functools.partial(self._read_held, slab))
                await window.copy(start, data, view)
                start += len(data)

    async def fill(self, fqn: str, kind: Kind, offset: int, numel: int, view: memoryview) -> None:
        """Reads that range into whole pages of the arena, without a copy where its blocks lie as they do on NVMe.

        Raises:
            NotFoundError, DataLossError, DeviceError: as `read`.
        """
        at = 0
        for slab, position, count in parts_of(self.job, fqn, kind, offset, numel):
            start, stop = (n * slab.spec.dtype.itemsize for n in (position, position + count))
            while start < stop:
                length = (stop - start) // BLOCK_BYTES * BLOCK_BYTES
                if length and start % BLOCK_BYTES == 0 and at % PAGE_BYTES == 0:
                    await self._read_held(slab, start, view[at : at + length])
                else:
                    piece = await self._ranges.piece(slab, start, stop, functools.partial(self._read_held, slab))
                    length = len(piece)
                    view[at : at + length] = piece
                start, at = start + length, at + length

    async def read(self, fqn: str, kind: Kind, offset: int, numel: int) -> AsyncGenerator[bytes, None]:
        """The bytes of elements `[offset, offset + numel)` of one tensor at the step, in pieces.

        Raises:
            NotFoundError: this store does not have all of them, or the reader is closed.
            DataLossError: they are damaged.
            DeviceError: they cannot be read.
        """
        for slab, position, count in parts_of(self.job, fqn, kind, offset, numel):
            start, stop = (n * slab.spec.dtype.itemsize for n in (position, position + count))
            while start < stop:
                piece = await self._ranges.piece(slab, start, stop, functools.partial(self._read_held, slab))
                yield piece
                start += len(piece)

    async def _read_held(self, slab: Slab, start: int, buffer: memoryview) -> None:
        if slab not in self.regions:
            raise NotFoundError(f"the reader of step {self.step} of job {self.job.spec.name!r} is closed; open another")
        region = self.regions[slab]
        if region is None:
            buffer[:] = bytes(len(buffer))
        else:
            await self._ranges.read_version(slab, region, start, buffer)

    def close(self) -> None:
        """Lets go of the step; may be called again."""
        regions, self.regions = self.regions, {}
        for region in regions.values():
            if region is not None:
                self._backing.free(region)
