"""The runs of jobs: which runs the table keeps, and what becomes of the work of ranks that go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from paramserver.security.quotas import Quota, QuotasSection, TokenQuota
from paramserver.sessions import runs
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import BudgetExceededError, ConflictError, NotFoundError, StepAbortedError
from storage.base.shard import JobSpec, Kind, TierName
from storage.engine import Engine
from storage.state.slab import NEVER
from tests.integration.support.store_client import group_to_wire, job_fields
from tests.unit.paramserver.sessions.builders import (
    acquire,
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


async def test_of_jobs_that_their_ranks_left_without_a_commit_only_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MOST_EMPTY_JOBS", 2)
    async with serving(tmp_path) as (engine, sessions):
        committed = await begin(engine, sessions, LAYOUT)
        await stage_all(engine, sessions, committed, LAYOUT)
        sessions.end(committed, "closed", is_closed=True)
        await until_cleaned_up(sessions)

        async def leave(name: str, run_id: str) -> None:
            session = await begin(engine, sessions, replace(LAYOUT, name=name), run_id)
            sessions.end(session, "no heartbeat")
            await until_cleaned_up(sessions)

        for name, run_id in (("a", "1"), ("b", "1"), ("a", "2"), ("c", "1")):
            await leave(name, run_id)
        # Job a was left twice, so b is the one that was left first.
        assert known_runs(sessions) == list(engine.jobs.by_name) == [LAYOUT.name, "a", "c"]
        for name, run_id in (("a", "2"), ("c", "1")):
            with pytest.raises(StepAbortedError, match="of this run is gone"):
                await join(sessions, connect(sessions), replace(LAYOUT.job(), name=name), run_id)
        # A job that has ranks again is not among them.
        await begin(engine, sessions, replace(LAYOUT, name="a"), "3")
        for name in ("b", "d"):
            await leave(name, "1")
        assert set(engine.jobs.by_name) == {LAYOUT.name, "a", "b", "d"} and sessions.empty_jobs == {"b", "d"}
        await engine.delete_job("b")
        sessions.forget_job("b")
        assert sessions.empty_jobs == {"d"}


async def test_a_job_that_its_ranks_left_without_a_commit_does_not_use_up_the_quota_of_a_token(tmp_path: Path) -> None:
    quotas = QuotasSection(token=(TokenQuota(jobs=2),))
    async with serving(tmp_path, quotas) as (engine, sessions):
        store = service(engine, sessions, quotas)

        async def open_job(name: str, run_id: str) -> Session:
            session = connect(sessions)
            fields = job_fields(LAYOUT) | {"job": name, "run_id": run_id, "resume": pb.RESUME_POLICY_AUTO}
            await store.OpenJob(pb.OpenJobRequest(session_id=session.session_id, **fields), session, cast(Any, None))
            return session

        for name in ("a", "b", "c"):
            sessions.end(await open_job(name, "1"), "no heartbeat")
            await until_cleaned_up(sessions)
        for name in ("a", "d"):
            await open_job(name, "2")
        # Job b is new again.
        with pytest.raises(BudgetExceededError, match="jobs = 2, is used up: there are 2 jobs that the token allows"):
            await open_job("b", "2")


async def test_the_run_of_a_copy_that_is_given_up_is_forgotten(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        await sessions.begin_copy(LAYOUT.name, "run", "step 0")
        session = await begin(engine, sessions, LAYOUT)
        sessions.end(session, "closed", is_closed=True)
        await until_cleaned_up(sessions)
        assert known_runs(sessions) == [] and not engine.jobs.by_name


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


async def two_ranks(engine: Engine, sessions: Sessions) -> list[Session]:
    """Open the sessions of a run of two ranks, with step 0 committed."""
    spec = replace(LAYOUT.job(), world_size=2, local_ranks=2)
    ranks = [connect(sessions), connect(sessions)]
    for rank, session in enumerate(ranks):
        job = await join(sessions, session, spec, rank=rank)
    await engine.register(job, [LAYOUT.group(name) for name in LAYOUT.groups])
    for group in LAYOUT.groups:
        await engine.pins.publish(await engine.pins.stage(job, group, Kind.PARAM))
    await asyncio.gather(*(sessions.vote(session, 0, b"", 0) for session in ranks))
    return ranks


async def put(engine: Engine, sessions: Sessions, session: Session, group: str, step: int) -> None:
    """Put other bytes into the weights of a group."""
    lease = await acquire(sessions.grants, session, group, Kind.PARAM, pb.LEASE_MODE_WRITE, step)
    engine.host.view(lease.arena_range)[:] = b"x" * lease.arena_range.nbytes
    await sessions.grants.release(session, lease, publish=True, next_use=NEVER)


async def voted(sessions: Sessions, session: Session, step: int) -> asyncio.Task[bool]:
    """Vote for a step, and return the vote once it stands."""
    vote = asyncio.ensure_future(sessions.vote(session, step, b"", 0))
    while session.require_run().vote is None:
        await asyncio.sleep(0)
    return vote


async def ended(vote: asyncio.Task[bool]) -> bool:
    """Wait until a vote ends, which may be never, and return its result."""
    async with asyncio.timeout(30):
        return await vote


async def test_no_more_ranks_attach_than_a_commit_waits_for(tmp_path: Path) -> None:
    """A step would be committed without the vote of a rank that is attached beyond `attached_ranks`."""
    spec = replace(LAYOUT.job(), world_size=4, local_ranks=2)
    async with serving(tmp_path) as (_, sessions):
        first, second, third = (connect(sessions) for _ in range(3))
        for rank, session in enumerate((first, second)):
            await join(sessions, session, spec, rank=rank)
        with pytest.raises(ConflictError, match="rank 2 of this run of job 'job' is one too many: 2 ranks"):
            await join(sessions, third, spec, rank=2)
        assert sessions.attached("job") == 2
        # A rank whose connection broke goes on with its session, and the refused one may attach in another run.
        sessions.detach(second, second.stream)
        sessions.take_up(second, second.visitor, second.stream, 1)
        for session in (first, second):
            sessions.end(session, "closed", is_closed=True)
        await join(sessions, third, spec, "another run", rank=2)


async def join_two(sessions: Sessions) -> tuple[JobSpec, Session, Session]:
    """Attach both ranks of a job; return the job and their sessions."""
    spec = replace(LAYOUT.job(), world_size=2, local_ranks=2)
    first, second = (connect(sessions) for _ in range(2))
    for rank, session in enumerate((first, second)):
        await join(sessions, session, spec, rank=rank)
    return spec, first, second


async def test_a_run_that_has_lost_all_its_ranks_begins_anew_for_those_that_come_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, sessions):
        spec, first, second = await join_two(sessions)
        sessions.end(first, "no heartbeat")
        with pytest.raises(StepAbortedError, match=r"rank 0 .* of this run is gone"):
            await join(sessions, connect(sessions), spec, rank=0, comes_back=True)
        sessions.end(second, "no heartbeat")
        # A late rank that was never attached would wait for the others without end.
        with pytest.raises(StepAbortedError, match=r"rank 0 .* of this run is gone"):
            await join(sessions, connect(sessions), spec, rank=0)
        for rank in (1, 0):
            await join(sessions, connect(sessions), spec, rank=rank, comes_back=True)
        assert sessions.attached("job") == 2


async def test_a_rank_does_not_come_back_to_a_run_that_another_rank_has_left(tmp_path: Path) -> None:
    """The other rank has ended because this one was silent, and will never vote again."""
    async with serving(tmp_path) as (_, sessions):
        spec, first, second = await join_two(sessions)
        sessions.end(first, "no heartbeat")
        sessions.end(second, "closed by the client", is_closed=True)
        with pytest.raises(StepAbortedError, match=r"rank 1 .* of this run is gone"):
            await join(sessions, connect(sessions), spec, rank=0, comes_back=True)
        assert sessions.attached("job") == 0
        await join(sessions, connect(sessions), spec, "the next run", rank=0)


async def test_no_session_ends_for_its_silence_while_the_event_loop_stood_still(tmp_path: Path) -> None:
    """A silent client gets as long again as the daemon itself could not hear it."""
    async with serving(tmp_path) as (_, sessions):
        sessions.limits = replace(sessions.limits, heartbeat_timeout_seconds=0.4)
        session, loop = connect(sessions), asyncio.get_running_loop()
        await asyncio.sleep(0.2)
        sessions.stood_still(60.0)
        woke_at = loop.time()
        async with asyncio.timeout(30):
            await session.ended.wait()
        assert loop.time() - woke_at > 0.3


async def test_steps_that_other_nodes_may_lack_do_not_add_up(tmp_path: Path) -> None:
    """The store keeps all steps from the settled one on, so they would take up all its room if that never rose."""
    async with serving(tmp_path) as (engine, sessions):
        session = connect(sessions)
        job = await join(sessions, session, replace(LAYOUT.job(), world_size=2))
        await engine.register(job, [LAYOUT.group(name) for name in LAYOUT.groups])
        await stage_all(engine, sessions, session, LAYOUT)
        await sessions.vote(session, 1, b"", 0)
        with pytest.raises(ConflictError, match="with settled_step 0, and the newest step is 1; vote when all ranks"):
            await sessions.vote(session, 2, b"", 0)
        await sessions.vote(session, 2, b"", 1)
        assert list(job.retained) == [1, 2]


async def test_a_roll_back_ends_the_vote_of_another_rank_whose_work_it_discards(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        store, (first, second) = service(engine, sessions), await two_ranks(engine, sessions)
        await put(engine, sessions, first, "block.0", 1)
        vote = await voted(sessions, first, 1)
        await store.RollBack(pb.RollBackRequest(step=0), second)
        with pytest.raises(StepAbortedError, match="rolled job 'job' back to step 0; go on from that step"):
            await ended(vote)
        # Now both ranks do their work again.
        await put(engine, sessions, first, "block.0", 1)
        await put(engine, sessions, second, "block.1", 1)
        await asyncio.gather(*(sessions.vote(session, 1, b"", 0) for session in (first, second)))
        versions = [engine.jobs.job("job").slab(group, Kind.PARAM).latest for group in LAYOUT.groups]
        assert versions == [1, 1]


async def test_a_vote_that_comes_during_a_roll_back_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        store, (first, second) = service(engine, sessions), await two_ranks(engine, sessions)
        rolling, go_on, roll_back = asyncio.Event(), asyncio.Event(), engine.roll_back

        async def slow(*arguments: Any) -> None:
            rolling.set()
            await go_on.wait()
            await roll_back(*arguments)

        monkeypatch.setattr(engine, "roll_back", slow)
        call = asyncio.ensure_future(store.RollBack(pb.RollBackRequest(step=0), second))
        await rolling.wait()
        vote = await voted(sessions, first, 1)
        go_on.set()
        await call
        with pytest.raises(StepAbortedError, match="rolled job 'job' back"):
            await ended(vote)


async def test_a_roll_back_that_is_refused_leaves_the_vote(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        store, (first, second) = service(engine, sessions), await two_ranks(engine, sessions)
        vote = await voted(sessions, first, 1)
        with pytest.raises(NotFoundError, match="7"):
            await store.RollBack(pb.RollBackRequest(step=7), second)
        assert await sessions.vote(second, 1, b"", 0) and await ended(vote)


async def test_another_layout_ends_the_vote_of_another_rank(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        for session in await two_ranks(engine, sessions):
            sessions.end(session, "closed", is_closed=True)
        await until_cleaned_up(sessions)
        spec = replace(LAYOUT.job(), world_size=2, local_ranks=2, layout="other")
        first, second = connect(sessions), connect(sessions)
        for rank, session in enumerate((first, second)):
            await join(sessions, session, spec, "run 2", rank)
        vote = await voted(sessions, first, 1)
        await sessions.begin_layout(second, 5)
        with pytest.raises(StepAbortedError, match="began another layout of job 'job'"):
            await ended(vote)


async def test_of_two_calls_that_open_jobs_for_one_session_one_is_refused(tmp_path: Path) -> None:
    """The first call waits for a lost run, and the second one overtakes it."""
    async with serving(tmp_path) as (_, sessions):
        lost, session = connect(sessions), connect(sessions)
        await join(sessions, lost, LAYOUT.job(), "lost run")
        sessions.detach(lost, lost.stream)
        first = asyncio.ensure_future(join(sessions, session, LAYOUT.job(), "run"))
        await asyncio.sleep(0)
        await join(sessions, session, replace(LAYOUT.job(), name="another"), "run")
        sessions.end(lost, "its stream broke")
        with pytest.raises(ConflictError, match="this session has opened a job already"):
            await first
        assert (sessions.attached("job"), sessions.attached("another")) == (0, 1)
        sessions.end(session, "closed", is_closed=True)
        assert sessions.attached("another") == 0


async def test_a_quota_of_sessions_does_not_count_a_lost_run_and_holds_after_the_wait_for_its_end(
    tmp_path: Path,
) -> None:
    quotas = QuotasSection(default=Quota(sessions=2))
    fields = job_fields(LAYOUT) | {"world_size": 3, "attached_ranks": 3, "resume": pb.RESUME_POLICY_AUTO}
    async with serving(tmp_path, quotas) as (engine, sessions):
        store = service(engine, sessions, quotas)

        def opening(run_id: str, rank: int) -> tuple[Session, asyncio.Task[pb.OpenJobResponse]]:
            session = connect(sessions)
            request = pb.OpenJobRequest(session_id=session.session_id, **(fields | {"run_id": run_id, "rank": rank}))
            return session, asyncio.ensure_future(store.OpenJob(request, session, cast(Any, None)))

        lost = [opening("lost run", rank) for rank in range(2)]
        for session, call in lost:
            await call
            sessions.detach(session, session.stream)
        calls = [opening("run", rank)[1] for rank in range(3)]
        # All three wait for the end of the lost run, so each of them finds no rank of their own run yet.
        async with asyncio.timeout(30):
            while store._opening[LAYOUT.name] < len(calls):
                await asyncio.sleep(0.001)
        for session, _ in lost:
            sessions.end(session, "its stream broke")
        await asyncio.wait(calls)
        refusals = [error for call in calls if (error := call.exception()) is not None]
        assert [type(error) for error in refusals] == [BudgetExceededError], refusals
        assert "allows 2 sessions, and 2 are attached" in str(refusals[0]) and sessions.attached("job") == 2
