"""The client states of the newest step can be replaced, one rank at a time, and survive a crash as the step does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from storage.base import failpoints
from storage.base.errors import ConflictError
from storage.base.failpoints import Failpoint
from tests.unit.storage.builders import ON_HOST, Layout, Training, opened, quiesce
from tests.unit.storage.crashes import crashed

SNAPSHOTS = Layout(every_steps=2, **ON_HOST)


async def test_a_replaced_state_is_durable_and_the_former_one_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        reader = await engine.step_readers.open(training.job)
        await engine.amend(training.job, 1, 0, b"amended")
        await engine.amend(training.job, 1, 0, b"amended again")
        # The reader was open before.
        assert reader.client_state(0) == b"1"
        reader.close()
        async with crashed(engine) as found:
            again = await Training(found, training.layout).open()
            assert again.job.retained[1].client_states == {0: b"amended again"}
            await again.assert_at(1)
            await again.step()
        await training.step()
        assert training.job.retained[2].client_states == {0: b"2"}


async def test_ranks_that_amend_a_step_at_once_do_not_undo_each_other(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = Training(engine, Layout())
        await training.open(must_exist=False)
        await training.stage_all()
        await engine.commit(training.job, 0, dict.fromkeys(range(4), b"first"), None)
        await asyncio.gather(*(engine.amend(training.job, 0, rank, bytes([rank])) for rank in range(4)))
        expected = {rank: bytes([rank]) for rank in range(4)}
        assert training.job.retained[0].client_states == expected
        async with crashed(engine) as found:
            assert found.jobs.job("job").retained[0].client_states == expected


async def test_only_the_newest_step_and_its_ranks_can_be_amended(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        for step, rank in ((0, 0), (2, 0), (1, 5)):
            with pytest.raises(ConflictError, match=f"rank {rank} cannot amend step {step} of job 'job': the newest"):
                await engine.amend(training.job, step, rank, b"late")


async def test_a_step_that_a_commit_is_replacing_is_not_amended(tmp_path: Path) -> None:
    """The catalog has the next step already, and the event loop does not know it yet."""
    is_recording, goes_on = threading.Event(), threading.Event()

    def hold(reached: Failpoint) -> None:
        if reached is Failpoint.AFTER_FLIP:
            is_recording.set()
            assert goes_on.wait(30)

    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        failpoints.install(hold)
        try:
            committing = asyncio.create_task(training.step())
            assert await asyncio.to_thread(is_recording.wait, 30)
            amending = asyncio.create_task(engine.amend(training.job, 1, 0, b"late"))
            # The amendment comes into the queue of the catalog's thread, behind the commit.
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            goes_on.set()
            failpoints.install(None)
        with pytest.raises(
            ConflictError, match="rank 0 cannot amend step 1 of job 'job': a newer step was being commit"
        ):
            await amending
        await committing
        await training.assert_at(2)
        async with crashed(engine) as found:
            assert found.jobs.job("job").retained[2].client_states == {0: b"2"}


async def test_a_step_that_a_snapshot_writes_is_amended_in_the_catalog_too(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, SNAPSHOTS).begin()
        await training.step()
        # This step is in memory only.
        await engine.amend(training.job, 1, 0, b"in memory")
        assert training.job.retained[1].client_states == {0: b"in memory"}
        await training.step()
        await engine.amend(training.job, 2, 0, b"written")
        await quiesce(engine)
        assert training.job.retained[2].client_states == {0: b"written"}
        async with crashed(engine) as found:
            assert found.jobs.job("job").retained[2].client_states == {0: b"written"}
