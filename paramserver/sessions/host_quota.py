"""The quotas of host memory: limits for each job, and for all jobs of a token together, on the memory that they lease.

A quota covers slabs that are placed on the host, the ranges of gradients and puts until the engine is done with them,
and every other lease. It does not cover prefetched slabs, because the engine evicts them as soon as another request
needs the room. This module owns the count of bytes that are being granted; all other bytes are counted where they are
kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from paramserver.contract.sizes import shown_size
from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.leases import Lease
from storage.base.errors import BudgetExceededError
from storage.base.shard import Kind
from storage.base.waiting import LATE_SECONDS
from storage.engine import Engine
from storage.jobs.admission import Limit
from storage.state.versions import Job
from storage.tiers.base import round_up

# A request that waits for room in the quotas of host memory checks at this interval whether there is room. Only
# requests of jobs at their quota wait, and a signal would be needed from every place that can make room, so no signal
# wakes the requests.
LOOK_AGAIN_SECONDS = 0.02
# If a check of a job's quotas finds no room, all waiting requests of the job pause for this many times as long as the
# check took, multiplied by the number of jobs that have waiting requests. So all checks together take at most a
# twentieth of the event loop's time, however many requests wait and however many leases their jobs have.
PAUSE_OF_A_LOOK = 19


def limits_of(quotas: Quotas, principal: Principal, job: str) -> list[Limit]:
    """Return the limits of bytes that apply when a principal uses a job: the job's own, and those of the token."""
    of_job, of_token = quotas.of(job), quotas.of_token(principal)
    return [
        Limit(
            what=f"the quota of job {job!r}",
            covers=lambda name: name == job,
            host_bytes=of_job.host_bytes,
            nvme_bytes=of_job.nvme_bytes,
        ),
        Limit(
            what=f"the quota of token {principal.name}",
            covers=principal.allows,
            host_bytes=of_token.host_bytes,
            nvme_bytes=of_token.nvme_bytes,
            # If a job is deleted while a reader of the token holds one of its steps, the step's bytes stay in the
            # store, and the job's own quota exists no more. So the token's quota counts the steps that its readers
            # hold.
            counts_readers=True,
        ),
    ]


