"""Commit and durability: a committed step survives a crash, and uncommitted writes do not change it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from storage.base.errors import ConflictError, DiskFullError, NotFoundError, StepAbortedError
from storage.base.shard import DType, Kind
from tests.unit.storage.builders import ON_HOST, Fault, Layout, Training, held, opened, quiesce
from tests.unit.storage.crashes import assert_survives_a_crash, assert_survives_a_crash_at


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
async def test_every_step_survives_a_crash_from_its_commit_on(tmp_path: Path, placements: dict[str, Any]) -> None:
    async with opened(tmp_path / "state") as engine:
        training = Training(engine, Layout(precision=DType.BFLOAT16, **placements))
        await training.open(must_exist=False)
        await training.stage_all()
        await assert_survives_a_crash(training, None)
        await training.commit(0)
        for step in range(3):
            await assert_survives_a_crash(training, step)
            await training.hand_over()
            await assert_survives_a_crash(training, step)
            await training.commit(step + 1)
        assert engine.nvme.used_bytes == training.version_bytes


async def test_a_job_without_durability_ends_with_the_engine(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=0)).begin()
        assert await training.step() is False
        await assert_survives_a_crash(training, None)
    async with opened(tmp_path / "state") as engine:
        assert engine.jobs.by_name == {} and engine.nvme.used_bytes == 0


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
async def test_a_snapshot_is_of_its_step_although_training_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placements: dict[str, Any]
) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=3, **placements)).begin()
        await quiesce(engine)
        await training.step()
        await training.step()
        with held(monkeypatch, "sync_data") as go_on:
            assert await training.step() is False
            # The snapshot of step 3 is under way, and these commits do not wait for it.
            await training.step()
            await training.step()
            assert training.job.durable == {0}
            await assert_survives_a_crash_at(training, 0, monkeypatch)
            go_on.set()
            await quiesce(engine)
        assert training.job.durable == {3} and sorted(training.job.retained) == [3, 5]
        await training.assert_at(5)
        await assert_survives_a_crash(training, 3)
        assert engine.nvme.used_bytes == training.version_bytes * (1 if placements else 2)


async def test_a_snapshot_that_fails_is_told_once_and_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=2, **ON_HOST)).begin()
        await quiesce(engine)
        writes = Fault(monkeypatch, "write_exact")
        await training.step()
        writes.fail(DiskFullError("the disk is full"))
        await training.step()
        await quiesce(engine)
        writes.heal()
        assert training.job.durable == {0}
        await training.step()
        await training.hand_over()
        with pytest.raises(DiskFullError, match="the disk is full"):
            await training.commit(4)
        # The failed commit has overwritten nothing, so the same commit succeeds when it is tried again.
        await training.commit(4)
        await quiesce(engine)
        await training.assert_at(4)
        await assert_survives_a_crash(training, 4)


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 80])
async def test_an_abandoned_step_leaves_versions_and_free_space_as_before(
    tmp_path: Path, placements: dict[str, Any], turns: int
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(**placements)).begin()
        await training.step()
        before = {slab: dict(slab.versions) for slab in training.job.slabs()}
        host, nvme = engine.host.used_bytes, engine.nvme.used_bytes
        await training.hand_over()
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.pending_steps.abandon(training.job)
        assert {slab: dict(slab.versions) for slab in training.job.slabs()} == before
        assert engine.nvme.used_bytes == nvme and engine.host.used_bytes <= host
        await training.assert_goes_on_from(1)


async def test_abandoning_twice_at_once_waits_for_writes_under_way_before_their_room_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        # There is one group only. The update of a second one might not have begun to write, and would end at once.
        training = await Training(engine, Layout(groups=("block.0",))).begin()
        used = engine.nvme.used_bytes
        with held(monkeypatch, "write_exact") as go_on:
            await training.hand_over()
            while not engine.nvme.queue_depth:
                await asyncio.sleep(0.001)
            # After this time all writes that can begin have begun, and wait.
            await asyncio.sleep(0.1)
            with_targets = engine.nvme.used_bytes
            abandoning = []
            for _ in range(2):
                abandoning.append(asyncio.ensure_future(engine.pending_steps.abandon(training.job)))
                await asyncio.sleep(0.02)
            # Extents to which a thread still writes must not be freed.
            assert engine.nvme.used_bytes == with_targets > used and not any(task.done() for task in abandoning)
            go_on.set()
            await asyncio.gather(*abandoning)
        assert engine.nvme.used_bytes == used
        await training.step()
        await training.assert_at(1)


@pytest.mark.parametrize("delete", [False, True], ids=["abandoned", "deleted"])
async def test_initial_bytes_that_come_too_late_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delete: bool
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout(groups=("block.0",))).open(must_exist=False)
        pin = await engine.pins.stage(training.job, "block.0", Kind.PARAM)
        with held(monkeypatch, "write_exact") as go_on:
            publishing = asyncio.ensure_future(engine.pins.publish(pin))
            while not engine.nvme.queue_depth:
                await asyncio.sleep(0.001)
            await (engine.delete_job(training.layout.name) if delete else engine.end_run(training.job))
            go_on.set()
            with pytest.raises(StepAbortedError, match="begin it again"):
                await publishing
        assert engine.nvme.used_bytes == 0
        if not delete:
            await training.stage_all()
            await training.commit(0)
            await training.assert_at(0)


async def test_what_is_published_again_does_not_free_bytes_that_a_commit_in_doubt_may_name(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).open(must_exist=False)
        await training.stage_all()
        # The catalog is left as a commit of step 0 leaves it whose sync fails.
        engine._catalog.in_doubt = True
        await training.stage_all()
        assert not engine._catalog.in_doubt
        await training.commit(0)
        await training.assert_at(0)


async def test_step_0_takes_initial_values_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).open(must_exist=False)
        await training.stage_all()
        with pytest.raises(ConflictError, match="step 0 takes initial values and nothing else"):
            engine.pending_steps.check_update(training.job, 0, "block.0")
        with pytest.raises(ConflictError, match="step 0 takes initial values and nothing else"):
            await engine.pending_steps.allocate_put(training.job, 0, "block.0", Kind.PARAM)
        await training.commit(0)
        await training.assert_at(0)


async def test_a_job_that_is_being_deleted_can_be_neither_opened_nor_deleted_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        deleting = asyncio.ensure_future(engine.delete_job(training.layout.name))
        await asyncio.sleep(0)
        for again in (training.open(), engine.delete_job(training.layout.name)):
            with pytest.raises(ConflictError, match="is being deleted; try again"):
                await again
        await deleting
        assert engine.nvme.used_bytes == 0
        await training.begin()
        await training.assert_at(0)


async def test_readers_of_an_abandoned_update_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        with held(monkeypatch, "write_exact") as go_on:
            await training.hand_over()
            reader = asyncio.ensure_future(engine.pins.fetch(training.job, "block.0", Kind.PARAM))
            await asyncio.sleep(0.02)
            assert not reader.done(), "it waits for the update"
            abandoning = asyncio.ensure_future(engine.pending_steps.abandon(training.job))
            await asyncio.sleep(0.02)
            go_on.set()
            await abandoning
        with pytest.raises(StepAbortedError, match="resume from the last committed step"):
            await reader


async def test_the_last_step_stays_until_every_rank_has_the_newer_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(world_size=2)).begin()
        for step in (1, 2, 3):
            await training.step(settled=step - 1)
            assert sorted(training.job.retained) == [step - 1, step]
        assert engine.nvme.used_bytes == 2 * training.version_bytes
        await assert_survives_a_crash(training, 3)
        await engine.roll_back(training.job, 2)
        await training.assert_at(2)
        await assert_survives_a_crash(training, 2)
        assert engine.nvme.used_bytes == training.version_bytes
        await training.step()
        await training.assert_at(3)
        with pytest.raises(NotFoundError, match="does not hold step 1; it holds: 3"):
            await engine.roll_back(training.job, 1)


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
async def test_a_snapshot_stays_until_all_nodes_are_known_to_have_the_next_one(
    tmp_path: Path, placements: dict[str, Any]
) -> None:
    """A node whose device does not answer for long, and that crashes then, has the snapshot before only."""
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(every_steps=2, world_size=2, **placements)).begin()
        for step in (1, 2, 3, 4):
            await quiesce(engine)
            await training.step(settled=step - 1)
        await quiesce(engine)
        # Step 3 is settled, and the other node may be about to commit step 4, which waits for its snapshot of step 2.
        assert training.job.durable == {0, 2, 4}
        await assert_survives_a_crash(training, 4)
        await engine.roll_back(training.job, 0)
        await training.assert_at(0)
        for step in (1, 2, 3, 4, 5, 6):
            await training.step(settled=step - 1)
            await quiesce(engine)
        # Step 5 is settled, so the other node has committed step 4, and its snapshot of step 2 was over then.
        assert training.job.durable == {2, 4, 6}
        await training.assert_at(6)


async def test_steps_ascend_and_one_is_under_way_at_a_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        for step in (0, 1):
            with pytest.raises(ConflictError, match=f"step {step} cannot be prepared, the next one is 2"):
                await training.commit(step)
        await training.hand_over()
        with pytest.raises(ConflictError, match=r"group 'block\.0' was updated in step 2 already"):
            engine.pending_steps.check_update(training.job, 2, "block.0")
        with pytest.raises(ConflictError, match="step 3 cannot be prepared, step 2 is under way"):
            await training.commit(3)
        await training.commit(2)
        await training.assert_at(2)


async def test_steps_may_be_left_out_but_not_the_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).open(must_exist=False)
        await training.stage_all()
        with pytest.raises(ConflictError, match="step 5 cannot be prepared, the next one is 0"):
            await training.commit(5)
        await training.commit(0)
        # A pending step without writes does not prevent another one.
        training.job.open_pending(7)
        await training.commit(5)
        with pytest.raises(ConflictError, match="step 5 cannot be prepared, the next one is 6"):
            await training.commit(5)
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).open()
        assert training.job.newest == 5
        await training.assert_at(0)


async def test_nothing_joins_a_step_that_is_being_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout()).begin()
        with held(monkeypatch, "sync_data") as go_on:
            await training.hand_over(["block.0"])
            committing = asyncio.ensure_future(training.commit(1))
            await asyncio.sleep(0.02)
            with pytest.raises(ConflictError, match="step 1 is being committed; nothing can be added"):
                engine.pending_steps.check_update(training.job, 1, "block.1")
            go_on.set()
            await committing


async def test_groups_without_an_update_keep_their_version(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout(groups=("block.0", "idle"))).begin()
        for step in (1, 2):
            await training.hand_over(["block.0"])
            await training.commit(step)
        pin = await engine.pins.fetch(training.job, "idle", Kind.PARAM)
        assert pin.copy.step == 0
        engine.pins.unpin(pin)
        assert engine.nvme.used_bytes < training.version_bytes, "moments that were never written take no room"


async def test_initial_values_must_be_there_and_cannot_change_after_their_commit(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = Training(engine, Layout(precision=DType.BFLOAT16))
        await training.open(must_exist=False)
        with pytest.raises(
            ConflictError, match=r"job/block\.0/param has no initial values; publish them before step 0"
        ):
            await training.commit(0)
        await training.stage_all()
        late = await engine.pins.stage(training.job, "block.0", Kind.EXP_AVG)
        await training.commit(0)
        engine.host.view(late.arena_range)[:] = b"\xff" * late.arena_range.nbytes
        with pytest.raises(ConflictError, match="step 0 cannot be prepared"):
            await engine.pins.publish(late)
        with pytest.raises(ConflictError, match="step 0 cannot be prepared"):
            await engine.pins.stage(training.job, "block.0", Kind.PARAM)
        await training.assert_at(0)
        await assert_survives_a_crash(training, 0)


@pytest.mark.parametrize("placements", [{}, ON_HOST], ids=["nvme", "host"])
async def test_staged_bytes_that_are_not_published_never_count(tmp_path: Path, placements: dict[str, Any]) -> None:
    async with opened(tmp_path) as engine:
        training = Training(engine, Layout(**placements))
        await training.open(must_exist=False)
        await training.stage_all()
        again = await engine.pins.stage(training.job, "block.0", Kind.PARAM)
        with pytest.raises(ConflictError, match="is being written by another lease"):
            await engine.pins.stage(training.job, "block.0", Kind.PARAM)
        engine.host.view(again.arena_range)[:] = b"\xff" * again.arena_range.nbytes
        engine.pins.unpin(again)
        await training.commit(0)
        await training.assert_at(0)


async def test_reopening_gives_every_job_its_last_durable_step(tmp_path: Path) -> None:
    layouts = [
        Layout(name="steps"),
        Layout(name="snapshots", every_steps=2, groups=("one",)),
        Layout(name="volatile", every_steps=0, groups=("one",)),
    ]
    async with opened(tmp_path, host_budget_bytes=8 << 20) as engine:
        for layout in layouts:
            training = await Training(engine, layout).begin()
            for _ in range(3):
                await training.step()
            await training.hand_over()
    async with opened(tmp_path, host_budget_bytes=8 << 20) as engine:
        assert {name: job.newest for name, job in engine.jobs.by_name.items()} == {"steps": 3, "snapshots": 2}
        for layout in layouts[:2]:
            training = await Training(engine, layout).open()
            newest = training.job.newest
            assert newest is not None
            await training.assert_at(newest)
        await engine.delete_job("steps")
        assert engine.nvme.used_bytes == training.version_bytes
    async with opened(tmp_path) as engine:
        assert list(engine.jobs.by_name) == ["snapshots"]
