"""Holds each job to its quota of host memory while it takes leases.

What counts: slabs placed on the host, gradients and puts until they are done with, and every other lease; not what was
only prefetched, for that goes as soon as somebody needs the room. Owns what is being granted; the rest is counted where
it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from paramserver.security.quotas import Quotas
from paramserver.sessions.leases import Lease
from paramserver.sessions.sessions import Sessions
from storage.engine import Engine
from storage.errors import BudgetExceededError
from storage.shard import Kind
from storage.tiers.base import round_up
from storage.versions import Job

# Those who wait look again, instead of being woken by whatever may make room: only jobs at their quota come here.
LOOK_AGAIN_SECONDS = 0.02


class HostQuota:
    """The quotas of all jobs."""

    def __init__(self, quotas: Quotas, engine: Engine, sessions: Sessions) -> None:
        self._quotas = quotas
        self._engine = engine
        self._sessions = sessions
        self._being_granted: Counter[str] = Counter()

    @asynccontextmanager
    async def room_for(self, job: Job, needed: int) -> AsyncIterator[None]:
        """Waits until the quota has room for a lease of that many bytes, which is granted inside: from then on the
        lease itself counts.

        Raises:
            BudgetExceededError: naming the quota, what is needed and what is taken: the quota is smaller, or the job
                gave nothing back within `admission_timeout_seconds`.
        """
        name = job.spec.name
        limit = self._quotas.of(name).host_bytes
        if limit is None:
            yield
            return
        await self._wait_for_room(job, limit, needed)
        self._being_granted[name] += needed
        try:
            yield
        finally:
            self._being_granted[name] -= needed
            if not self._being_granted[name]:
                del self._being_granted[name]

    async def _wait_for_room(self, job: Job, limit: int, needed: int) -> None:
        home = sum(round_up(slab.nbytes) for slab in job.slabs() if slab.at_home_in_host)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._engine.config.admission_timeout_seconds
        while home + (taken := self._taken(job)) + needed > limit:
            if home + needed > limit or loop.time() > deadline:
                raise BudgetExceededError(
                    f"the quota of job {job.spec.name!r}, host_bytes = {limit}, has no room for {needed} bytes: {home} "
                    f"are placed on the host, {taken} are leased or being applied; return leases sooner, place less on "
                    "the host, or raise it in the daemon's `quotas`"
                )
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    def _taken(self, job: Job) -> int:
        leases = (lease for session in self._sessions.of_job(job.spec.name) for lease in session.leases.values())
        leased = sum(round_up(lease.nbytes) for lease in leases if _counts(lease))
        return leased + self._engine.loose.nbytes_of(job.spec.name) + self._being_granted[job.spec.name]


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
