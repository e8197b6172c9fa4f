"""Ranges of the arena that belong to no slab: gradients, bytes staged for a later step, and ranges of tensors.

This module owns which job each range is charged to. The caller that allocates a range frees it or hands it over: these
ranges are never evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from storage.tiers.arena import ArenaRange
from storage.tiers.host import HostTier


class ScratchRanges:
    """The scratch ranges of all jobs."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._owners: dict[ArenaRange, str] = {}
        # The bytes of each job's ranges, by the job's name.
        self._accounts: Counter[str] = Counter()

    @property
    def ranges(self) -> Collection[ArenaRange]:
        """All scratch ranges."""
        return self._owners.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch ranges."""
        return self._accounts.total()

    def nbytes_of(self, job: str) -> int:
        """Return the bytes of the ranges that are charged to a job."""
        return self._accounts[job]

    async def allocate(self, job: str, nbytes: int, *, from_top: bool = False) -> ArenaRange:
        """Wait for room, and return a range that is charged to `job`.

        Raises:
            BudgetExceededError: there was no room before the deadline.
        """
        return self._charge(job, await self._host.allocate(nbytes, from_top=from_top))

    def try_allocate(self, job: str, nbytes: int) -> ArenaRange | None:
        """Return a range from the top that is charged to `job`, without waiting; None if there is no room now."""
        range_ = self._host.try_allocate(nbytes, None, from_top=True)
        return None if range_ is None else self._charge(job, range_)

    def allocate_free(self, nbytes: int) -> ArenaRange | None:
        """Return a range from the bottom of the free and the lent room, charged to no job, or None.

        It neither waits nor evicts any copy.
        """
        range_ = self._host.allocate_free(nbytes, from_top=False, takes_back=True)
        return None if range_ is None else self._charge("", range_)

    def _charge(self, job: str, range_: ArenaRange) -> ArenaRange:
        self._owners[range_] = job
        self._accounts[job] += range_.nbytes
        return range_

    def free(self, range_: ArenaRange) -> None:
        """Free a range."""
        self._host.free(self.hand_over(range_))

    def hand_over(self, range_: ArenaRange) -> ArenaRange:
        """Return a range that no job is charged for any more.

        The range then belongs to a slab, or the caller passes it to `HostTier.free` later.
        """
        job = self._owners.pop(range_)
        self._accounts[job] -= range_.nbytes
        if not self._accounts[job]:
            del self._accounts[job]
        return range_
