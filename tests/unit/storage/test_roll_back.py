"""The way back: an operator's roll-back, and a job whose newest bytes are lost, lead to a step that is whole."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage.base import failpoints
from storage.base.errors import (
    ConflictError,
    DataLossError,
    DeviceError,
    DiskFullError,
    NotFoundError,
    StepAbortedError,
)
from storage.base.failpoints import Failpoint
from storage.base.shard import DType, Kind, TierName
from storage.catalog.records import RolledBack
from storage.steps.tile import Kernel, UpdateTile
from tests.unit.storage.builders import ON_HOST, ROOM_FOR_TILED, TILED, Fault, Layout, Training, held, opened, quiesce
from tests.unit.storage.crashes import assert_survives_a_crash


async def test_the_roll_backs_of_an_operator_are_recorded_with_the_job(tmp_path: Path) -> None:
    """A roll-back replaces former ones to the same or a later step, and a trainer's roll-back is not recorded."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(world_size=2)).begin()
        for _ in range(3):
            await training.step(settled=0)
        await engine.roll_back(training.job, 3, is_ordered=True)
        await engine.roll_back(training.job, 1, is_ordered=True)
        await training.step(settled=0)
        await engine.roll_back(training.job, 2, is_ordered=True)
        await training.step(settled=0)
        await engine.roll_back(training.job, 2)
        marks = training.job.rolled_back
        assert [mark.step for mark in marks] == [1, 2]
    async with opened(tmp_path) as engine:
        assert engine.jobs.job(training.job.spec.name).rolled_back == marks
        await engine.delete_job(training.job.spec.name)
    assert stored_roll_backs(tmp_path) == []
    async with opened(tmp_path) as engine:
        assert not engine.jobs.by_name


def stored_roll_backs(state_dir: Path) -> list[str]:
    """Return the keys of all roll-backs in the catalog of a store."""
    with closing(sqlite3.connect(state_dir / "catalog.sqlite")) as db:
        return [key for (key,) in db.execute("SELECT key FROM meta WHERE key LIKE 'rolled_back%'")]


