"""The copies of versions in the memory of all lenders: which lender has a copy, and where in its loan.

This module owns the record of which lender has a copy of which version. It must never read or send a byte of a copy,
because only remote.py does so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from storage.tiers.base import TierCounters
from storage.tiers.contract import Region
from storage.tiers.loan_directory import RemoteCopy
from storage.tiers.source import Source


class RemoteCopies:
    """The table of the versions that have a copy in the memory of a lender.

    It finds room for new copies, and drops copies that are of no use any more.
    """

    def __init__(self, sources: Sequence[Source], counters: TierCounters) -> None:
        """Make the table of a remote tier, which is empty at first.

        Args:
            sources: the lenders, with their loans.
            counters: those of the remote tier.
        """
        self._sources = sources
        self._counters = counters
        self._where: dict[Region, tuple[Source, RemoteCopy]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def find(self, region: Region) -> tuple[Source, RemoteCopy] | None:
        """Return the lender that has a copy of a version, and the copy; None if no lender has one.

        The copy may lack some of the version's bytes, see `RemoteCopy.owns`.
        """
        return self._where.get(region)

    def has(self, region: Region) -> bool:
        """Return whether a lender has all bytes of a version; see `CopyTier.has`."""
        found = self._where.get(region)
        return found is not None and found[1].owns(region, 0, region.nbytes)

    def begin(self, region: Region, instead_of: Region | None, next_use: float) -> bool:
        """Allocate memory of a lender for a version, and return whether this succeeded; see `CopyTier.begin`."""
        if region in self._where:
            return True
        found = None if instead_of is None else self._where.get(instead_of)
        if found is not None and found[0].is_used and found[1].fits(region):
            source, copy = found
            copy.next_use = next_use
            for other in copy.regions:
                if other is not instead_of:
                    self.forget(other)
        else:
            placed = self._place(region.nbytes, region.block_bytes, next_use)
            if placed is None:
                return False
            source, copy = placed
        copy.begin(region)
        self._where[region] = source, copy
        return True

    def _place(self, nbytes: int, block_bytes: int, next_use: float) -> tuple[Source, RemoteCopy] | None:
        now = asyncio.get_running_loop().time()
        sources = [source for source in self._sources if source.is_used and source.full_until <= now]
        sources.sort(key=lambda source: source.directory.used_bytes - source.directory.size_bytes)
        for source in sources:
            copy, dropped = source.directory.place(nbytes, block_bytes, next_use)
            for other in dropped:
                self._counters.demotions += 1
                self.forget_dropped(other)
            if copy is not None:
                self._counters.moved_bytes += nbytes
                return source, copy
        return None

    def forget(self, region: Region) -> None:
        """Forget the copies of a version whose region on NVMe was freed; see `CopyTier.forget`."""
        found = self._where.pop(region, None)
        if found is None:
            return
        source, copy = found
        copy.forget(region)
        if not copy.regions:
            self.drop(source, copy)

    def drop(self, source: Source, copy: RemoteCopy) -> None:
        """Give up a copy. If it was the lender's last one, tell the lender that it may free the memory of the loan."""
        if copy.is_dropped:
            return
        source.directory.drop(copy)
        self.forget_dropped(copy)
        if not source.directory.used_bytes and source.memory is not None and source.directory.size_bytes:
            source.memory.discard(0, source.directory.size_bytes)

    def forget_dropped(self, copy: RemoteCopy) -> None:
        """Forget where the versions of a copy are, because the directory of the loan has dropped the copy."""
        self._counters.moved_bytes += copy.room_bytes
        for region in copy.regions:
            self._where.pop(region, None)
            copy.forget(region)
