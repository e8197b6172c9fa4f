"""Holds each job, and all jobs of a token together, to their quotas of host memory while they take leases.

What counts: slabs placed on the host, gradients and puts until they are done with, and every other lease; not what was
only prefetched, for that goes as soon as somebody needs the room. Owns what is being granted; the rest is counted where
it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from paramserver.security.principals import Principal
from paramserver.security.quotas import Quotas
from paramserver.sessions.leases import Lease
from storage.admission import Limit
from storage.engine import Engine
from storage.errors import BudgetExceededError
from storage.shard import Kind
from storage.tiers.base import round_up
from storage.versions import Job

# Those who wait look again, instead of being woken by whatever may make room: only jobs at their quota come here.
LOOK_AGAIN_SECONDS = 0.02


def limits_of(quotas: Quotas, principal: Principal, job: str) -> list[Limit]:
    """Return the limits of bytes that hold where a principal uses a job: the job's own, and those of the token."""
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
            # Steps of deleted jobs stay as long as a reader of the token holds them, and no job's quota counts them.
            counts_readers=True,
        ),
    ]


class HostQuota:
    """The quotas of all jobs and tokens."""

    def __init__(self, quotas: Quotas, engine: Engine, leases_of: Callable[[str], Iterable[Lease]]) -> None:
        """`leases_of` returns the leases that the ranks of a job hold."""
        self._quotas = quotas
        self._engine = engine
        self._leases_of = leases_of
        self._being_granted: Counter[str] = Counter()

    @asynccontextmanager
    async def room_for(self, principal: Principal, job: Job, needed: int) -> AsyncIterator[None]:
        """Waits until the quotas of the job and of the token have room for a lease of that many bytes, which is granted
        inside: from then on the lease itself counts.

        Raises:
            BudgetExceededError: naming the quota, what is needed and what is taken: the quota is smaller, or nothing
                was given back within `admission_timeout_seconds`.
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
        scopes = [(limit, self._covered(limit, job)) for limit in limits]
        homes = [sum(map(_home_bytes, jobs)) for _, jobs in scopes]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._engine.config.admission_timeout_seconds
        while True:
            # All in one look: while one limit is waited for, another may be reached.
            for (limit, jobs), home in zip(scopes, homes, strict=True):
                assert limit.host_bytes is not None
                taken = sum(map(self._taken, jobs))
                if home + taken + needed <= limit.host_bytes:
                    continue
                if home + needed > limit.host_bytes or loop.time() > deadline:
                    raise BudgetExceededError(
                        f"{limit.what}, host_bytes = {limit.host_bytes}, has no room for {needed} bytes: {home} are "
                        f"placed on the host, {taken} are leased or being applied; return leases sooner, place less on "
                        "the host, or raise it in the daemon's `quotas`"
                    )
                break
            else:
                return
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    def _covered(self, limit: Limit, job: Job) -> list[Job]:
        """The jobs that count, `job` in the layout that is used, which may be another than the newest."""
        others = (other for name, other in self._engine.jobs.items() if name != job.spec.name and limit.covers(name))
        return [job, *others]

    def _taken(self, job: Job) -> int:
        leased = sum(round_up(lease.nbytes) for lease in self._leases_of(job.spec.name) if _counts(lease))
        return leased + self._engine.scratch.nbytes_of(job.spec.name) + self._being_granted[job.spec.name]


def _home_bytes(job: Job) -> int:
    """What the job has placed on the host; of one that is not trained, what is there still."""
    if job.spec.local_ranks:
        return job.tally.home_bytes
    slabs = (slab for slab in job.slabs() if slab.at_home_in_host) if job.tally.copies else ()
    return sum(slab.paged_bytes for slab in slabs if slab.copy is not None)


def _counts(lease: Lease) -> bool:
    """What is no slab's is counted by the engine, which has it also while it is applied."""
    return lease.pin is not None and not lease.pin.slab.at_home_in_host


def lease_bytes(job: Job, group: str, kind: Kind) -> int:
    """What a lease on a slab or a gradient takes of its job's quota. Raises NotFoundError where there is none."""
    if kind is Kind.GRAD:
        spec = job.group(group).spec
        return round_up(spec.slab_bytes(Kind.GRAD)) if Kind.GRAD in spec.slab_of_kind else 0
    slab = job.slab(group, kind)
    return 0 if slab.at_home_in_host else round_up(slab.nbytes)
