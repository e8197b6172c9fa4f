"""Whether the budgets and the limits of jobs can carry what the jobs need. Refuses before anything is written.

Owns which readers are open, because what they hold counts. Must never look at all slabs of a job, because the job's
tally says what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from storage.errors import BudgetExceededError
from storage.job_table import JobTable
from storage.reader import StepReader
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier
from storage.tiers.host import HostTier
from storage.transform import host_budget_for
from storage.versions import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Most bytes that the steps of some jobs may need of the tiers, all of them together.

    Attributes:
        what: whose limit it is, for people: "the quota of job 'a'".
        covers: tells by a job's name whether the job counts.
        host_bytes: None: as much as the budgets hold; so has `nvme_bytes`.
        counts_readers: whether steps that only readers hold count, too, also those of jobs that were deleted.
    """

    what: str
    covers: Callable[[str], bool]
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    counts_readers: bool = False


# Ranks that share the store copy their units out of it: each leases the unit that it copies and the next one.
_UNITS_OF_A_RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """What cannot be dropped at the worst moment of a step: copies at home, gradients, and for each rank the units that
    it has leased."""

    home_bytes: int
    gradient_bytes: int
    units: int
    # The bytes of so many units, the largest that there are.
    units_bytes: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.home_bytes + self.gradient_bytes + self.units_bytes

    def __str__(self) -> str:
        return (
            f"{self.home_bytes} bytes placed on the host, {self.gradient_bytes} of gradients, {self.units_bytes} of "
            f"{self.units} units in use or on their way"
        )


