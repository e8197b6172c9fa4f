"""Background verification: it reads all committed versions again and again, slowly, to find damage early.

When damage is found early, an older step or a copy elsewhere can still help. Must only read: the tier counts, names and
sets aside damaged blocks as it does for any other read.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterable
from typing import Any

from storage.errors import DamagedBlockError, DeviceError
from storage.tiers.contract import DurableTier, Region
from storage.tiers.io_engine import Priority

# The bytes of one read. The event loop spends as much time on a small read as on one of this size.
CHUNK_BYTES = 4 << 20
# The pause between two passes, also if there was nothing to read.
PAUSE_SECONDS = 1.0


class Scrubber:
    """One task that reads at most `bytes_per_second`, with a lower priority than all other requests."""

    def __init__(self, tier: DurableTier[Any], regions: Callable[[], Iterable[Region]], bytes_per_second: int) -> None:
        """Start the task.

        Args:
            regions: returns all versions on `tier`.
            bytes_per_second: the speed of reading; 0: nothing is read.
        """
        self.passes = 0
        self.bytes_read = 0
        self._tier = tier
        self._regions = regions
        self._bytes_per_second = bytes_per_second
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._task = asyncio.ensure_future(self._run()) if bytes_per_second else None

    async def close(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            for region in list(self._regions()):
                await self._read(region)
            self.passes += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _read(self, region: Region) -> None:
        for offset in range(0, region.nbytes, CHUNK_BYTES):
            if not region.holders:
                # The version was freed after the pass began.
                return
            length = min(CHUNK_BYTES, region.nbytes - offset)
            # The tier counts and logs damage. Other device errors are reported by the clients that read from the
            # device.
            with contextlib.suppress(DamagedBlockError, DeviceError):
                await self._tier.read_into(region, offset, self._buffer[:length], Priority.SCRUB)
            self.bytes_read += length
            await asyncio.sleep(length / self._bytes_per_second)
