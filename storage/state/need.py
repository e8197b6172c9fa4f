"""The bytes that jobs need of the tiers, computed from the sums over their slabs.

This module owns the arithmetic, which the admission of a store and `paramserver plan` share. It must never look at a
tier, because a planned job has no store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from storage.base.shard import JobSpec, TierName
from storage.base.shown_sizes import shown_size
from storage.state.slab import Tally

# The number of units that each rank leases at a time if the job has several ranks: the unit that the rank copies out of
# the arena and the next one.
_UNITS_OF_A_RANK = 2
# Gradients are kept in host memory without parking them if 1 / _PART_LEFT_FREE of the room stays free; see
# `HostNeed.fits_without_spilling`.
_PART_LEFT_FREE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """The bytes of the host tier that cannot be evicted at the worst moment of a step.

    They are the copies of slabs that are placed in the host tier, the gradients that ranks have not parked, and the
    units that each rank has leased.
    """

    home_bytes: int
    # The bytes of the largest gradients that the ranks can have at once without parking them.
    gradient_bytes: int
    # The bytes of gradients in host memory at once if none is spilled for lack of room: all gradients that are placed
    # there, and of the gradients that are placed elsewhere the largest ones that the ranks can have at once.
    all_gradient_bytes: int
    units: int
    # The bytes of the largest units of the jobs, as many as `units` says.
    units_bytes: int

    @classmethod
    def of(cls, jobs: Iterable[tuple[Tally, int]], *, units_of_a_rank_alone: int, gradients_of_a_rank: int) -> HostNeed:
        """Return the need of some jobs together.

        Args:
            jobs: the tally of each job, and the number of its ranks at the store.
            units_of_a_rank_alone: the number of units that a rank maps in place at once, and so leases, if it is the
                only rank of its job.
            gradients_of_a_rank: the number of gradients that each rank has at once without parking them.
        """
        home = gradients = all_gradients = units = units_bytes = 0
        for tally, ranks in jobs:
            home += tally.home_bytes
            if ranks:
                gradients += sum(_largest(tally.gradients, gradients_of_a_rank * ranks))
                all_gradients += tally.gradient_bytes - tally.leaving_gradient_bytes(may_all=False)
                all_gradients += sum(_largest(tally.leaving_gradients, gradients_of_a_rank * ranks))
                # Units that are placed in the host tier are left out of the leased bytes, because `home_bytes` includes
                # them.
                leased = _largest(tally.passing, units_of_a_rank_alone if ranks == 1 else _UNITS_OF_A_RANK * ranks)
                units += len(leased)
                units_bytes += sum(leased)
        return cls(
            home_bytes=home,
            gradient_bytes=gradients,
            all_gradient_bytes=all_gradients,
            units=units,
            units_bytes=units_bytes,
        )

    @property
    def total(self) -> int:
        """The bytes of copies at home, unparked gradients and leased units together."""
        return self.home_bytes + self.gradient_bytes + self.units_bytes

    @property
    def total_without_spilling(self) -> int:
        """The bytes as in `total`, but with all gradients that are placed in host memory, parked ones, too."""
        return self.total - self.gradient_bytes + self.all_gradient_bytes

    def fits_without_spilling(self, host_budget_bytes: int, fixed_bytes: int) -> bool:
        """Return whether a host budget has room for all gradients of a step that are placed in host memory.

        An eighth of the room is left out. Gradients and leased units are ranges of many sizes that cannot be moved, so
        an arena that is nearly full of them can have free bytes and yet no hole that is large enough for the next one.

        Args:
            host_budget_bytes: the bytes of the budget.
            fixed_bytes: the bytes of the budget that the arena's header and the tile buffers take.
        """
        return self.spare_without_spilling(host_budget_bytes, fixed_bytes) >= 0

    def spare_without_spilling(self, host_budget_bytes: int, fixed_bytes: int) -> int:
        """Return the bytes of a host budget that all gradients of a step, the other needs and an eighth leave over.

        The result is negative if the budget is too small; see `fits_without_spilling`.
        """
        room = host_budget_bytes - fixed_bytes
        return room - room // _PART_LEFT_FREE - self.total_without_spilling

    @property
    def room_without_spilling(self) -> int:
        """The least host budget, without header and tile buffers, for which `fits_without_spilling` is true."""
        return -(-self.total_without_spilling * _PART_LEFT_FREE // (_PART_LEFT_FREE - 1))

    def room_for_parked(self, host_budget_bytes: int, fixed_bytes: int, prefetch_bytes: int) -> int:
        """Return the bytes of a host budget that gradients and activations may take while they are parked.

        Args:
            host_budget_bytes, fixed_bytes: see `fits_without_spilling`.
            prefetch_bytes: the most bytes of prefetches under way. So much room stays free for them, but at most half
                of the room that a step leaves.
        """
        spare = max(0, host_budget_bytes - fixed_bytes - self.total)
        return spare - min(prefetch_bytes, spare // 2)

    def keeps_activations(self, nbytes: int, host_budget_bytes: int, fixed_bytes: int) -> bool:
        """Return whether activations stay in host memory, because they take at most half of what a step leaves.

        Args:
            nbytes: the bytes of all activations at once.
            host_budget_bytes, fixed_bytes: see `fits_without_spilling`.
        """
        return 2 * nbytes <= host_budget_bytes - fixed_bytes - self.total_without_spilling

    def __str__(self) -> str:
        return (
            f"{shown_size(self.home_bytes)} placed on the host, {shown_size(self.gradient_bytes)} of gradients at "
            f"once, {shown_size(self.units_bytes)} of {self.units} units in use or on their way"
        )


def _largest(ascending: Sequence[int], count: int) -> Sequence[int]:
    """Return the `count` largest of ascending numbers, or all if there are fewer."""
    return ascending[-count:] if count else ()


def spilled_bytes(sizes: Iterable[int], room: int) -> int:
    """Return the bytes that leave the arena if ranges of these sizes are parked one after the other.

    After each range is parked, the oldest ranges leave until the others take `room` bytes at most, as in
    `Gradients.relieve`.
    """
    kept: deque[int] = deque()
    staying = spilled = 0
    for size in sizes:
        kept.append(size)
        staying += size
        while staying > room:
            oldest = kept.popleft()
            staying -= oldest
            spilled += oldest
    return spilled


def versions_needed(job: JobSpec, backing: TierName | None, tier: TierName, *, is_durable: bool) -> int:
    """Return how many versions of a slab a job needs on a tier at once.

    A slab needs its committed and its pending version on its backing tier. If the job has ranks on other nodes, it also
    needs the version before, which those ranks may not have replaced yet. With snapshots it needs the version of the
    last one and that of the one under way on the durable tier, and with ranks on other nodes the one before these, too.

    Args:
        backing: the slab's backing tier, see `Slab.backing`.
        is_durable: whether `tier` is the durable tier.
    """
    settling = 1 if job.local_ranks < job.world_size else 0
    snapshots = 2 + settling if is_durable and job.durability.every_steps > 1 else 0
    return (2 + settling if backing is tier else 0) + snapshots
