"""The accounts of the tiers: which holder uses how many bytes, for operators and for tests that look for leaks.

This module owns nothing. It must not hold up the event loop, so it visits the slabs in slices, and counts the bytes
that are allocated or freed meanwhile. Bytes that neither a holder nor this count explains were leaked: an operation
failed halfway and did not free them.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from storage.base.shard import TierName
from storage.base.slices import in_slices
from storage.memory.gradients import Gradients
from storage.memory.host_cache import HostCache
from storage.memory.scratch import ScratchRanges
from storage.state.job_table import JobTable
from storage.state.slab import Group
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier, DurableTier, Region
from storage.tiers.gpu import GpuTier
from storage.tiers.host import HostTier
from storage.tiers.lent import LentMemory

# A function that returns the ranges of the arena that a holder has when it is called.
Ranges = Callable[[], Iterable[ArenaRange]]


class Holder(enum.StrEnum):
    """What uses bytes of a tier. The accountant counts each used byte of a tier for exactly one holder."""

    FIXED = "fixed"
    """The daemon itself, from its start to its end: the arena's header and the optimizer's buffers."""

    JOBS = "jobs"
    """Versions on backing tiers; host copies that hold bytes, or whose slabs are placed in host memory."""

    READERS = "readers"
    """Versions that a reader holds and that belong to no job any more."""

    KEPT = "kept steps"
    """Versions that a kept step holds and that its job does not need any more."""

    LEASES = "leases"
    """Ranges that a session has leased, and the regions of its spilled gradients."""

    QUARANTINE = "quarantine"
    """Ranges to which the process of an ended session may still write."""

    LENT = "lent"
    """Ranges that other daemons have borrowed, which are taken back when this daemon's own jobs need room."""

    DAMAGED = "damaged"
    """Extents that were found damaged, and are never used again."""

    UNDER_WAY = "under way"
    """Reads, updates and puts. Their sum is 0 whenever no operation is under way; otherwise bytes were leaked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAccount:
    """The account of one tier for operators: how many of its used bytes each holder has."""

    tier: TierName
    used_bytes: int
    held_bytes: Mapping[Holder, int]
    # The bytes that were allocated or freed while the store summed up its holders' bytes. If this is 0, the account
    # shows the bytes of one instant.
    moved_bytes: int = 0

    @property
    def unexplained_bytes(self) -> int:
        """Used bytes without a holder, beyond what `moved_bytes` may explain; negative if bytes were freed twice.

        Between two turns of the event loop this may differ from 0 for a moment without any fault.
        """
        missing = self.used_bytes - sum(self.held_bytes.values())
        return missing - max(-self.moved_bytes, min(self.moved_bytes, missing))

    @property
    def is_balanced(self) -> bool:
        """Whether jobs, readers and sessions explain every used byte.

        A test polls this: without leaks it soon becomes true, as soon as no operation is under way.
        """
        return self.used_bytes == sum(self.held_bytes.values()) and self.held_bytes.get(Holder.UNDER_WAY, 0) == 0


class Accountant:
    """Computes for the tiers of one engine which holder uses how many bytes.

    The daemon calls it when an operator asks, and tests call it to find leaks.
    """

    def __init__(
        self,
        jobs: JobTable,
        host: HostTier,
        backing: BackingTiers,
        host_cache: HostCache,
        scratch: ScratchRanges,
        gradients: Gradients,
        readers: Collection[StepReader],
        lent: LentMemory,
        gpu: GpuTier,
        *,
        fixed_bytes: int,
    ) -> None:
        """Keep the parts of the engine; `readers` are the open ones, for `fixed_bytes` see `Holder.FIXED`."""
        self._lent = lent
        self._gpu = gpu
        self._jobs = jobs
        self._host = host
        self._backing = backing
        self._host_cache = host_cache
        self._scratch = scratch
        self._gradients = gradients
        self._readers = readers
        self._fixed_bytes = fixed_bytes
        # This lock is held while an account is taken: two at once would need too much memory, because the account of a
        # million slabs uses a hundred MiB.
        self._taking = asyncio.Lock()

    async def take(
        self,
        *,
        leased: Ranges = lambda: (),
        quarantined: Ranges = lambda: (),
        spilled: Callable[[], Iterable[Region]] = lambda: (),
    ) -> list[TierAccount]:
        """Return for each tier, fastest first, which holder uses how many of its bytes.

        This visits all slabs, and lets the event loop run other tasks in between. A range that has several holders
        counts for the first of: sessions, quarantine, operations under way, jobs. A region counts for the first of:
        jobs, kept steps, readers, sessions, operations under way.

        Args:
            leased: returns the ranges of the arena that sessions have leased.
            quarantined: returns the ranges to which processes of ended sessions may still write.
            spilled: returns the regions of the spilled gradients that sessions have leased.
        """
        accounts = await self._take(leased, quarantined, spilled)
        accounts[1:1] = [
            TierAccount(tier=tier.name, used_bytes=tier.used_bytes, held_bytes={Holder.JOBS: tier.used_bytes})
            for tier in self._backing.copies
        ]
        if self._gpu.is_in_use:
            # The used device memory is divided between two holders: ranges that clients have leased, and other copies
            # of slabs.
            used, in_leases = self._gpu.used_bytes, self._gpu.leased_bytes
            held = {Holder.JOBS: used - in_leases, Holder.LEASES: in_leases}
            accounts.insert(0, TierAccount(tier=self._gpu.name, used_bytes=used, held_bytes=held))
        return accounts

    async def _take(
        self, leased: Ranges, quarantined: Ranges, spilled: Callable[[], Iterable[Region]]
    ) -> list[TierAccount]:
        """Return the accounts of the host tier and of the backing tiers."""
        async with self._taking:
            tiers = (self._host, *self._backing)
            moved = [tier.counters.moved_bytes for tier in tiers]
            # During the walk over the slabs, bytes may pass from a session or an operation to a slab that was visited
            # before, or from a reader to a kept step. The account would then miss these bytes. So sessions, operations
            # and readers are read before the walk and again after it.
            ranges = self._ranges(leased, quarantined)
            new, lent = self._new_regions(), list(spilled())
            read = [reader.regions for reader in self._readers]
            copies, regions = await self._visit(read)
            regions.add(Holder.LEASES, [*spilled(), *(region for region in lent if region.holders)])
            regions.add(Holder.UNDER_WAY, [*self._new_regions(), *new])
            accounts = [
                self._host_account(copies, self._ranges(leased, quarantined), ranges),
                *(regions.account(tier) for tier in self._backing),
            ]
            return [
                replace(account, moved_bytes=tier.counters.moved_bytes - before)
                for account, tier, before in zip(accounts, tiers, moved, strict=True)
            ]

    def _ranges(self, leased: Ranges, quarantined: Ranges) -> dict[ArenaRange, Holder]:
        """Return the ranges of the arena that sessions and operations have, each with its first holder."""
        holders = dict.fromkeys(leased(), Holder.LEASES)
        for ranges, holder in (
            (quarantined(), Holder.QUARANTINE),
            (self._lent.ranges, Holder.LENT),
            (self._host_cache.pinned_ranges, Holder.UNDER_WAY),
            (self._scratch.ranges, Holder.UNDER_WAY),
        ):
            for range_ in ranges:
                holders.setdefault(range_, holder)
        return holders

    def _new_regions(self) -> list[Region]:
        return [*(region for tier in self._backing for region in tier.new_regions), *self._gradients.regions]

    async def _visit(self, read: list[dict[Any, Region | None]]) -> tuple[set[ArenaRange], _Regions]:
        """Return the ranges of the copies of all slabs, and the regions of jobs, kept steps and readers.

        Args:
            read: the regions of the readers that were open before the walk.
        """
        copies, regions = set[ArenaRange](), _Regions(self._backing.durable)
        async for group in in_slices(_groups(list(self._jobs))):
            for slab in group.slabs:
                regions.add(Holder.JOBS, slab.versions.values())
                if slab.copy is not None and slab.copy.is_of_use:
                    copies.add(slab.copy.arena_range)
        async for group in in_slices(_groups(list(self._jobs.all_kept()))):
            for slab in group.slabs:
                regions.add(Holder.KEPT, slab.versions.values())
        for held in [*read, *(reader.regions for reader in self._readers)]:
            async for region in in_slices(list(held.values())):
                if region is not None and region.holders:
                    regions.add(Holder.READERS, (region,))
        return copies, regions

    def _host_account(
        self, copies: set[ArenaRange], ranges: dict[ArenaRange, Holder], before: dict[ArenaRange, Holder]
    ) -> TierAccount:
        """Return the account of the host tier. `before` has the ranges and holders before the walk over the slabs."""
        held = Counter({Holder.FIXED: self._fixed_bytes})
        for range_, holder in ranges.items():
            held[holder] += range_.nbytes
        passed = (range_ for range_ in before if range_ not in ranges and range_ not in copies)
        held[Holder.JOBS] += sum(range_.nbytes for range_ in passed)
        held[Holder.JOBS] += sum(range_.nbytes for range_ in copies if range_ not in ranges)
        return TierAccount(tier=TierName.HOST, used_bytes=self._host.used_bytes, held_bytes=held)


def _groups(jobs: Iterable[Job]) -> Iterator[Group]:
    # The groups of a job are listed only when the walk over all slabs comes to the job, because clients may register
    # groups during the walk.
    return (group for job in jobs for group in list(job.groups.values()))


class _Regions:
    """The regions of the backing tiers that an account has found so far, by holder.

    A region that is added for several holders counts for the first of them.
    """

    def __init__(self, durable: DurableTier[Any]) -> None:
        self._durable = durable
        self._seen: set[Region] = set()
        self._held: Counter[tuple[TierName, Holder]] = Counter()
        self._damaged: list[Region] = []

    def add(self, holder: Holder, regions: Iterable[Region]) -> None:
        for region in regions:
            if region in self._seen:
                continue
            self._seen.add(region)
            self._held[region.tier.name, holder] += region.nbytes
            if region.tier is self._durable and self._durable.is_damaged(region):
                self._damaged.append(region)

    def account(self, tier: BackingTier[Any]) -> TierAccount:
        held = Counter({holder: nbytes for (name, holder), nbytes in self._held.items() if name is tier.name})
        if tier is self._durable and (damaged := self._durable.damaged_bytes(self._damaged)):
            held[Holder.DAMAGED] = damaged
        return TierAccount(tier=tier.name, used_bytes=tier.used_bytes, held_bytes=held)
