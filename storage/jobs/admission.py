"""The admission of jobs and readers: it refuses, before anything is written, what the budgets and limits cannot carry.

This module owns the set of open readers, because the budgets must also have room for the versions that the readers
hold. It must never look at all slabs of a job, because the job's tally (the sums over its slabs, see slab.py) says what
they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from storage.base.errors import BudgetExceededError, StorageError
from storage.base.shard import TierName
from storage.base.shown_sizes import least_size, shown_size
from storage.memory.gradients import Gradients
from storage.memory.parkable import Activation, Gradient
from storage.state.job_table import JobTable
from storage.state.need import HostNeed, versions_needed
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.steps.transform import host_budget_for
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import BackingTier, Region
from storage.tiers.host import HostTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most bytes of the tiers that the steps of some jobs together may need.

    Attributes:
        what: the limit's name in error texts, for example "the quota of job 'a'".
        covers: returns whether the limit covers a job, given the job's name.
        host_bytes: the most bytes of the host tier; None if only the budget limits them.
        nvme_bytes: the most bytes of the durable tier; None if only the budget limits them.
        counts_readers: whether the limit also covers the bytes of steps that only readers hold, even of deleted jobs.
    """

    what: str
    covers: Callable[[str], bool]
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    counts_readers: bool = False


class Admission:
    """Checks whether the budgets and limits have room for what jobs and readers are about to need.

    The registry, the readers and the kept steps call it before they change anything; a refusal is BudgetExceededError.
    """

    def __init__(
        self,
        jobs: JobTable,
        host: HostTier,
        backing: BackingTiers,
        gradients: Gradients,
        tile_bytes: int,
        units_of_a_rank_alone: int,
        gradients_of_a_rank: int,
    ) -> None:
        """Check needs against the budgets of `host` and `backing`; `gradients` moves parked tensors between them.

        Args:
            tile_bytes: the bytes of the host budget that the optimizer's tile buffers use.
            units_of_a_rank_alone: the number of units that a rank maps in place at once, and so leases, if it is the
                only rank of its job.
            gradients_of_a_rank: the number of gradients that each rank has at once without parking them.
        """
        # The open readers. The set's references are weak, so a closed reader disappears when no session refers to it
        # any more.
        self.readers: WeakSet[StepReader] = WeakSet()
        self._jobs = jobs
        self._host = host
        self._backing = backing
        self._gradients = gradients
        self._tile_bytes = tile_bytes
        self._units_of_a_rank_alone = units_of_a_rank_alone
        self._gradients_of_a_rank = gradients_of_a_rank
        # The host memory that all jobs need, kept from the last computation. It is None if the need may have changed
        # since then, so that it must be computed again.
        self._known_need: HostNeed | None = None

    def reserve(self) -> None:
        """Make sure that the next steps of all jobs find room on the backing tiers, or raise BudgetExceededError."""
        for tier in self._backing:
            tier.reserve(self._bytes_of_next_steps(tier))

    def reserve_for_reader(self, job: Job) -> None:
        """Make sure that a step of the job can be kept beside the steps to come, or raise BudgetExceededError."""
        # A job without ranks writes no further steps, so for such a job only bytes that have no version on NVMe yet
        # need new room there.
        tally = job.tally
        alone = sum(slab.paged_bytes for slab in tally.unsaved)
        for tier in self._backing:
            unbacked = tally.by_backing[None] if job.spec.local_ranks else alone
            backed = tally.by_backing[tier.name] if job.spec.local_ranks else 0
            tier.reserve(self._bytes_of_next_steps(tier) + backed + (unbacked if tier.is_durable else 0))

    def _bytes_of_next_steps(self, tier: BackingTier[Any], host_budget_bytes: int | None = None) -> int:
        """Return the bytes that the next steps of all jobs need on a tier besides the bytes in use.

        Versions that are being written are in use.

        The needs are added, because all jobs use the same free space, each at its own time. Versions that a reader or a
        kept step shares with a slab of a job with ranks are added as well, because the next steps replace them in the
        slab, and then only the reader or the kept step holds them. Gradients that are placed on NVMe are added, too; if
        the host budget (None: the present one) cannot hold the gradients of a step, all gradients are added.
        Activations are added if room was reserved for them.
        """
        active = [job for job in self._jobs if job.spec.local_ranks]
        reserved = self._gradients.reserved_for_activations
        activations = sum(reserved[name] for name in {job.spec.name for job in active} & reserved.keys())
        spills = 0
        if tier.is_durable:
            may_all = activations > 0 or not self._holds_all_gradients(host_budget_bytes)
            gradients = sum(job.tally.leaving_gradient_bytes(may_all=may_all) for job in active)
            spills = max(0, gradients - self._gradients.taken_bytes(Gradient))
            spills += max(0, activations - self._gradients.taken_bytes(Activation))
        shared = {
            region
            for reader in self.readers
            if reader.job.spec.local_ranks
            for slab, region in reader.regions.items()
            if region is not None and region.tier is tier and region in slab.versions.values()
        }
        for job in active:
            if kept := self.kept_regions([job.spec.name]):
                shared |= kept & {r for slab in job.slabs() for r in slab.versions.values() if r.tier is tier}
        versions = sum(_missing_bytes(job, tier) for job in active)
        versions -= sum(job.tally.filling_bytes(tier.name, _wanted(job, tier)) for job in active)
        return sum(region.nbytes for region in shared) + versions + spills

    def _holds_all_gradients(self, host_budget_bytes: int | None = None) -> bool:
        """Return whether a host budget, by default the present one, has room for all gradients of a step."""
        budget = self._host.budget_bytes if host_budget_bytes is None else host_budget_bytes
        return self._all_need().fits_without_spilling(budget, self._fixed_bytes)

    def must_park(self, job: Job, limits: Iterable[Limit] = ()) -> bool:
        """Return whether the ranks of a job are to park gradients: host memory may be too small for those of a step.

        Args:
            job: the job.
            limits: the most bytes that the jobs of some names may use.
        """
        fits = self._last_need().fits_without_spilling(self._host.budget_bytes, self._fixed_bytes)
        return not fits or any(
            limit.host_bytes is not None and self._need_under(limit, job).total_without_spilling > limit.host_bytes
            for limit in limits
        )

    def room_for_parked(self, prefetch_bytes: int) -> int:
        """Return the bytes of the arena that parked gradients may take, so that the rest of a step has its room.

        The room for the bytes of all jobs that cannot leave the host tier is subtracted. So is the room for prefetches,
        which is `prefetch_bytes`, but at most half of the rest.
        """
        return self._last_need().room_for_parked(self._host.budget_bytes, self._fixed_bytes, prefetch_bytes)

    def room_beside_steps(self) -> int:
        """Return the bytes of the arena that no step needs, even if host memory has all gradients of the step."""
        return self._last_need().spare_without_spilling(self._host.budget_bytes, self._fixed_bytes)

    def forget_need(self) -> None:
        """Discard the computed need of all jobs, so that the next use computes it anew; see `_last_need`."""
        self._known_need = None

    def admit_activation(
        self, job: Job, nbytes: int, limits: Iterable[Limit] = (), *, parks: bool, is_held: bool = False
    ) -> int | None:
        """Return how many bytes of activations a rank may have unparked at once, or None if one more does not fit.

        Activations may use the part of the host budget that the rest of a step does not need. If they take at most half
        of that part, they stay in host memory. Otherwise the store may spill them, so the durable tier must have room
        for all activations and gradients of the job. The store does not spill activations of a job whose bytes on the
        durable tier are limited.

        Args:
            job: the job of the rank that asks.
            nbytes: the size of the activation.
            limits: the most bytes that the jobs of some names may use.
            parks: whether the ranks of the job park gradients, so that host memory need not have room for all of them.
            is_held: whether the store has the activation already and recalls it. Then the result is never None.

        Returns:
            The bytes; None if there is no room for the activation on any tier.
        """
        limits, size = list(limits), round_up(nbytes)
        active = [each for each in self._jobs if each.spec.local_ranks or each is job]
        scopes = [(self._last_need(), self._host.budget_bytes - self._fixed_bytes, active)]
        for limit in limits:
            if limit.host_bytes is not None:
                covered = [each for each in active if limit.covers(each.spec.name)]
                scopes.append((self._need_under(limit, job), limit.host_bytes, covered))
        shares, fits = [], True
        for need, budget, jobs in scopes:
            left = budget - (need.total if parks else need.total_without_spilling)
            shares.append(left // sum(each.spec.local_ranks or 1 for each in jobs))
            held = sum(self._gradients.activation_bytes(name) for name in {each.spec.name for each in jobs})
            fits &= need.keeps_activations(held + size, budget, 0)
        share = min(shares)
        if is_held:
            return share
        if share < size:
            return None
        if not fits:
            may_spill = all(limit.nvme_bytes is None for limit in limits)
            if not (may_spill and self._reserve_for_activations(job, size)):
                return None
        return share

    def _reserve_for_activations(self, job: Job, more: int) -> bool:
        """Reserve room on the durable tier for a job's activations and `more` bytes; return whether that succeeded.

        The reservation lasts until the job is opened by another run.
        """
        name = job.spec.name
        reserved = self._gradients.reserved_for_activations
        wanted, before = self._gradients.activation_bytes(name) + more, reserved[name]
        if wanted <= before:
            return True
        reserved[name] = wanted
        try:
            self._backing.durable.reserve(self._bytes_of_next_steps(self._backing.durable))
        except StorageError as error:
            reserved[name] = before
            if not before:
                del reserved[name]
            if isinstance(error, BudgetExceededError):
                return False
            raise
        return True

    @property
    def _fixed_bytes(self) -> int:
        return self._host.arena.header_bytes + self._tile_bytes

    def _last_need(self) -> HostNeed:
        """Return the host memory that all jobs needed when one of them was last opened, registered, ended or deleted.

        Each lease of a gradient or an activation asks for the need, and computing it takes milliseconds in a store of a
        thousand jobs, so the last result is kept. The copies of a job without ranks may have come or gone meanwhile. So
        the answer may only decide which gradients leave the arena and which activations come, and never whether a job
        is admitted.
        """
        if self._known_need is None:
            self._known_need = self._all_need()
        return self._known_need

    def _all_need(self) -> HostNeed:
        return self._host_need([job for job in self._jobs if job.spec.local_ranks or _has_copies(job)])

    def _need_under(self, limit: Limit, job: Job) -> HostNeed:
        """Return how much host memory the jobs under a limit need. `job` counts as one, even if it has no ranks yet."""
        names = [name for name in self._jobs.by_name if limit.covers(name)]
        layouts = [layout for name in names for layout in self._jobs.layouts(name)]
        return self._host_need([each for each in layouts if each is job or each.spec.local_ranks or _has_copies(each)])

    def kept_regions(self, names: Iterable[str]) -> set[Region]:
        """Return the regions that the kept steps of some jobs hold, each once."""
        kept = (kept for name in names for kept in self._jobs.kept_steps(name).values())
        return {region for job in kept for slab in job.slabs() for region in slab.versions.values()}

    def check_kept(self, reader: StepReader, limits: Sequence[Limit]) -> None:
        """Raise BudgetExceededError if the budget or a limit does not allow that the step of a reader is kept."""
        more = {region for region in reader.regions.values() if region is not None}
        if moved := sum(region.nbytes for region in more if region.doubtful or not region.tier.is_durable):
            # A kept step is durable, so bytes that are doubtful or not on the durable tier are written to that tier,
            # and need room there.
            self._backing.durable.reserve(self._bytes_of_next_steps(self._backing.durable) + moved)
        for limit in limits:
            self.check_limit(reader.job, limit, kept=more)

    def check_limit(self, job: Job, limit: Limit, *, kept: Collection[Region] = ()) -> None:
        """Raise BudgetExceededError if the next steps of the jobs that a limit covers need more than it allows.

        `job` is one of these jobs, and its need is added even if it has no ranks yet. The versions of kept steps are
        added as well, because the next steps replace them in the job's slabs and only the kept steps hold them then.
        The regions in `kept` are added, too, because the caller is about to keep the step that has them.
        """
        if limit.host_bytes is None and limit.nvme_bytes is None:
            return
        names = [name for name in self._jobs.by_name.keys() | self._jobs.kept.keys() if limit.covers(name)]
        layouts = [layout for name in names if name in self._jobs.by_name for layout in self._jobs.layouts(name)]
        active = [layout for layout in layouts if layout is job or layout.spec.local_ranks]
        host = self._host_need([layout for layout in layouts if layout in active or _has_copies(layout)])
        durable = self._backing.durable
        nvme = sum(_missing_bytes(layout, durable) for layout in active)
        nvme += sum(layout.tally.version_bytes(durable.name) for layout in layouts)
        may_all = not self._holds_all_gradients() or host.total_without_spilling > (limit.host_bytes or math.inf)
        nvme += sum(layout.tally.leaving_gradient_bytes(may_all=may_all) for layout in active)
        all_kept = self.kept_regions(names).union(kept)
        nvme += sum(region.nbytes for region in all_kept)
        if limit.counts_readers:
            nvme += self._held_by_readers_alone(limit, layouts, all_kept)
        steps, them = "its steps need", ""
        if len(names) > 1:
            steps, them = f"the steps of its {len(names)} jobs need", "delete jobs, "
        forget = "forget kept steps, " if all_kept else ""
        if limit.nvme_bytes is not None and nvme > limit.nvme_bytes:
            raise BudgetExceededError(
                f"{limit.what}, nvme_bytes = {shown_size(limit.nvme_bytes)}, is too small: {steps} "
                f"{shown_size(nvme)}; {them}{forget}raise it, choose durability 'none', or place less on nvme"
            )
        if limit.host_bytes is not None and host.total > limit.host_bytes:
            step = "a step needs" if len(names) == 1 else f"steps of its {len(names)} jobs need"
            raise BudgetExceededError(
                f"{limit.what}, host_bytes = {shown_size(limit.host_bytes)}, is too small: {step} "
                f"{shown_size(host.total)} at once ({host}); {them}raise it, or place less on the host"
            )

    def _held_by_readers_alone(self, limit: Limit, layouts: Sequence[Job], kept: Collection[Region]) -> int:
        """Return the bytes on NVMe that would be free if no reader held them. Regions in `kept` are not counted."""
        held = {
            region: region.nbytes
            for reader in self.readers
            if limit.covers(reader.job.spec.name)
            for slab, region in reader.regions.items()
            if region is not None
            and region.tier is self._backing.durable
            and region not in kept
            and not (reader.job in layouts and region in slab.versions.values())
        }
        return sum(held.values())

    def check_budgets(self, host_budget_bytes: int, nvme_budget_bytes: int) -> None:
        """Check that an engine with these budgets could carry the jobs that there are now, and go on training them.

        Raises:
            BudgetExceededError: it could not. The text says how large the budget has to be.
        """
        durable = self._backing.durable
        used, more = durable.used_bytes, self._bytes_of_next_steps(durable, host_budget_bytes)
        if used + more > nvme_budget_bytes:
            raise BudgetExceededError(
                f"nvme_budget {shown_size(nvme_budget_bytes)} is too small: {shown_size(used)} are in use, and the "
                f"next steps of the jobs that train now need {shown_size(more)} besides; write at least "
                f"{least_size(used + more)}, delete jobs or forget kept steps "
                "(`paramserver-admin delete-job`, `paramserver-admin forget`)"
            )
        need = self._host_need([job for job in self._jobs if job.spec.local_ranks])
        needed = host_budget_for(self._host.arena.header_bytes + need.total)
        if host_budget_bytes < needed:
            raise BudgetExceededError(
                f"host_budget {shown_size(host_budget_bytes)} is too small for the jobs that train now: {need}, and "
                f"buffers of the optimizer; write at least {least_size(needed)}, or stop jobs"
            )

    def check_host_budget(self, job: Job) -> None:
        """Raise BudgetExceededError if the host budget cannot hold what all jobs need at the worst moment of a step.

        The budget needs room for the bytes that cannot be evicted at that moment, and for the optimizer's buffers. The
        error text names `job`, which the caller registers. Of the other jobs it gives only the number, because they may
        belong to other users.
        """
        jobs = [j for j in self._jobs if j.spec.local_ranks or _has_copies(j)]
        need = self._all_need()
        others = self._host.arena.header_bytes + need.total
        if others + self._tile_bytes > self._host.budget_bytes:
            names = {j.spec.name for j in jobs}
            beside = f" and {len(names) - 1} other jobs" if len(names) > 1 else ""
            raise BudgetExceededError(
                f"host_budget {shown_size(self._host.budget_bytes)} is too small for {job.spec.name}{beside}: {need}, "
                f"{shown_size(self._tile_bytes)} of optimizer buffers; raise host_budget to at least "
                f"{least_size(host_budget_for(others))}, place less on the host, or use more nodes"
            )

    def _host_need(self, jobs: Iterable[Job]) -> HostNeed:
        return HostNeed.of(
            ((job.tally, job.spec.local_ranks) for job in jobs),
            units_of_a_rank_alone=self._units_of_a_rank_alone,
            gradients_of_a_rank=self._gradients_of_a_rank,
        )


def _missing_bytes(job: Job, tier: BackingTier[Any]) -> int:
    """Return the bytes that the slabs of a job will need on a tier, beyond those of their complete versions there."""
    return job.tally.missing_bytes(tier.name, _wanted(job, tier))


def _wanted(job: Job, tier: BackingTier[Any]) -> Callable[[TierName | None], int]:
    """Return a function that takes a slab's backing tier and returns how many versions of the slab `tier` must have."""
    return partial(versions_needed, job.spec, tier=tier.name, is_durable=tier.is_durable)


def _has_copies(job: Job) -> bool:
    """Return whether a job has copies in the host tier."""
    return job.tally.copies > 0
