"""Explains every used byte of the tiers by its holder, for operators and for tests that look for leaks.

Owns nothing, and looks at everything in one turn of the event loop, so that the sums belong to one instant. What no
holder explains was leaked: an operation that failed half-way did not give it back.
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
    """Who holds bytes of a tier."""

    FIXED = "fixed"
    """The daemon itself, from start to end: the arena's header and the optimizer's buffers."""

    JOBS = "jobs"
    """Versions on backing tiers, and copies in host memory that hold bytes or have their home there."""

    READERS = "readers"
    """Versions that a reader holds and that are no job's any more."""

    LEASES = "leases"
    """Ranges that a session has leased."""

    QUARANTINE = "quarantine"
    """Ranges that the process of an ended session may still write to."""

    DAMAGED = "damaged"
    """Extents that were found damaged, and are never used again."""

    UNDER_WAY = "under way"
    """DemandReads, updates and puts. Falls to 0 whenever nothing is under way; what stays was leaked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAccount:
    """The used bytes of one tier at one instant, by holder."""

    tier: TierName
    used_bytes: int
    held_bytes: Mapping[Holder, int]

    @property
    def unexplained_bytes(self) -> int:
        """Used bytes without a holder; negative where something was freed twice. 0 but for single turns of the loop."""
        return self.used_bytes - sum(self.held_bytes.values())

    @property
    def is_settled(self) -> bool:
        """Whether jobs, readers and sessions explain every byte. True at some instant soon unless bytes were leaked."""
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
    """Explain the used bytes of the host tier. A range counts once, for the first of its holders in this order."""
    holders: dict[ArenaRange, Holder] = dict.fromkeys(leased, Holder.LEASES)
    for ranges, holder in (
        (quarantined, Holder.QUARANTINE),
        (host_cache.pinned_ranges, Holder.UNDER_WAY),
        (scratch.ranges, Holder.UNDER_WAY),
        ((slab.copy.region for slab in slabs if slab.copy is not None and slab.copy.is_of_use), Holder.JOBS),
    ):
        for range_ in ranges:
            holders.setdefault(range_, holder)
    held = Counter({Holder.FIXED: fixed_bytes})
    for range_, holder in holders.items():
        held[holder] += range_.nbytes
    return TierAccount(tier=TierName.HOST, used_bytes=host.used_bytes, held_bytes=held)


def backing_accounts(
    backing: BackingTiers, slabs: Sequence[Slab], readers: Collection[StepReader]
) -> Iterator[TierAccount]:
    """Explain the used bytes of each backing tier, in their order."""
    for tier in backing:
        damaged_bytes = backing.durable.damaged_bytes if tier is backing.durable else None
        yield _backing_account(tier, slabs, readers, damaged_bytes)


def _backing_account(
    tier: BackingTier[Any],
    slabs: Iterable[Slab],
    readers: Iterable[StepReader],
    damaged_bytes: Callable[[Iterable[Region]], int] | None,
) -> TierAccount:
    """Explain the used bytes of a tier. A region counts once, for the first of its holders in this order."""
    holders: dict[Region, Holder] = {}
    for regions, holder in (
        ((region for slab in slabs for region in slab.versions.values()), Holder.JOBS),
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
