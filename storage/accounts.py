"""The accounts of the tiers: which holder uses how many bytes, for operators and for tests that look for leaks.

Owns nothing. Must look at all holders in one turn of the event loop, so that the sums belong to one instant. Bytes that
no holder explains were leaked: an operation failed halfway and did not free them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.host_cache import HostCache
from storage.reader import StepReader
from storage.scratch import ScratchRanges
from storage.shard import TierName
from storage.slab import Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier, Region
from storage.tiers.host import HostTier


class Holder(enum.StrEnum):
    """The holder of bytes of a tier. Each byte counts for one holder."""

    FIXED = "fixed"
    """The daemon itself, from its start to its end: the arena's header and the optimizer's buffers."""

    JOBS = "jobs"
    """Versions on backing tiers, and copies in host memory that hold bytes or whose slabs are placed there."""

    READERS = "readers"
    """Versions that a reader holds and that belong to no job any more."""

    KEPT = "kept steps"
    """Versions that a kept step holds and that its job does not need any more."""

    LEASES = "leases"
    """Ranges that a session has leased."""

    QUARANTINE = "quarantine"
    """Ranges to which the process of an ended session may still write."""

    DAMAGED = "damaged"
    """Extents that were found damaged, and are never used again."""

    UNDER_WAY = "under way"
    """Reads, updates and puts. Their sum is 0 whenever no operation is under way; otherwise bytes were leaked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAccount:
    """The used bytes of one tier at one instant, by holder."""

    tier: TierName
    used_bytes: int
    held_bytes: Mapping[Holder, int]

    @property
    def unexplained_bytes(self) -> int:
        """Used bytes without a holder; negative if bytes were freed twice.

        Between two turns of the event loop this may differ from 0 for a moment without any fault.
        """
        return self.used_bytes - sum(self.held_bytes.values())

    @property
    def is_balanced(self) -> bool:
        """Whether jobs, readers and sessions explain every used byte.

        A test polls this: without leaks it soon becomes true, as soon as no operation is under way.
        """
        return self.unexplained_bytes == 0 and self.held_bytes.get(Holder.UNDER_WAY, 0) == 0


def host_account(
    host: HostTier,
    host_cache: HostCache,
    scratch: ScratchRanges,
    *,
    fixed_bytes: int,
    slabs: Iterable[Slab],
    leased: Iterable[ArenaRange],
    quarantined: Iterable[ArenaRange],
) -> TierAccount:
    """Return the account of the host tier.

    A range that has several holders counts for the first of them: sessions, quarantine, operations under way, jobs.
    """
    holders: dict[ArenaRange, Holder] = dict.fromkeys(leased, Holder.LEASES)
    for ranges, holder in (
        (quarantined, Holder.QUARANTINE),
        (host_cache.pinned_ranges, Holder.UNDER_WAY),
        (scratch.ranges, Holder.UNDER_WAY),
        ((slab.copy.arena_range for slab in slabs if slab.copy is not None and slab.copy.is_of_use), Holder.JOBS),
    ):
        for range_ in ranges:
            holders.setdefault(range_, holder)
    held = Counter({Holder.FIXED: fixed_bytes})
    for range_, holder in holders.items():
        held[holder] += range_.nbytes
    return TierAccount(tier=TierName.HOST, used_bytes=host.used_bytes, held_bytes=held)


def backing_accounts(
    backing: BackingTiers, slabs: Sequence[Slab], kept: Sequence[Slab], readers: Collection[StepReader]
) -> Iterator[TierAccount]:
    """Yield the account of each backing tier, fastest first; `kept` are the slabs of kept steps."""
    for tier in backing:
        damaged_bytes = backing.durable.damaged_bytes if tier is backing.durable else None
        yield _backing_account(tier, slabs, kept, readers, damaged_bytes)


def _backing_account(
    tier: BackingTier[Any],
    slabs: Iterable[Slab],
    kept: Iterable[Slab],
    readers: Iterable[StepReader],
    damaged_bytes: Callable[[Iterable[Region]], int] | None,
) -> TierAccount:
    """Return the account of a tier.

    A region that has several holders counts for the first of them: jobs, kept steps, readers, operations under way.
    """
    holders: dict[Region, Holder] = {}
    for regions, holder in (
        ((region for slab in slabs for region in slab.versions.values()), Holder.JOBS),
        ((region for slab in kept for region in slab.versions.values()), Holder.KEPT),
        ((region for reader in readers for region in reader.regions.values() if region is not None), Holder.READERS),
        (tier.new_regions, Holder.UNDER_WAY),
    ):
        for region in regions:
            if region.tier is tier:
                holders.setdefault(region, holder)
    held: Counter[Holder] = Counter()
    for region, holder in holders.items():
        held[holder] += region.nbytes
    if damaged_bytes is not None and (damaged := damaged_bytes(holders)):
        held[Holder.DAMAGED] = damaged
    return TierAccount(tier=tier.name, used_bytes=tier.used_bytes, held_bytes=held)
