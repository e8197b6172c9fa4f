"""Background verification: reads all that is committed, again and again, slowly, so that damage is found while an older
step or a copy elsewhere can still help.

What it finds, the tier counts, names and sets aside, as for any other read.
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

# A read of it costs the event loop as much as a small one.
CHUNK_BYTES = 4 << 20
# Between two passes, and where there is nothing to read.
PAUSE_SECONDS = 1.0


class Scrubber:
    """One task that reads at most `bytes_per_second`, behind everybody else."""

    def __init__(self, tier: DurableTier[Any], regions: Callable[[], Iterable[Region]], bytes_per_second: int) -> None:
        """`regions` gives all versions on `tier`; 0 bytes per second: nothing is read."""
        self.passes = 0
        self.bytes_read = 0
        self._tier = tier
        self._regions = regions
        self._bytes_per_second = bytes_per_second
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._task = asyncio.ensure_future(self._run()) if bytes_per_second else None

    async def close(self) -> None:
        """Ends the task."""
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
                # Its step was left behind since the pass began.
                return
            length = min(CHUNK_BYTES, region.nbytes - offset)
            # The tier counts and logs damage; a device's other troubles are reported by everybody who reads.
            with contextlib.suppress(DamagedBlockError, DeviceError):
                await self._tier.read_into(region, offset, self._buffer[:length], Priority.SCRUB)
            self.bytes_read += length
            await asyncio.sleep(length / self._bytes_per_second)