class Admission:
    """Admits what jobs and readers need, or raises BudgetExceededError."""

    def __init__(
        self, jobs: JobTable, host: HostTier, backing: BackingTiers, tile_bytes: int, units_of_a_rank_alone: int
    ) -> None:
        """`tile_bytes`: what the optimizer's buffers take of the host budget. `units_of_a_rank_alone`: how many units a
        rank maps in place at once, and so leases, where it is the only one of its job."""
        # Readers that were closed, and that no session refers to, leave by themselves.
        self.readers: WeakSet[StepReader] = WeakSet()
        self._jobs = jobs
        self._host = host
        self._backing = backing
        self._tile_bytes = tile_bytes
        self._units_of_a_rank_alone = units_of_a_rank_alone

    def reserve(self) -> None:
        """Make sure that the next steps of all jobs find room on the backing tiers, or raise BudgetExceededError."""
        for tier in self._backing:
            tier.reserve(self._need(tier))

    def reserve_for_reader(self, job: Job) -> None:
        """Makes sure that a step of the job can be kept beside those to come. Raises BudgetExceededError otherwise."""
        # A job without ranks writes no further steps, so only what is in host memory needs new room.
        tally = job.tally
        alone = sum(slab.paged_bytes for slab in tally.unsaved)
        for tier in self._backing:
            unbacked = tally.by_backing[None] if job.spec.local_ranks else alone
            backed = tally.by_backing[tier.name] if job.spec.local_ranks else 0
            tier.reserve(self._need(tier) + backed + (unbacked if tier.is_durable else 0))

    def _need(self, tier: BackingTier[Any]) -> int:
        """Bytes that the next steps need of a tier besides what is in use: all jobs draw on the same free space, each
        at its own time, and what a reader shares with a slab that is trained, it will soon have alone."""
        active = [job for job in self._jobs if job.spec.local_ranks]
        shared = [
            region.nbytes
            for reader in self.readers
            if reader.job.spec.local_ranks
            for slab, region in reader.regions.items()
            if region is not None and region.tier is tier and region in slab.versions.values()
        ]
        return sum(shared) + sum(_need(job, tier) for job in active)

    def check_limit(self, job: Job, limit: Limit) -> None:
        """Raises BudgetExceededError where the next steps of the job, and of the others that count with it, need more
        than they may have."""
        if limit.host_bytes is None and limit.nvme_bytes is None:
            return
        names = [name for name in self._jobs.by_name if limit.covers(name)]
        layouts = [layout for name in names for layout in self._jobs.layouts(name)]
        active = [layout for layout in layouts if layout is job or layout.spec.local_ranks]
        host = self._host_need([layout for layout in layouts if layout in active or _has_copies(layout)])
        durable = self._backing.durable
        nvme = sum(_need(layout, durable) for layout in active)
        nvme += sum(layout.tally.version_bytes(durable.name) for layout in layouts)
        if limit.counts_readers:
            nvme += self._held_by_readers_alone(limit, layouts)
        steps, them = "its steps need", ""
        if len(names) > 1:
            steps, them = f"the steps of its {len(names)} jobs need", "delete jobs, "
        if limit.nvme_bytes is not None and nvme > limit.nvme_bytes:
            raise BudgetExceededError(
                f"{limit.what}, nvme_bytes = {limit.nvme_bytes}, is too small: {steps} {nvme} bytes; {them}raise it, "
                "choose durability 'none', or place less on nvme"
            )
        if limit.host_bytes is not None and host.total > limit.host_bytes:
            step = "a step needs" if len(names) == 1 else f"steps of its {len(names)} jobs need"
            raise BudgetExceededError(
                f"{limit.what}, host_bytes = {limit.host_bytes}, is too small: {step} {host.total} bytes at once "
                f"({host}); {them}raise it, or place less on the host"
            )

    def _held_by_readers_alone(self, limit: Limit, layouts: Sequence[Job]) -> int:
        """Return the bytes on NVMe that would be free if no reader held them, each range once."""
        held = {
            region: region.nbytes
            for reader in self.readers
            if limit.covers(reader.job.spec.name)
            for slab, region in reader.regions.items()
            if region is not None
            and region.tier is self._backing.durable
            and not (reader.job in layouts and region in slab.versions.values())
        }
        return sum(held.values())

    def check_host_budget(self, job: Job) -> None:
        """What cannot be dropped at the worst moment of a step must fit, of all jobs together, with the optimizer's
        buffers. `job` is the one that asks: the others are named to nobody."""
        jobs = [j for j in self._jobs if j.spec.local_ranks or _has_copies(j)]
        need = self._host_need(jobs)
        others = self._host.arena.header_bytes + need.total
        if others + self._tile_bytes > self._host.budget_bytes:
            names = {j.spec.name for j in jobs}
            beside = f" and {len(names) - 1} other jobs" if len(names) > 1 else ""
            raise BudgetExceededError(
                f"host_budget {self._host.budget_bytes} is too small for {job.spec.name}{beside}: {need}, "
                f"{self._tile_bytes} of optimizer buffers; raise host_budget to at least {host_budget_for(others)}, "
                "place less on the host, or use more nodes"
            )

    def _host_need(self, jobs: Sequence[Job]) -> HostNeed:
        leased = [nbytes for job in jobs for nbytes in self._largest_units(job)]
        return HostNeed(
            home_bytes=sum(job.tally.home_bytes for job in jobs),
            gradient_bytes=sum(job.tally.gradient_bytes for job in jobs if job.spec.local_ranks),
            units=len(leased),
            units_bytes=sum(leased),
        )

    def _largest_units(self, job: Job) -> list[int]:
        """Bytes of the largest parts of units that the ranks of a job can have leased at once, of those that only pass
        through the host tier."""
        ranks = job.spec.local_ranks
        count = self._units_of_a_rank_alone if ranks == 1 else _UNITS_OF_A_RANK * ranks
        return job.tally.passing[-count:] if count else []


def _need(job: Job, tier: BackingTier[Any]) -> int:
    """Bytes of a tier that the slabs of a job will need besides the versions they have there: for the committed version
    and the pending one, with ranks on other nodes for the one before, which they may not have passed yet; and on the
    durable tier for the last snapshot and the one under way."""
    settling = 1 if job.spec.local_ranks < job.spec.world_size else 0
    snapshots = 2 if tier.is_durable and job.spec.durability.every_steps > 1 else 0
    return job.tally.missing_bytes(tier.name, lambda backing: (2 + settling if backing is tier.name else 0) + snapshots)


def _has_copies(job: Job) -> bool:
    return job.tally.copies > 0
