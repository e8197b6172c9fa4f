"""The table of runs: which runs it keeps, and for how long."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.sessions.sessions import Sessions
from storage.errors import NotFoundError, StepAbortedError
from tests.unit.paramserver.sessions.builders import begin, connect, join, serving, stage_all, until_cleaned_up
from tests.unit.storage.builders import Layout

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