class HostQuota:
    """The object that lets a lease wait until the host memory quotas of its job and token have room for it."""

    def __init__(self, quotas: Quotas, engine: Engine, leases_of: Callable[[str], Iterable[Lease]]) -> None:
        """Make the quotas of a daemon.

        Args:
            quotas: the configured ones.
            engine: counts slabs and ranges.
            leases_of: returns the leases that the ranks of a job hold.
        """
        self._quotas = quotas
        self._engine = engine
        self._leases_of = leases_of
        self._being_granted: Counter[str] = Counter()
        # The lock of each job that has waiting requests. A request holds the lock while it checks whether the quotas
        # have room, and during the pause after that.
        self._looking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def must_park(self, principal: Principal, job: Job) -> bool:
        """Return whether ranks must park gradients of a job, because budget or quotas may not have room for all."""
        return self._engine.admission.must_park(job, limits_of(self._quotas, principal, job.spec.name))

    def admit_activation(
        self, principal: Principal, job: Job, nbytes: int, *, parks: bool, is_held: bool = False
    ) -> int | None:
        """Return how many bytes of activations each rank may have unparked, or None; see Admission.admit_activation."""
        limits = limits_of(self._quotas, principal, job.spec.name)
        return self._engine.admission.admit_activation(job, nbytes, limits, parks=parks, is_held=is_held)

    @asynccontextmanager
    async def room_for(self, principal: Principal, job: Job, needed: int) -> AsyncIterator[None]:
        """Wait until the quotas of the job and the token have room for a lease of that many bytes.

        The block grants the lease. While it runs, the bytes are in the sum of those that are being granted; afterwards
        the lease itself is counted.

        Raises:
            BudgetExceededError: the quota is smaller than what is needed, or not enough was released within
                `admission_timeout_seconds`. The text names the quota, what is needed and what is taken.
        """
        name = job.spec.name
        limits = [each for each in limits_of(self._quotas, principal, name) if each.host_bytes is not None]
        if not limits:
            yield
            return
        await self._wait_for_room(job, limits, needed)
        self._being_granted[name] += needed
        try:
            yield
        finally:
            self._being_granted[name] -= needed
            if not self._being_granted[name]:
                del self._being_granted[name]

    async def _wait_for_room(self, job: Job, limits: Sequence[Limit], needed: int) -> None:
        covered = [(limit, self._covered(limit, job)) for limit in limits]
        scopes = [(limit, jobs, sum(map(_home_bytes, jobs))) for limit, jobs in covered]
        deadline = asyncio.get_running_loop().time() + self._engine.config.admission_timeout_seconds
        if self._has_room(scopes, needed, deadline):
            return
        looking = self._looking.setdefault(job.spec.name, asyncio.Lock())
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
            # If the event loop stood still, the request could not check for room in that time. So the time does not
            # count as waiting, and the request's deadline moves by it.
            if (late := loop.time() - before - LOOK_AGAIN_SECONDS) > LATE_SECONDS:
                deadline += late
            async with looking:
                began = time.thread_time()
                if self._has_room(scopes, needed, deadline):
                    return
                await asyncio.sleep(PAUSE_OF_A_LOOK * len(self._looking) * (time.thread_time() - began))

    def _has_room(self, scopes: Iterable[tuple[Limit, Sequence[Job], int]], needed: int, deadline: float) -> bool:
        """Return whether all limits have room for a lease of `needed` bytes. If one has not, begin to make room.

        This checks all limits each time, because while a request waits for room under one limit, another limit may be
        reached.

        Args:
            scopes: each limit, the jobs that it covers, and the bytes of their slabs that are placed on the host.
            needed: the size of the lease.
            deadline: the time of the event loop until which the request waits.

        Raises:
            BudgetExceededError: see `room_for`.
        """
        for limit, jobs, home in scopes:
            assert limit.host_bytes is not None
            taken = sum(map(self._taken, jobs))
            if home + taken + needed <= limit.host_bytes:
                continue
            if home + needed > limit.host_bytes or asyncio.get_running_loop().time() > deadline:
                raise BudgetExceededError(
                    f"{limit.what}, host_bytes = {shown_size(limit.host_bytes)}, has no room for "
                    f"{shown_size(needed)}: {shown_size(home)} are placed on the host, {shown_size(taken)} are leased "
                    "or being applied; return leases sooner, place less on the host, or raise it in the daemon's "
                    "`quotas`"
                )
            self._engine.gradients.relieve_jobs({each.spec.name for each in jobs})
            return False
        return True

    def _covered(self, limit: Limit, job: Job) -> list[Job]:
        """Return the jobs that a limit covers, with `job` itself in the layout that its ranks use.

        The engine's own list has each job in its newest committed layout, but the ranks may use a later layout. A
        reader's job may be a kept step or an older layout, which no rank uses.
        """
        mine = job if job.spec.local_ranks else self._engine.jobs.by_name.get(job.spec.name, job)
        others = (
            other for name, other in self._engine.jobs.by_name.items() if name != job.spec.name and limit.covers(name)
        )
        return [mine, *others]

    def _taken(self, job: Job) -> int:
        leased = sum(round_up(lease.nbytes) for lease in self._leases_of(job.spec.name) if _counts(lease))
        return leased + self._engine.scratch.nbytes_of(job.spec.name) + self._being_granted[job.spec.name]


def _home_bytes(job: Job) -> int:
    """Return the bytes of the job's slabs that are placed on the host.

    For a job that is not trained, only slabs that are still in host memory are included.
    """
    if job.spec.local_ranks:
        return job.tally.home_bytes
    slabs = (slab for slab in job.slabs() if slab.at_home_in_host) if job.tally.copies else ()
    return sum(slab.paged_bytes for slab in slabs if slab.copy is not None)


def _counts(lease: Lease) -> bool:
    """Return whether the bytes of a lease are added to the sum of its job.

    They are not added if another sum already has them. A slab that is placed on the host is in the sum of placed slabs.
    A range that belongs to no slab is in the engine's scratch memory, which keeps a gradient's range even after the
    lease, while the update uses it.
    """
    return lease.pin is not None and not lease.pin.slab.at_home_in_host


def lease_bytes(job: Job, group: str, kind: Kind) -> int:
    """Return how many bytes of its job's quota a lease on a slab or a gradient takes.

    Raises:
        NotFoundError: the job has no such group, or the group no such slab.
    """
    if kind is Kind.GRAD:
        spec = job.group(group).spec
        return round_up(spec.layout(Kind.GRAD).nbytes) if Kind.GRAD in spec.slab_of_kind else 0
    slab = job.slab(group, kind)
    return 0 if slab.at_home_in_host else round_up(slab.layout.element_bytes)
