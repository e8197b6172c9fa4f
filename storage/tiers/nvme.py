"""The NVMe tier: regions are lists of extents of one preallocated data file, read and written past the page cache.

Owns the file, the free space and the I/O threads. What an extent holds is the catalog's to know: after a crash, all
that the catalog does not name is free.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from storage import syscalls
from storage.errors import BudgetExceededError, DataLossError, DiskFullError
from storage.integrity import Checksums
from storage.shard import TierName
from storage.tiers.base import PAGE_BYTES, TierCounters, round_up
from storage.tiers.extents import Extent, ExtentAllocator, unused_runs
from storage.tiers.io_engine import IoPool, Priority

# The file grows by this much at a time, so that growth is rare and the file system can keep the blocks together.
GROWTH_BYTES = 64 << 20
# One request to the device: large enough for its full speed, small enough that several workers share a large slab.
REQUEST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class NvmeRegion:
    """Bytes in extents, in order, with what is known of their contents."""

    extents: tuple[Extent, ...]
    checksums: Checksums

    @property
    def nbytes(self) -> int:
        """Bytes in whole blocks."""
        return sum(extent.nbytes for extent in self.extents)


class NvmeTier:
    """One data file on one device."""

    name = TierName.NVME

    def __init__(
        self, path: Path, budget_bytes: int, used: Iterable[Extent], *, read_threads: int, write_threads: int
    ) -> None:
        """Opens or creates the file at `path`; `used` are the extents that committed versions occupy.

        Raises:
            DataLossError: `used` does not fit the file.
            BudgetExceededError: committed versions alone exceed the budget.
        """
        self.path = path
        self.budget_bytes = budget_bytes
        self.counters = TierCounters()
        self._fd, self.direct = syscalls.open_data_file(path)
        self._size = syscalls.file_size(self._fd) // PAGE_BYTES * PAGE_BYTES
        self._allocator = ExtentAllocator()
        try:
            self._take_in(used)
        except BaseException:
            os.close(self._fd)
            raise
        self._reads = IoPool("nvme-read", read_threads)
        self._writes = IoPool("nvme-write", write_threads)
        # A thread of their own: behind requests to the device they would wait a thousand times as long as they take.
        self._checks = IoPool("nvme-check", 1)

    def _take_in(self, used: Iterable[Extent]) -> None:
        """Makes free what is not `used`."""
        try:
            runs = unused_runs(self._size, used)
        except ValueError as error:
            raise DataLossError(
                f"{self.path} does not match the catalog: {error}; restore the file or delete the state directory"
            ) from error
        for run in runs:
            self._allocator.add(run)
        if self.used_bytes > self.budget_bytes:
            raise BudgetExceededError(
                f"nvme_budget {self.budget_bytes} is less than the {self.used_bytes} bytes of committed versions in "
                f"{self.path}; raise nvme_budget or delete jobs"
            )

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated extents."""
        return self._size - self._allocator.free_bytes

    @property
    def queue_depth(self) -> int:
        """Requests waiting or under way."""
        return self._reads.depth + self._writes.depth

    @property
    def detail(self) -> str:
        """The file and how it is accessed."""
        return f"{self.path} ({'O_DIRECT' if self.direct else 'buffered: no O_DIRECT on this file system'})"

    def reserve(self, nbytes: int) -> None:
        """Makes sure that `nbytes` more can be allocated, now rather than in the middle of a step.

        Raises:
            BudgetExceededError: the budget cannot hold them.
            DiskFullError: the file system cannot.
        """
        need = round_up(nbytes)
        if self.used_bytes + need > self.budget_bytes:
            raise BudgetExceededError(
                f"nvme_budget {self.budget_bytes} is too small: {self.used_bytes} bytes are in use and {need} more are "
                f"needed in {self.path}; raise nvme_budget to at least {self.used_bytes + need} or delete jobs"
            )
        missing = need - self._allocator.free_bytes
        if missing > 0:
            room = self.budget_bytes // PAGE_BYTES * PAGE_BYTES - self._size
            self._grow(missing, max(missing, min(round_up(missing, GROWTH_BYTES), room)))

    def _grow(self, missing: int, wanted: int) -> None:
        """Makes the file `wanted` bytes longer; only the `missing` ones where the disk is nearly full."""
        try:
            syscalls.extend(self._fd, self._size, wanted, self.path)
        except DiskFullError:
            if wanted == missing:
                raise
            wanted = missing
            syscalls.extend(self._fd, self._size, wanted, self.path)
        self._allocator.add(Extent(self._size, wanted))
        self._size += wanted

    async def allocate(self, nbytes: int, label: str = "scratch") -> NvmeRegion:
        """Extents for `nbytes` of what `label` names; the file grows where its free space is too small."""
        extents = self._allocator.allocate(nbytes)
        if extents is None:
            self.reserve(nbytes)
            extents = self._allocator.allocate(nbytes)
            assert extents is not None
        return NvmeRegion(extents, Checksums(label, round_up(nbytes)))

    def free(self, region: NvmeRegion) -> None:
        """Makes the region's extents free at once."""
        for extent in region.extents:
            self._allocator.add(extent)

    async def read_into(
        self, region: NvmeRegion, offset: int, buffer: memoryview, priority: Priority = Priority.DEMAND
    ) -> None:
        """Fills `buffer` with whole blocks of the region, verified.

        Raises:
            DataLossError: they are not what was written.
            DeviceError: they cannot be read.
        """
        await self._transfer(region, offset, buffer, priority, write=False)

    async def write_from(
        self, region: NvmeRegion, offset: int, buffer: memoryview, priority: Priority = Priority.UPDATE
    ) -> None:
        """Writes `buffer`, whole blocks of the region. Durable only after `sync`."""
        await self._transfer(region, offset, buffer, priority, write=True)

    async def sync(self) -> None:
        """Returns when the device has everything that was written before."""
        await self._writes.run(lambda: syscalls.sync_data(self._fd, self.path), Priority.DEMAND)

    async def close(self) -> None:
        """Finishes all requests and closes the file."""
        await self._reads.close()
        await self._writes.close()
        await self._checks.close()
        os.close(self._fd)

    async def _transfer(
        self, region: NvmeRegion, offset: int, buffer: memoryview, priority: Priority, *, write: bool
    ) -> None:
        pool, move = (self._writes, syscalls.write_exact) if write else (self._reads, syscalls.read_exact)

        def request(position: int, piece: memoryview) -> asyncio.Task[None]:
            return asyncio.ensure_future(pool.run(lambda: move(self._fd, piece, position, self.path), priority))

        pieces = list(_requests(region, offset, buffer))
        if write:
            await self._checks.run(lambda: region.checksums.record(offset, buffer), priority)
            with self.counters.writing:
                await settle([request(position, piece) for position, piece in pieces])
            self.counters.bytes_written += len(buffer)
        else:
            with self.counters.reading:
                await settle([request(position, piece) for position, piece in pieces])
            self.counters.bytes_read += len(buffer)
            await self._checks.run(lambda: region.checksums.verify(offset, buffer), priority)


async def settle(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Waits for all tasks, also when one fails or the caller is cancelled: their buffers are in use until then."""
    pending = list(tasks)
    if not pending:
        return
    try:
        await asyncio.shield(asyncio.gather(*pending))
    except BaseException:
        await asyncio.wait(pending)
        for task in pending:
            if not task.cancelled():
                task.exception()
        raise


def _requests(region: NvmeRegion, offset: int, buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Cuts the transfer of `buffer` at byte `offset` of the region into (file position, piece of the buffer)."""
    done = 0
    for extent in region.extents:
        if offset >= extent.nbytes:
            offset -= extent.nbytes
            continue
        while offset < extent.nbytes and done < len(buffer):
            length = min(REQUEST_BYTES, extent.nbytes - offset, len(buffer) - done)
            yield extent.offset + offset, buffer[done : done + length]
            done += length
            offset += length
        offset = 0
    if done != len(buffer):
        raise ValueError(f"a transfer of {len(buffer)} bytes leaves its region of {region.nbytes} bytes")
