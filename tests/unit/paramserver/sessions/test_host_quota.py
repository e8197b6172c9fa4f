"""The quota of host memory counts what a job has on the host, whichever of its steps a lease is for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from pydantic import ByteSize

from paramserver.contract.sizes import shown_size
from paramserver.security.quotas import Quota, Quotas, QuotasSection
from paramserver.sessions.host_quota import HostQuota
from paramserver.sessions.leases import Lease
from storage.base.errors import BudgetExceededError
from storage.base.shard import TierName
from storage.tiers.base import PAGE_BYTES
from tests.unit.paramserver.sessions.builders import begin, serving, stage_all
from tests.unit.storage.builders import Layout

MIB = 1 << 20
# All slabs of the job are placed on the host.
LAYOUT = Layout(with_skips=False, weights=TierName.HOST, moments=TierName.HOST)


async def test_a_reader_of_a_kept_step_has_no_more_room_than_one_of_the_job(tmp_path: Path) -> None:
    quotas = QuotasSection(default=Quota(host_bytes=ByteSize(2 * MIB)))
    async with serving(tmp_path, quotas) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        await stage_all(engine, sessions, session, LAYOUT)
        job = await session.job()
        kept = await engine.kept_steps.keep(job, 0, "kept")
        room = 2 * MIB - job.tally.home_bytes
        for source in (job, kept):
            with pytest.raises(BudgetExceededError, match=f"{shown_size(job.tally.home_bytes)} are placed on the host"):
                async with sessions.grants._host_quota.room_for(session.owner, source, room + PAGE_BYTES):
                    pass
        async with sessions.grants._host_quota.room_for(session.owner, kept, room):
            pass
        await engine.kept_steps.forget(job.spec.name, "kept")


async def test_requests_that_wait_for_room_leave_the_event_loop_to_others(tmp_path: Path) -> None:
    """Each look at the leases of a job takes time, and clients may have thousands of requests wait."""
    quotas = QuotasSection(default=Quota(host_bytes=ByteSize(2 * MIB)))
    async with serving(tmp_path, quotas) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        job = await session.job()
        looks = 0

        def compute() -> None:
            until = time.thread_time() + 0.001
            while time.thread_time() < until:
                pass

        def leases_of(_: str) -> list[Lease]:
            nonlocal looks
            looks += 1
            compute()
            return []

        quota = HostQuota(Quotas(quotas), engine, leases_of)

        async def lease(nbytes: int, until: asyncio.Event | None = None) -> None:
            async with quota.room_for(session.owner, job, nbytes):
                if until is not None:
                    await until.wait()

        returned = asyncio.Event()
        requests = [asyncio.ensure_future(lease(2 * MIB - job.tally.home_bytes, returned))]
        requests += [asyncio.ensure_future(lease(PAGE_BYTES)) for _ in range(20)]
        while looks < len(requests):
            await asyncio.sleep(0)
        before = looks
        for _ in range(30):
            compute()
            await asyncio.sleep(0)
        looks_meanwhile = looks - before
        returned.set()
        await asyncio.gather(*requests)
        assert looks_meanwhile < 30
