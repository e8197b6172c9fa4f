"""An unfinished copy stays for the next attempt at the same step, and for no other run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from paramserver.events import EventLog
from paramserver.sessions import copies
from paramserver.sessions.runs import Runs
from storage.base.errors import BudgetExceededError, ConflictError, NotFoundError
from storage.base.shard import JobSpec, Kind
from storage.engine import Engine
from tests.unit.storage.builders import Layout, opened

LAYOUT = Layout(with_skips=False)


@dataclass
class Rank:
    client: str = "copier"


async def copy_half(engine: Engine, runs: Runs[Rank], run_id: str, origin: str, *, is_closed: bool) -> bool:
    """Announce a copy, publish one slab unless it is there, and end the run. Return whether the slab was there."""
    runs.begin_copy("job", run_id, origin)
    run = runs.enter(Rank(), spec(), run_id, 0, may_exist=True, must_exist=False)
    job = await run.job
    await engine.register(job, [LAYOUT.group(group) for group in LAYOUT.groups])
    was_there = job.slab(LAYOUT.groups[0], Kind.PARAM).latest == 0
    if not was_there:
        await engine.pins.publish(await engine.pins.stage(job, LAYOUT.groups[0], Kind.PARAM))
    runs.leave(run, 0, is_closed=is_closed)
    await runs.clean_up(run)
    return was_there


def spec() -> JobSpec:
    return LAYOUT.job()


async def test_the_next_attempt_at_the_same_step_goes_on_and_one_at_another_step_does_not(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        assert not await copy_half(engine, runs, "1", "step 0", is_closed=False)
        assert await copy_half(engine, runs, "2", "step 0", is_closed=False)
        assert not await copy_half(engine, runs, "3", "another step 0", is_closed=False)
        # A client that closes its sessions gives up, and nothing is left.
        assert await copy_half(engine, runs, "4", "another step 0", is_closed=True)
        assert not engine.jobs.by_name and engine.nvme.used_bytes == 0
        assert not await copy_half(engine, runs, "5", "another step 0", is_closed=True)


async def test_another_run_discards_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        await copy_half(engine, runs, "1", "step 0", is_closed=False)
        run = runs.enter(Rank("trainer"), spec(), "trainer", 0, may_exist=True, must_exist=False)
        job = await run.job
        assert not job.groups and engine.nvme.used_bytes == 0
        with pytest.raises(ConflictError, match="is in use here \\(trainer\\)"):
            runs.begin_copy("job", "2", "step 0")
        runs.leave(run, 0)
        await runs.clean_up(run)


async def test_it_goes_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "UNFINISHED_SECONDS", 0.1)
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        await copy_half(engine, runs, "1", "step 0", is_closed=False)
        async with asyncio.timeout(30):
            while engine.jobs.by_name:
                await asyncio.sleep(0.01)
        assert engine.nvme.used_bytes == 0


async def test_a_copy_that_takes_longer_than_that_time_is_a_copy_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        with monkeypatch.context() as now:
            now.setattr(copies, "UNFINISHED_SECONDS", 0.0)
            runs.begin_copy("job", "1", "step 0")
            run = runs.enter(Rank(), spec(), "1", 0, may_exist=True, must_exist=False)
        job = await run.job
        await engine.register(job, [LAYOUT.group(group) for group in LAYOUT.groups])
        await engine.pins.publish(await engine.pins.stage(job, LAYOUT.groups[0], Kind.PARAM))
        assert runs.is_copy(run)
        runs.leave(run, 0)
        await runs.clean_up(run)
        assert await copy_half(engine, runs, "2", "step 0", is_closed=True)


async def test_an_unfinished_step_goes_although_a_copy_of_another_step_was_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        await copy_half(engine, runs, "1", "step 0", is_closed=False)
        monkeypatch.setattr(copies, "UNFINISHED_SECONDS", 0.0)
        # The client of this one is lost before it opens the job.
        assert not runs.begin_copy("job", "2", "another step 0")
        async with asyncio.timeout(30):
            while engine.jobs.by_name:
                await asyncio.sleep(0.01)
        assert engine.nvme.used_bytes == 0


async def test_a_run_that_cannot_open_the_job_leaves_the_unfinished_step_for_its_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        await copy_half(engine, runs, "1", "step 0", is_closed=False)
        expires = runs._copies._copies["job"].timer.when()
        run = runs.enter(Rank("trainer"), spec(), "trainer", 0, may_exist=True, must_exist=True)
        with pytest.raises(NotFoundError, match="no committed step to resume from"):
            await run.job
        runs.leave(run, 0)
        await runs.clean_up(run)
        timer = runs._copies._copies["job"].timer
        assert timer.when() == expires and not timer.cancelled()
        assert await copy_half(engine, runs, "2", "step 0", is_closed=True)


async def test_announcements_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_COPIES", 2)
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        for job in ("a", "b", "a"):
            runs.begin_copy(job, "1", "step 0")
        with pytest.raises(BudgetExceededError, match="2 copies"):
            runs.begin_copy("c", "1", "step 0")


async def test_one_token_cannot_announce_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MOST_COPIES_OF_A_TOKEN", 2)
    async with opened(tmp_path) as engine:
        runs: Runs[Rank] = Runs(engine, EventLog())
        for job in ("a", "b", "a"):
            runs.begin_copy(job, "1", "step 0", "team-b")
        with pytest.raises(BudgetExceededError, match="2 copies were announced here with token team-b"):
            runs.begin_copy("c", "1", "step 0", "team-b")
        # Another token and operators can announce theirs, also into the same job.
        runs.begin_copy("a", "2", "step 0", "team-a")
        runs.begin_copy("c", "1", "step 0", "team-b")
        for job in ("d", "e", "f"):
            runs.begin_copy(job, "1", "step 0")
