"""Readers get the newest step that all nodes of a job are known to have, also after a restart of the store."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from storage.base.errors import ConflictError, DataLossError
from storage.engine import Engine
from storage.state.versions import Job
from tests.unit.storage.builders import ON_HOST, Layout, Training, opened, quiesce
from tests.unit.storage.crashes import crashed

# A job whose other rank is on another node.
PART = Layout(world_size=2)
SNAPSHOTS = Layout(world_size=2, every_steps=2)
IN_MEMORY = Layout(world_size=2, every_steps=2, **ON_HOST)


async def read_step(engine: Engine, job: Job, *, unsettled: bool = False) -> int:
    """Return the step that a reader gets that names none."""
    reader = await engine.step_readers.open(job, unsettled=unsettled)
    reader.close()
    return reader.step


async def part_at(engine: Engine, layout: Layout, last: int) -> Training:
    """Return a part that is at step `last`, of which the other node is known to have the step before."""
    training = await begin_part(engine, layout)
    for step in range(1, last + 1):
        await training.step(settled=step - 1)
        await quiesce(engine)
    return training


async def begin_part(engine: Engine, layout: Layout) -> Training:
    """Commit the initial values of a part, of which no step is known to be on the other node."""
    training = Training(engine, layout)
    await training.open(must_exist=False)
    await training.stage_all()
    await engine.commit(training.job, 0, {0: b"0"}, None)
    return training


async def test_a_reader_gets_the_settled_step_and_the_newest_one_of_this_node_only_where_it_asks(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as engine:
        training = await begin_part(engine, PART)
        with pytest.raises(ConflictError, match="is at step 0 on this node, and no step is known to be on all of its"):
            await engine.step_readers.open(training.job)
        assert await read_step(engine, training.job, unsettled=True) == 0
        await training.step(settled=0)
        assert await read_step(engine, training.job) == 0
        engine.settle(training.job, 1)
        assert await read_step(engine, training.job) == 1
        with pytest.raises(ConflictError, match="step 2 of job 'job' cannot be settled: the newest step here is 1"):
            engine.settle(training.job, 2)


async def test_a_reader_that_waits_for_a_step_is_woken_when_it_is_settled(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await part_at(engine, PART, 1)
        changed = training.job.changed
        engine.settle(training.job, 1)
        assert changed.is_set()


async def test_a_job_with_all_ranks_on_one_node_is_settled_with_each_commit(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, Layout()).begin()
        await training.step()
        assert await read_step(engine, training.job) == 1
    async with opened(tmp_path) as engine:
        assert await read_step(engine, engine.jobs.job("job")) == 1


async def test_a_commit_records_that_the_one_before_it_is_settled(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await part_at(engine, PART, 3)
        engine.settle(training.job, 3)
        async with crashed(engine) as found:
            assert sorted(found.jobs.job("job").retained) == [2, 3]
            assert await read_step(found, found.jobs.job("job")) == 2
            assert await read_step(found, found.jobs.job("job"), unsettled=True) == 3


@pytest.mark.parametrize(("is_settled", "known"), [(True, 3), (False, 2)])
async def test_the_end_of_a_run_records_its_settled_step(tmp_path: Path, is_settled: bool, known: int) -> None:
    async with opened(tmp_path) as engine:
        training = await part_at(engine, PART, 3)
        if is_settled:
            engine.settle(training.job, 3)
        await engine.end_run(training.job)
    async with opened(tmp_path) as engine:
        assert await read_step(engine, engine.jobs.job("job")) == known
        # The run that goes on from step 3 has found that all nodes have it.
        training = await Training(engine, PART).open()
        engine.settle(training.job, 3)
        assert await read_step(engine, training.job) == 3


async def test_after_a_restart_a_snapshot_is_settled_only_if_all_nodes_are_known_to_have_written_it(
    tmp_path: Path,
) -> None:
    """Another node may be in the middle of its snapshot of step 4, and lose that step in a crash."""
    async with opened(tmp_path / "state") as engine:
        training = await part_at(engine, SNAPSHOTS, 5)
        engine.settle(training.job, 5)
        assert await read_step(engine, training.job) == 5
        await engine.end_run(training.job)
        async with crashed(engine) as found:
            assert sorted(found.jobs.job("job").retained) == [0, 2, 4]
            assert await read_step(found, found.jobs.job("job")) == 2


async def test_a_reader_waits_while_the_settled_step_is_overwritten_in_memory(tmp_path: Path) -> None:
    """The bytes of step 5 are those of step 6 now, which another node does not have yet."""
    async with opened(tmp_path) as engine:
        training = await part_at(engine, IN_MEMORY, 6)
        reading = asyncio.ensure_future(read_step(engine, training.job))
        await asyncio.sleep(0.02)
        assert not reading.done()
        with pytest.raises(DataLossError, match="step 5 of job 'job' cannot be read whole"):
            await engine.step_readers.open(training.job, 5)
        engine.settle(training.job, 6)
        assert await reading == 6


async def test_once_the_run_has_ended_a_reader_gets_the_settled_step_that_is_whole(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await part_at(engine, IN_MEMORY, 6)
        reading = asyncio.ensure_future(read_step(engine, training.job))
        await asyncio.sleep(0.02)
        await engine.end_run(training.job)
        assert await reading == 4
        # A run goes back to a step that is whole, and not to step 5.
        assert sorted(training.job.retained) == [2, 4, 5, 6]
        assert engine.steps_to_return_to(training.job) == [2, 4, 6]


async def test_a_roll_back_settles_no_step_that_it_gives_up(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await part_at(engine, PART, 3)
        engine.settle(training.job, 3)
        await engine.roll_back(training.job, 2)
        await training.step(settled=2)
        assert await read_step(engine, training.job) == 2
        async with crashed(engine) as found:
            assert await read_step(found, found.jobs.job("job")) == 2


async def test_readers_see_the_former_layout_until_the_next_one_is_settled(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await part_at(engine, PART, 2)
        engine.settle(training.job, 2)
        assert engine.jobs.settled_layout("job") is training.job
        spec = replace(PART.job(), layout="another")
        laid_out = await engine.lay_out(training.job, spec, 3)
        await engine.register(laid_out, [PART.group(name) for name in PART.groups])
        following = Training(engine, PART)
        following.job = laid_out
        await following.stage_all()
        await engine.commit(laid_out, 3, {0: b"3"}, 2)
        assert engine.jobs.job("job") is laid_out and engine.jobs.settled_layout("job") is training.job
        assert await read_step(engine, engine.jobs.settled_layout("job")) == 2
        engine.settle(laid_out, 3)
        assert engine.jobs.settled_layout("job") is laid_out
        await engine.end_run(laid_out)
    async with opened(tmp_path) as engine:
        assert await read_step(engine, engine.jobs.settled_layout("job")) == 3


async def test_a_kept_step_is_the_settled_one_by_default(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await part_at(engine, PART, 3)
        assert (await engine.kept_steps.keep(training.job, None, "settled")).newest == 2
        assert (await engine.kept_steps.keep(training.job, 3, "named")).newest == 3
    async with opened(tmp_path) as engine:
        for name, step in (("settled", 2), ("named", 3)):
            assert await read_step(engine, engine.kept_steps.find("job", name)) == step
