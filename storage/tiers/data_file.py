"""One data file on one device: its free space, its I/O engine, and the measured bandwidth of the device.

This module owns the file's length, and the lock of its directory. It does not know what an extent holds; the catalog
does. After a crash, all extents that the catalog does not name are free.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from storage.base import syscalls
from storage.base.errors import DataLossError, StorageError
from storage.tiers.base import round_up
from storage.tiers.extents import Extent, ExtentAllocator, unused_runs
from storage.tiers.io_engine import IoEngine, IoLoad, IoRequest, Priority
from storage.tiers.threaded_io import COALESCED_BYTES, ThreadedIo

log = logging.getLogger(__name__)

# A data file grows by this many bytes at a time, so that growth is rare and the file system can keep the blocks
# together.
GROWTH_BYTES = 64 << 20
# The bytes that a store with several devices writes and reads at its start, to measure the bandwidth of each device.
PROBE_BYTES = 32 << 20
# A sample of a device's bandwidth is taken once this many bytes were moved, because smaller samples are too noisy.
SAMPLE_BYTES = 64 << 20
# The weight of a new sample in the moving average of the bandwidth, between 0 and 1.
SAMPLE_WEIGHT = 0.3


class DataFile:
    """The data file `data.<number>` in one directory: allocates extents of it, grows it, and measures its device."""

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
        """Open or create the file and start its I/O threads.

        Args:
            number: the number by which the catalog knows the file.
            path: the file's path.
            used: the extents of the file that must not be written to. All others are free.
            read_threads: the number of reading threads.
            write_threads: the number of writing threads.
            nice: the niceness of all threads that do the file's I/O.
            lock_fd: the descriptor that holds the lock of the file's directory, which `close` closes. The file owns it
                once this returns. None: the engine holds the lock, because this is the state directory.

        Raises:
            DataLossError: `used` does not fit the file.
            DeviceError: the file cannot be opened.
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
        # The measured bandwidth of the device in bytes per second; None if it was not measured yet.
        self.bandwidth: float | None = None
        self._sampled = self.io.load

    def _take_in(self, used: list[Extent]) -> None:
        """Make all bytes of an opened file free that are not in `used`, and truncate a long unused end of the file."""
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
        """The length of the data file in bytes."""
        return self._size

    @property
    def device_name(self) -> str:
        """The file's path, by which operators know its device."""
        return str(self.path)

    @property
    def stalled_seconds(self) -> float:
        """For how many seconds the oldest read, write or sync has been at the device; 0 if none is there."""
        return self.io.load.stalled_seconds

    @property
    def occupied_bytes(self) -> int:
        """The bytes that the file occupies on its file system."""
        return syscalls.allocated_bytes(self._fd)

    @property
    def used_bytes(self) -> int:
        """The bytes of the file that are in allocated extents."""
        return self._size - self._space.free_bytes

    @property
    def usable_bytes(self) -> int:
        """The bytes that can be allocated before the file must grow."""
        return self._space.usable_bytes

    @property
    def free_runs(self) -> int:
        """The number of free runs, which is large if the free space is fragmented."""
        return len(self._space)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Allocate extents for `nbytes`; None if the free space does not suffice."""
        return self._space.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Make an extent free, so that the next allocation may use it."""
        self._space.add(extent)

    def grow(self, nbytes: int) -> None:
        """Extend the file by `nbytes` (whole pages), and allocate their blocks now.

        Raises:
            DiskFullError: the file system does not have that much room. The file is as long as before.
        """
        syscalls.extend(self._fd, self._size, nbytes, self.path)
        self._space.add(Extent(self._size, nbytes, self.number))
        self._size += nbytes

    async def close(self) -> None:
        """Finish all requests, close the file, and release the lock of its directory."""
        await self.io.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    async def probe(self, room_bytes: int) -> None:
        """Measure the device's bandwidth by writing and reading scratch bytes.

        If the free space is too small for them, the file grows, but by no more than `room_bytes`. An error is logged,
        and the bandwidth stays unknown.
        """
        try:
            if self._space.usable_bytes < PROBE_BYTES <= room_bytes:
                self.grow(PROBE_BYTES)
            extents = self._space.allocate(PROBE_BYTES)
            if extents is None:
                return
            try:
                # The buffer of the measurement is anonymous memory, which is freed with the last view of it, because
                # views may outlive this code if an error is raised.
                buffer = memoryview(mmap.mmap(-1, COALESCED_BYTES))
                cuts = [(e, i) for e in extents for i in range(0, e.nbytes, COALESCED_BYTES)]
                requests = [IoRequest(e.offset + i, buffer[: min(COALESCED_BYTES, e.nbytes - i)]) for e, i in cuts]
                await self.io.write(requests, Priority.DEMAND)
                await self.io.read(requests, Priority.DEMAND)
            finally:
                for extent in extents:
                    self._space.add(extent)
        except StorageError as error:
            log.warning("%s: its speed could not be measured: %s", self.path, error)
            # The bytes of failed reads and writes say nothing about the device's speed, so the next sample begins after
            # them.
            self._sampled = self.io.load
            return
        self._take_sample(self.io.load)

    def sample(self) -> None:
        """Update the measured bandwidth, if enough bytes were moved since the last sample."""
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
