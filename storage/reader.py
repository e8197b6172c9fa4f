"""Reads of any range of a tensor by name, whatever the partition it is stored in, through one small buffer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from storage.errors import ConflictError, NotFoundError
from storage.integrity import BLOCK_BYTES
from storage.shard import DType, Kind
from storage.slab import Slab
from storage.tiers.base import round_up
from storage.tiers.host import HostTier
from storage.tiers.nvme import NvmeTier
from storage.transform import TilePool
from storage.versions import Job


class RangeReader:
    """Reads the newest bytes. Holds at most one tile buffer per read under way."""

    def __init__(self, host: HostTier, nvme: NvmeTier, tiles: TilePool) -> None:
        self._host = host
        self._nvme = nvme
        self._tiles = tiles

    def describe(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> tuple[DType, int]:
        """Element type and newest version of elements `[offset, offset + numel)` of one tensor.

        Raises:
            NotFoundError: this store does not have all of them.
        """
        end = offset + numel
        first, _, count = _locate(job, fqn, kind, offset, end)
        while (offset := offset + count) < end:
            _, _, count = _locate(job, fqn, kind, offset, end)
        return first.spec.dtype, first.latest or 0

    async def read(self, job: Job, fqn: str, kind: Kind, offset: int, numel: int) -> AsyncGenerator[bytes, None]:
        """The bytes of that range, in pieces.

        Raises:
            NotFoundError: this store does not have all of them.
            ConflictError: an update changed them meanwhile.
            DeviceError: they cannot be read.
        """
        end = offset + numel
        while offset < end:
            slab, start, count = _locate(job, fqn, kind, offset, end)
            itemsize = slab.spec.dtype.itemsize
            version = slab.latest
            async for piece in self._read_slab(slab, start * itemsize, count * itemsize):
                if slab.latest != version:
                    raise ConflictError(f"{slab.key} changed while {fqn!r} was read from it; read it again")
                yield piece
            offset += count

    async def _read_slab(self, slab: Slab, start: int, nbytes: int) -> AsyncIterator[bytes]:
        end = start + nbytes
        while start < end:
            piece = await self._nvme.watch.unless_stuck(self._read_piece(slab, start, end))
            yield piece
            start += len(piece)

    async def _read_piece(self, slab: Slab, start: int, end: int) -> bytes:
        """As many of the bytes as one buffer holds, which is taken for them only: the reader may be slow, and
        optimizers need the buffers."""
        async with self._tiles.buffer() as buffer:
            first = start // BLOCK_BYTES * BLOCK_BYTES
            whole = min(round_up(end, BLOCK_BYTES), round_up(slab.nbytes)) - first
            length = min(len(buffer) // BLOCK_BYTES * BLOCK_BYTES, whole)
            await self._read_blocks(slab, first, buffer[:length])
            return bytes(buffer[start - first : min(end, first + length) - first])

    async def _read_blocks(self, slab: Slab, start: int, buffer: memoryview) -> None:
        copy = slab.current_copy
        if slab.latest is None:
            buffer[:] = bytes(len(buffer))
        elif copy is not None:
            await self._host.read_into(copy.region, start, buffer)
        else:
            await self._nvme.read_into(slab.source(slab.latest), start, buffer)


def _locate(job: Job, fqn: str, kind: Kind, offset: int, end: int) -> tuple[Slab, int, int]:
    """The slab that holds element `offset` of a tensor, its position there, and how many up to `end` follow."""
    for group in job.groups.values():
        for shard in group.spec.shards:
            if shard.fqn == fqn and shard.offset <= offset < shard.offset + shard.numel:
                count = min(end, shard.offset + shard.numel) - offset
                return job.slab(group.spec.name, kind), shard.position + offset - shard.offset, count
    raise NotFoundError(f"job {job.spec.name!r} has no element {offset} of {fqn!r} on this node")
