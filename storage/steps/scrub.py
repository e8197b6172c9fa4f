"""Background verification: it reads all committed versions again and again, slowly, to find damage early.

When damage is found early, an older step or a copy elsewhere can still help. This module must only read: the tier
counts, names and sets aside damaged blocks as it does for any other read.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from storage.base.errors import DamagedBlockError, DeviceError
from storage.tiers.contract import DurableTier, Region
from storage.tiers.io_engine import Priority

# The bytes of one read of the scrubber. The event loop spends as much time on a small read as on one of this size.
CHUNK_BYTES = 4 << 20
# A read of fewer bytes counts as this many against the scrubber's bandwidth, because it wakes the event loop and two
# threads, which takes as much time as for a long one. With 200 MB in 5,000 small tensors, an idle daemon took 30 % of a
# CPU before its reads counted so, and takes 5 to 9 % now. With an empty store it takes 2 to 4 % (two virtual cores).
LEAST_CHARGED_BYTES = 1 << 20
# After this many damaged blocks in one version the scrubber skips the rest of the version, because the version is lost
# anyway, and the search for the parameters of each damaged block visits all slabs.
MOST_DAMAGED_BLOCKS = 8
# The pause between two passes of the scrubber over all versions. The task pauses even after a pass that found nothing
# to read, because it would otherwise never let other tasks run.
PAUSE_SECONDS = 1.0


class Scrubber:
    """A background task that reads and verifies versions, at `bytes_per_second` at most, behind all other requests."""

    def __init__(self, tier: DurableTier[Any], regions: Callable[[], Iterable[Region]], bytes_per_second: int) -> None:
        """Start the background task, unless `bytes_per_second` is 0.

        Args:
            regions: returns an iterable of all versions on `tier`; the store may change while the task iterates over
                it.
            bytes_per_second: the speed of reading; 0: nothing is read in the background.
        """
        self.passes = 0
        self.bytes_read = 0
        self._tier = tier
        self._regions = regions
        self._bytes_per_second = bytes_per_second
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._task = asyncio.ensure_future(self._run()) if bytes_per_second else None

    async def close(self) -> None:
        """Stop the background task, and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            # The scrubber walks over the versions without listing them first, because a list of a million versions
            # would block the event loop for a second.
            for region in self._regions():
                await self._read(region)
            self.passes += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def verify(self, region: Region) -> AsyncIterator[tuple[int, DamagedBlockError | DeviceError | None]]:
        """Read and verify a version now, at the speed of its device. The background task goes on meanwhile.

        Yields:
            After each read the number of its bytes, and its error if they are damaged or cannot be read.
        """
        buffer = memoryview(mmap.mmap(-1, min(CHUNK_BYTES, max(region.nbytes, 1))))
        async for found in self._verify(region, buffer):
            yield found

    async def _read(self, region: Region) -> None:
        # Errors of these reads are not handled here: the tier counts and logs damage, and clients that read from the
        # device report its other errors.
        async for length, _ in self._verify(region, self._buffer):
            self.bytes_read += length
            await asyncio.sleep(max(length, LEAST_CHARGED_BYTES) / self._bytes_per_second)

    async def _verify(
        self, region: Region, buffer: memoryview
    ) -> AsyncIterator[tuple[int, DamagedBlockError | DeviceError | None]]:
        offset = damaged = 0
        # A version without holders was freed after the pass began, so it is not read any further.
        while offset < region.nbytes and region.holders:
            length = min(CHUNK_BYTES // region.block_bytes * region.block_bytes, region.nbytes - offset)
            error: DamagedBlockError | DeviceError | None = None
            try:
                await self._tier.read_into(region, offset, buffer[:length], Priority.SCRUB)
            except DamagedBlockError as caught:
                error, damaged = caught, damaged + 1
                # The next read begins behind the damaged block.
                length = caught.offset + caught.nbytes - offset
                if damaged == MOST_DAMAGED_BLOCKS:
                    length = region.nbytes - offset
            except DeviceError as caught:
                error = caught
            yield length, error
            offset += length
