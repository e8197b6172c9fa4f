"""The runs of jobs: which runs the table keeps, and what becomes of the work of ranks that go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from storage.errors import ConflictError, NotFoundError, StepAbortedError
from storage.shard import TierName
from tests.integration.support.store_client import group_to_wire
from tests.unit.paramserver.sessions.builders import (
    begin,
    connect,
    join,
    service,
    serving,
    stage_all,
    until_cleaned_up,
)
from tests.unit.storage.builders import Layout, room_taken

LAYOUT = Layout(with_skips=False)


def known_runs(sessions: Sessions) -> list[str]:
    """Return the jobs of the runs that the table has."""
    return list(sessions._runs._runs)


async def test_a_run_whose_job_cannot_be_opened_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, sessions):
        session = connect(sessions)
        for number in range(3):
            spec = replace(LAYOUT.job(), name=f"job/{number}")
            with pytest.raises(NotFoundError, match="no committed step to resume from"):
                await sessions.join(session, spec, "run", 0, may_exist=True, must_exist=True)
        await until_cleaned_up(sessions)
        assert known_runs(sessions) == []


async def test_a_run_whose_only_call_went_away_while_its_job_was_opened_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def open_job(*_: Any, **__: Any) -> None:
        opening.set()
        await go_on.wait()
        raise NotFoundError("there is no such job")

    async with serving(tmp_path) as (engine, sessions):
        monkeypatch.setattr(engine, "open_job", open_job)
        call = asyncio.ensure_future(join(sessions, connect(sessions), LAYOUT.job()))
        await opening.wait()
        call.cancel()
        await asyncio.wait([call])
        go_on.set()
        await until_cleaned_up(sessions)
        assert known_runs(sessions) == []


async def test_a_run_is_kept_with_its_job_and_forgotten_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        await stage_all(engine, sessions, session, LAYOUT)
        sessions.end(session, "closed", is_closed=True)
        await until_cleaned_up(sessions)
        # A late rank of the run must not begin it anew.
        with pytest.raises(StepAbortedError, match="rank 0 \\(client\\) of this run is gone"):
            await join(sessions, connect(sessions), LAYOUT.job())
        await engine.delete_job(LAYOUT.name)
        sessions.forget_job(LAYOUT.name)
        assert known_runs(sessions) == []


async def test_the_run_of_a_copy_that_is_given_up_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        await sessions.begin_copy(LAYOUT.name, "run", "step 0")
        session = await begin(engine, sessions, LAYOUT)
        sessions.end(session, "closed", is_closed=True)
        await until_cleaned_up(sessions)
        assert known_runs(sessions) == [] and not engine.jobs


async def test_a_new_run_of_a_deleted_job_is_not_forgotten_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        await begin(engine, sessions, LAYOUT)
        sessions.forget_job(LAYOUT.name)
        assert known_runs(sessions) == [LAYOUT.name]


def registration(layout: Layout) -> pb.RegisterShardsRequest:
    return pb.RegisterShardsRequest(groups=[group_to_wire(layout.group(name)) for name in layout.groups])


async def test_registrations_of_a_run_that_has_ended_take_no_memory(tmp_path: Path) -> None:
    """The first rank's registration waits for room, and the second one's for the first."""
    layout = Layout(with_skips=False, weights=TierName.HOST, moments=TierName.HOST)
    async with serving(tmp_path) as (engine, sessions):
        store, spec = service(engine, sessions), replace(layout.job(), world_size=2, local_ranks=2)
        ranks = [connect(sessions), connect(sessions)]
        job, _ = [await join(sessions, session, spec, rank=rank) for rank, session in enumerate(ranks)]
        before = engine.host.used_bytes
        with room_taken(engine):
            calls = [asyncio.ensure_future(store.RegisterShards(registration(layout), session)) for session in ranks]
            while not engine.host.queue_depth:
                await asyncio.sleep(0)
            for session in ranks:
                sessions.end(session, "no heartbeat")
            await until_cleaned_up(sessions)
            assert not job.groups
        for call in calls:
            with pytest.raises(NotFoundError, match="the session ended while its groups were registered"):
                await call
        assert not job.groups and engine.host.used_bytes == before


async def test_a_registration_does_not_begin_for_a_session_that_has_ended(tmp_path: Path) -> None:
    """The session ends while the service's thread converts the groups."""
    async with serving(tmp_path) as (engine, sessions):
        session = connect(sessions)
        job = await join(sessions, session, LAYOUT.job())
        call = asyncio.ensure_future(service(engine, sessions).RegisterShards(registration(LAYOUT), session))
        await asyncio.sleep(0)
        sessions.end(session, "no heartbeat")
        with pytest.raises(NotFoundError, match="the session is unknown or has ended"):
            await call
        assert not job.groups


async def test_a_registration_is_refused_whose_job_is_not_in_the_store(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = connect(sessions)
        job = await join(sessions, session, LAYOUT.job())
        await engine.delete_job(LAYOUT.name)
        with pytest.raises(ConflictError, match="job 'job' is not laid out as it was any more"):
            await service(engine, sessions).RegisterShards(registration(LAYOUT), session)
        assert not job.groups
