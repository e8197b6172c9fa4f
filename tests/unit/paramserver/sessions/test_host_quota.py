"""The quota of host memory counts what a job has on the host, whichever of its steps a lease is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ByteSize

from paramserver.security.quotas import Quota, QuotasSection
from storage.errors import BudgetExceededError
from storage.shard import TierName
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
        kept = await engine.keep(job, 0, "kept")
        room = 2 * MIB - job.tally.home_bytes
        for source in (job, kept):
            with pytest.raises(BudgetExceededError, match=f"{job.tally.home_bytes} are placed on the host"):
                async with sessions.grants._host_quota.room_for(session.owner, source, room + PAGE_BYTES):
                    pass
        async with sessions.grants._host_quota.room_for(session.owner, kept, room):
            pass
        await engine.forget(job.spec.name, "kept")
