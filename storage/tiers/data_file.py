"""One data file on one device: its free space, its I/O engine, and what is known of the device's speed.

Owns the file's length, and the lock of its directory. What an extent holds is the catalog's to know: after a crash, all
that the catalog does not name is free.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from storage import syscalls
from storage.errors import DataLossError, StorageError
from storage.tiers.base import round_up
from storage.tiers.extents import Extent, ExtentAllocator, unused_runs
from storage.tiers.io_engine import IoEngine, IoLoad, IoRequest, Priority
from storage.tiers.threaded_io import COALESCED_BYTES, ThreadedIo

log = logging.getLogger(__name__)

# The file grows by this much at a time, so that growth is rare and the file system can keep the blocks together.
GROWTH_BYTES = 64 << 20
PROBE_BYTES = 32 << 20
# Shorter samples of the bandwidth say little.
SAMPLE_BYTES = 64 << 20
# The weight of a new sample of the bandwidth against all that came before.
SAMPLE_WEIGHT = 0.3


class DataFile:
    """`data.<number>` in one directory."""

    def __init__(
        self,
        number: int,
        path: Path,
        used: Iterable[Extent],
        *,
        read_threads: int,
        write_threads: int,
        nice: int = 0,
        lock_fd: int | None = None,
    ) -> None:
        """Opens or creates the file; `used` are the extents of it that must not be written to.

        The threads that do its I/O have the niceness `nice`. `lock_fd`, a descriptor that holds the lock of the file's
        directory, is the file's once this returns; None: the directory is locked otherwise.

        Raises:
            DataLossError: `used` does not fit the file.
            DeviceError: it cannot be opened.
        """
        self.number = number
        self.path = path
        self._fd, self.direct = syscalls.open_data_file(path)
        self._size = syscalls.file_size(self._fd) // mmap.PAGESIZE * mmap.PAGESIZE
        self._space = ExtentAllocator(number)
        try:
            self._take_in(list(used))
        except BaseException:
            os.close(self._fd)
            raise
        self.io: IoEngine = ThreadedIo(
            self._fd, path, read_threads=read_threads, write_threads=write_threads, nice=nice
        )
        if not self.direct:
            log.warning(
                "%s: the file system of %s refuses O_DIRECT; its I/O goes through the page cache, which costs memory "
                "and speed: use ext4 or xfs on NVMe where you can",
                *(path.name, path.parent),
            )
        self._lock_fd = lock_fd
        # Bytes per second; None: not measured yet.
        self.bandwidth: float | None = None
        self._sampled = self.io.load

    def _take_in(self, used: list[Extent]) -> None:
        """Makes free what is not `used`, and gives a long unused end back to the file system."""
        try:
            runs = unused_runs(self._size, used, self.number)
        except ValueError as error:
            raise DataLossError(
                f"{self.path} does not match the catalog: {error}; restore the file or delete the state directory"
            ) from error
        end = round_up(max((extent.end for extent in used), default=0), GROWTH_BYTES)
        if self._size - end >= GROWTH_BYTES:
            syscalls.truncate(self._fd, end, self.path)
            self._size = end
            runs = unused_runs(end, used, self.number)
        for run in runs:
            self._space.add(run)

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return self._size

    @property
    def device_name(self) -> str:
        """The file's path, by which operators know its device."""
        return str(self.path)

    @property
    def stalled_seconds(self) -> float:
        """How long the oldest transfer has been at the device."""
        return self.io.load.stalled_seconds

    @property
    def occupied_bytes(self) -> int:
        """What it takes of its file system, by allocated blocks."""
        return syscalls.allocated_bytes(self._fd)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated extents."""
        return self._size - self._space.free_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes that can be allocated without growth."""
        return self._space.usable_bytes

    @property
    def free_runs(self) -> int:
        """In how many pieces the free space is."""
        return len(self._space)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Extents for `nbytes`; None where the free space does not hold them."""
        return self._space.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Makes an extent free at once."""
        self._space.add(extent)

    def grow(self, nbytes: int) -> None:
        """Makes the file longer by whole pages, all promised by the file system.

        Raises:
            DiskFullError: there is not that much room; the file is as before.
        """
        syscalls.extend(self._fd, self._size, nbytes, self.path)
        self._space.add(Extent(self._size, nbytes, self.number))
        self._size += nbytes

    async def close(self) -> None:
        """Finish all requests, close the file, and let go of its directory."""
        await self.io.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    async def probe(self, room_bytes: int) -> None:
        """Measures the device with scratch writes and reads; for them the file may grow by `room_bytes`."""
        try:
            if self._space.usable_bytes < PROBE_BYTES <= room_bytes:
                self.grow(PROBE_BYTES)
            extents = self._space.allocate(PROBE_BYTES)
            if extents is None:
                return
            try:
                with mmap.mmap(-1, COALESCED_BYTES) as scratch, memoryview(scratch) as buffer:
                    cuts = [(e, i) for e in extents for i in range(0, e.nbytes, COALESCED_BYTES)]
                    requests = [IoRequest(e.offset + i, buffer[: min(COALESCED_BYTES, e.nbytes - i)]) for e, i in cuts]
                    await self.io.write(requests, Priority.DEMAND)
                    await self.io.read(requests, Priority.DEMAND)
                    for request in requests:
                        request.buffer.release()
            finally:
                for extent in extents:
                    self._space.add(extent)
        except StorageError as error:
            log.warning("%s: its speed could not be measured: %s", self.path, error)
        self._take_sample(self.io.load)

    def sample(self) -> None:
        """Takes what was moved since the last sample into the measured bandwidth."""
        load = self.io.load
        if load.bytes_moved - self._sampled.bytes_moved >= SAMPLE_BYTES:
            self._take_sample(load)

    def _take_sample(self, load: IoLoad) -> None:
        seconds = load.busy_seconds - self._sampled.busy_seconds
        if seconds > 0:
            measured = (load.bytes_moved - self._sampled.bytes_moved) / seconds
            before = measured if self.bandwidth is None else self.bandwidth
            self.bandwidth = before + SAMPLE_WEIGHT * (measured - before)
        self._sampled = load