async def test_a_roll_back_of_a_job_that_is_not_in_the_catalog_is_not_there_either(tmp_path: Path) -> None:
    """Another job of the same name would have it after the next start."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(every_steps=0)).begin()
        await engine.roll_back(training.job, 0, is_ordered=True)
        assert len(training.job.rolled_back) == 1
        await engine.delete_job("job")
        assert stored_roll_backs(tmp_path) == []


async def test_a_roll_back_is_recorded_with_the_first_durable_step_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        writes = Fault(monkeypatch, "write_exact")
        writes.fail(DiskFullError("the disk is full"))
        training = await Training(engine, Layout(every_steps=2, **ON_HOST)).begin()
        await quiesce(engine)
        writes.heal()
        await engine.roll_back(training.job, 0, is_ordered=True)
        assert stored_roll_backs(tmp_path) == []
        await training.step()
        await training.hand_over()
        with pytest.raises(DiskFullError, match="the disk is full"):
            await training.commit(2)
        await training.commit(2)
        await quiesce(engine)
        marks = training.job.rolled_back
        assert [mark.step for mark in marks] == [0]
    async with opened(tmp_path) as engine:
        assert engine.jobs.job("job").rolled_back == marks


async def test_a_job_does_not_take_over_the_roll_backs_of_a_former_one(tmp_path: Path) -> None:
    """Earlier versions left them in the catalog, if the former job was not in it."""
    async with opened(tmp_path) as engine:
        with engine._catalog.transaction():
            engine._catalog.add_rolled_back("job", RolledBack(1, "a name"))
        assert stored_roll_backs(tmp_path) == ["rolled_back job"]
        await Training(engine, Layout()).begin()
        assert stored_roll_backs(tmp_path) == []


async def test_a_roll_back_frees_what_it_gives_up_although_a_commit_of_another_job_is_in_doubt(tmp_path: Path) -> None:
    def fail_another(reached: Failpoint) -> None:
        """Leave the catalog as the transaction of another job does whose COMMIT fails right after this one."""
        if reached is Failpoint.AFTER_FLIP:
            engine._catalog.in_doubt = True

    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(world_size=2)).begin()
        await training.step(settled=0)
        used = engine.nvme.used_bytes
        await training.step(settled=0)
        failpoints.install(fail_another)
        try:
            await engine.roll_back(training.job, 1)
        finally:
            failpoints.install(None)
        assert engine.nvme.used_bytes == used
        await training.step(settled=0)
        await training.assert_at(2)
        await assert_survives_a_crash(training, 2)


async def test_a_roll_back_to_the_newest_step_only_abandons_the_pending_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(precision=DType.FLOAT16, **ON_HOST)).begin()
        await training.step()
        await training.hand_over()
        await engine.roll_back(training.job, 1)
        assert training.job.pending is None
        await training.assert_at(1)


async def test_a_refused_roll_back_leaves_the_pending_step_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.hand_over()
        with pytest.raises(NotFoundError):
            await engine.roll_back(training.job, 7)
        await training.commit(1)
        await training.assert_at(1)


@pytest.mark.parametrize("function", ["sync_data", "write_exact"])
async def test_a_roll_back_waits_for_a_commit_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(world_size=2)).begin()
        with held(monkeypatch, function) as go_on:
            await training.hand_over()
            committing = asyncio.ensure_future(training.commit(1, settled=0))
            await asyncio.sleep(0.05)
            rolling_back = asyncio.ensure_future(engine.roll_back(training.job, 0))
            await asyncio.sleep(0.05)
            assert not committing.done() and not rolling_back.done()
            go_on.set()
            assert await committing is True
            await rolling_back
        await training.assert_at(0)
        await assert_survives_a_crash(training, 0)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 0), (0, 1)])
async def test_roll_backs_at_once_are_done_one_after_the_other(tmp_path: Path, first: int, second: int) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout()).begin()
        for _ in range(3):
            await training.step(settled=0)
        calls = [engine.roll_back(training.job, step) for step in (first, second)]
        done, also = await asyncio.gather(*calls, return_exceptions=True)
        assert done is None
        # The second one may find that the first one has discarded its step.
        assert isinstance(also, NotFoundError) if second > first else also is None
        assert training.job.newest == min(first, second)
        await training.assert_at(min(first, second))
        await assert_survives_a_crash(training, min(first, second))


async def test_a_job_is_deleted_after_its_roll_back_and_not_rolled_back_while_it_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout()).begin()
        for _ in range(3):
            await training.step(settled=0)
        rolled_back, deleted, refused = await asyncio.gather(
            engine.roll_back(training.job, 1),
            engine.delete_job("job"),
            engine.roll_back(training.job, 0),
            return_exceptions=True,
        )
        assert rolled_back is deleted is None
        assert isinstance(refused, ConflictError) and "is being deleted" in str(refused)
        assert not engine.jobs.by_name and engine.nvme.used_bytes == 0
        await assert_survives_a_crash(training, None)


async def test_no_step_is_begun_while_the_job_is_rolled_back(tmp_path: Path) -> None:
    """Its updates would be computed from the step that is given up, and count for one after the step gone back to."""
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(world_size=2)).begin()
        for _ in range(2):
            await training.step(settled=0)
        job, go_on = training.job, threading.Event()
        try:
            # The roll-back waits for the catalog's thread.
            busy = asyncio.ensure_future(engine._catalog_thread.run(lambda: bool(go_on.wait())))
            rolling_back = asyncio.ensure_future(engine.roll_back(job, 1))
            await asyncio.sleep(0.02)
            with pytest.raises(StepAbortedError, match="is being rolled back, so step 3 cannot be prepared"):
                engine.pending_steps.check_update(job, 3, "block.0")
            with pytest.raises(StepAbortedError, match="is being rolled back, so step 3 cannot be prepared"):
                await engine.pending_steps.allocate_put(job, 3, "block.0", Kind.PARAM)
            with pytest.raises(StepAbortedError, match="is being rolled back, so step 3 cannot be prepared"):
                await training.commit(3)
            assert not rolling_back.done()
        finally:
            go_on.set()
        await asyncio.gather(busy, rolling_back)
        assert (job.newest, job.pending) == (1, None)
        await training.step(settled=0)
        await training.assert_at(2)


async def test_a_roll_back_during_a_snapshot_finds_out_first_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=2)).begin()
        await quiesce(engine)
        await training.step()
        with held(monkeypatch, "sync_data") as go_on:
            await training.step()
            rolling_back = asyncio.ensure_future(engine.roll_back(training.job, 0))
            await asyncio.sleep(0.02)
            go_on.set()
            # Step 0 was removed when the snapshot of step 2 became durable.
            with pytest.raises(NotFoundError, match="it holds: 2"):
                await rolling_back
        await training.assert_at(2)
        await assert_survives_a_crash(training, 2)


async def test_what_a_roll_back_took_out_of_the_catalog_is_recorded_again(tmp_path: Path) -> None:
    layout = Layout(every_steps=2, world_size=2)
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, layout).begin()
        await quiesce(engine)
        await training.step(settled=0)
        # Step 2 is made twice. Its snapshot records the version that `block.1` wrote in step 1, which not all ranks
        # have committed yet.
        for _ in range(2):
            await engine.roll_back(training.job, 1)
            await training.hand_over(["block.0"])
            await training.commit(2, settled=0)
            await quiesce(engine)
        assert training.job.durable == {0, 2}
    async with opened(tmp_path / "state") as engine:
        again = await Training(engine, layout).open()
        assert {slab.key.group: slab.latest for slab in again.job.slabs()} == {"block.0": 2, "block.1": 1}


async def test_bytes_that_were_in_memory_only_cannot_be_gone_back_to(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(every_steps=0, world_size=2, **ON_HOST)).begin()
        await training.step(settled=0)
        await training.step(settled=1)
        with pytest.raises(
            DataLossError, match=r"step 1: the bytes of job/block.0/param were kept in host memory only"
        ):
            await engine.roll_back(training.job, 1)
        await training.assert_goes_on_from(2)


def failing_after(tiles: int) -> Any:
    """Return a wrapper of kernels, in which the call after the first `tiles` ones raises."""
    count = 0

    def wrap(kernel: Kernel) -> Kernel:
        def run(tile: UpdateTile) -> None:
            nonlocal count
            count += 1
            if count > tiles:
                raise DeviceError("the kernel failed")
            kernel(tile)

        return run

    return wrap


async def fail_step(training: Training, *, after_tiles: int) -> None:
    """Train the next step with a kernel that fails after some tiles, and check that the commit of the step fails."""
    step = training.job.next_step
    await training.hand_over(wrap=failing_after(after_tiles))
    with pytest.raises(DeviceError, match="the kernel failed"):
        await training.commit(step)


@pytest.mark.parametrize("tiles", [0, 1, 4])
async def test_an_update_in_place_that_fails_never_passes_for_the_step_before(tmp_path: Path, tiles: int) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, Layout(numels=TILED, every_steps=0, **ON_HOST)).begin()
        await training.step()
        await fail_step(training, after_tiles=tiles)
        with pytest.raises(DataLossError, match=r"cannot go back to step 1.*durable steps: none"):
            await engine.roll_back(training.job, 1)
        with pytest.raises(DataLossError, match="set durability to"):
            await training.assert_at(1)


@pytest.mark.parametrize("tiles", [0, 1, 4])
async def test_an_update_in_place_that_fails_goes_back_to_the_last_snapshot(tmp_path: Path, tiles: int) -> None:
    async with opened(tmp_path, **ROOM_FOR_TILED) as engine:
        training = await Training(engine, Layout(numels=TILED, every_steps=2, **ON_HOST)).begin()
        for _ in range(3):
            await training.step()
        await fail_step(training, after_tiles=tiles)
        with pytest.raises(NotFoundError, match="does not hold step 3; it holds: 2"):
            await engine.roll_back(training.job, 3)
        assert training.job.newest == 2
        await engine.roll_back(training.job, 2)
        await training.assert_goes_on_from(2)


@pytest.mark.parametrize("end", ["roll back", "end"])
async def test_a_job_whose_newest_bytes_are_lost_goes_back_to_the_snapshot_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=2, **ON_HOST)).begin()
        await quiesce(engine)
        await training.step()
        with held(monkeypatch, "sync_data") as go_on:
            await training.step()
            # The snapshot of step 2 has written all bytes when step 3 overwrites those in host memory.
            await fail_step(training, after_tiles=1)
            job = training.job
            ending = engine.roll_back(job, 2) if end == "roll back" else engine.pending_steps.abandon(job)
            going_back = asyncio.ensure_future(ending)
            await asyncio.sleep(0.02)
            go_on.set()
            await going_back
            await quiesce(engine)
        assert (job.newest, job.durable) == (2, {2})
        await training.assert_at(2)
        await assert_survives_a_crash(training, 2)
        await training.step()
        await training.assert_at(3)


async def test_a_step_of_which_an_update_has_failed_costs_no_bytes_in_host_memory(tmp_path: Path) -> None:
    in_memory, on_nvme = Layout(every_steps=0, **ON_HOST), Layout(every_steps=0)
    async with opened(tmp_path) as engine:
        training = Training(engine, on_nvme)
        job = training.job = await engine.open_job(on_nvme.job(), may_exist=False, must_exist=False)
        await engine.register(job, [in_memory.group("block.0"), on_nvme.group("block.1")])
        await training.stage_all()
        await training.commit(0)
        await training.step()
        await training.hand_over(["block.0"])
        await training.hand_over(["block.1"], wrap=failing_after(0))
        assert job.pending is not None
        await asyncio.wait([job.pending.writes[job.slab("block.1", Kind.PARAM)]])
        for _ in range(2):
            with pytest.raises(DeviceError, match="the kernel failed"):
                await training.commit(2)
        await engine.roll_back(job, 1)
        await training.assert_goes_on_from(1)


@pytest.mark.parametrize("every_steps", [0, 2])
async def test_an_update_that_fails_before_it_changes_a_byte_costs_none_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_steps: int
) -> None:
    """A device that fails, or is full, fails the updates of all groups before their kernels begin."""
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(every_steps=every_steps, weights=TierName.HOST)).begin()
        await training.step()
        await quiesce(engine)
        await engine.upkeep.evict_copies()
        reads = Fault(monkeypatch, "read_exact")
        reads.fail(DeviceError("input/output error"))
        await training.hand_over()
        with pytest.raises(DeviceError, match="input/output error"):
            await training.commit(2)
        reads.heal()
        await engine.roll_back(training.job, 1)
        await training.assert_goes_on_from(1)
