"""Ranges of the arena that are no slab's: gradients, bytes staged for a later step, and ranges of tensors.

Knows which job each is on account of. Whoever takes a range frees it, or hands it on; nothing here is evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier


class ScratchRanges:
    """The ranges of all jobs."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._owners: dict[ArenaRange, str] = {}
        # Bytes by job.
        self._accounts: Counter[str] = Counter()

    @property
    def ranges(self) -> Collection[ArenaRange]:
        """All of them."""
        return self._owners.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self._accounts.total()

    def nbytes_of(self, job: str) -> int:
        """Bytes of those that are on account of a job."""
        return self._accounts[job]

    async def allocate(self, job: str, nbytes: int, *, from_top: bool = False) -> ArenaRange:
        """Takes a range, when there is room; raises BudgetExceededError where there was none before the deadline."""
        region = await self._host.allocate(nbytes, from_top=from_top)
        self._owners[region] = job
        self._accounts[job] += region.nbytes
        return region

    def free(self, region: ArenaRange) -> None:
        """Gives a range back."""
        self._host.free(self.let_go(region))

    def let_go(self, region: ArenaRange) -> ArenaRange:
        """Hands a range on: it is a slab's from here on, or the caller gives it to `HostTier.free` later."""
        job = self._owners.pop(region)
        self._accounts[job] -= region.nbytes
        if not self._accounts[job]:
            del self._accounts[job]
        return region
