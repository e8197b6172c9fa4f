"""Jobs of many groups: the cost of an operation grows with the slabs that it changes, not with all slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.memory.gathering import Gathering, TensorRange
from storage.state.versions import Job
from storage.tiers.base import PAGE_BYTES
from tests.unit.storage.builders import MIB, check_tally, opened
from tests.unit.storage.work import counted

SHARD = 16
FEW, MANY = 50, 200
ROOM = {"host_budget_bytes": 16 * MIB, "nvme_budget_bytes": 64 * MIB}


def spec(count: int, every_steps: int = 1) -> JobSpec:
    """Return a job with one tensor in `count` shards, each of them in a group of its own."""
    whole = ParameterSpec(fqn="whole", shape=(count * SHARD,), dtype=DType.FLOAT32, trainable=False)
    return JobSpec(
        name=f"of {count}",
        world_size=1,
        local_ranks=1,
        parameters=(whole,),
        durability=Durability(every_steps=every_steps),
    )


def group(number: int, placement: TierName) -> GroupSpec:
    shard = Shard(fqn="whole", offset=number * SHARD, numel=SHARD, group_offset=0)
    slab = SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=placement)
    return GroupSpec(name=str(number), numel=SHARD, shards=(shard,), slabs=(slab,))


async def begin(engine: Engine, count: int, placement: TierName = TierName.NVME, every_steps: int = 1) -> Job:
    """Open the job, and commit step 0, in which element i of the tensor is i."""
    job = await engine.open_job(spec(count, every_steps), may_exist=True, must_exist=False)
    await engine.register(job, [group(n, placement) for n in range(count)])
    for number in range(count):
        pin = await engine.pins.stage(job, str(number), Kind.PARAM)
        values = torch.arange(number * SHARD, (number + 1) * SHARD)
        engine.host.tensor(pin.arena_range, DType.FLOAT32, SHARD)[:] = values
        await engine.pins.publish(pin)
    await engine.commit(job, 0, {}, 0)
    return job


async def put_one(engine: Engine, job: Job, number: int, value: float) -> None:
    """Commit one more step, which sets one shard to a value."""
    step = job.next_step
    range_ = await engine.pending_steps.allocate_put(job, step, str(number), Kind.PARAM)
    engine.host.tensor(range_, DType.FLOAT32, SHARD)[:] = value
    await engine.pending_steps.put(job, step, str(number), Kind.PARAM, range_)
    await engine.commit(job, step, {}, step)


async def whole(engine: Engine, job: Job, count: int) -> torch.Tensor:
    """Return the tensor as a reader of the newest step reads it."""
    reader = await engine.step_readers.open(job)
    range_ = await engine.step_readers.load(
        job, count * SHARD * 4, lambda view: reader.fill("whole", Kind.PARAM, 0, count * SHARD, view)
    )
    values = engine.host.tensor(range_, DType.FLOAT32, count * SHARD).clone()
    engine.scratch.free(range_)
    reader.close()
    return values


async def lines_of(engine: Engine, job: Job, work: Callable[[Engine, Job], Awaitable[object]]) -> int:
    with counted() as counter:
        await work(engine, job)
    return counter.lines


async def update_one(engine: Engine, job: Job) -> None:
    await put_one(engine, job, 7, 1.0)


async def register_one(engine: Engine, job: Job) -> None:
    await engine.register(job, [job.group("7").spec])


async def describe_one(engine: Engine, job: Job) -> None:
    await engine.reader.describe(job, "whole", Kind.PARAM, 7 * SHARD, SHARD)


async def roll_back_one(engine: Engine, job: Job) -> None:
    step = job.next_step
    range_ = await engine.pending_steps.allocate_put(job, step, "7", Kind.PARAM)
    await engine.pending_steps.put(job, step, "7", Kind.PARAM, range_)
    assert job.newest is not None
    await engine.roll_back(job, job.newest)


@pytest.mark.parametrize("placement", [TierName.NVME, TierName.HOST])
@pytest.mark.parametrize("work", [update_one, register_one, describe_one, roll_back_one])
async def test_what_concerns_one_group_costs_the_same_among_four_times_as_many(
    tmp_path: Path, work: Callable[[Engine, Job], Awaitable[object]], placement: TierName
) -> None:
    lines = []
    for count in (FEW, MANY):
        async with opened(tmp_path / str(count), **ROOM) as engine:
            job = await begin(engine, count, placement)
            # The first call also handles everything that was staged, so it is not counted.
            await work(engine, job)
            lines.append(await lines_of(engine, job, work))
    # The numbers differ a little, because tasks wait for threads more or less often.
    assert lines[1] < 1.5 * lines[0]


async def read_whole(engine: Engine, job: Job) -> None:
    count = job.spec.parameters[0].shape[0] // SHARD
    assert torch.equal(await whole(engine, job, count), torch.arange(count * SHARD, dtype=torch.float32))


async def read_newest(engine: Engine, job: Job) -> None:
    numel = job.spec.parameters[0].shape[0]
    await engine.reader.describe(job, "whole", Kind.PARAM, 0, numel)
    data = b"".join([piece async for piece in engine.reader.read(job, "whole", Kind.PARAM, 0, numel)])
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), torch.arange(numel).float())


async def delete(engine: Engine, job: Job) -> None:
    await engine.delete_job(job.spec.name)


@pytest.mark.parametrize("work", [read_whole, read_newest, delete])
async def test_what_concerns_all_shards_is_linear_in_them(
    tmp_path: Path, work: Callable[[Engine, Job], Awaitable[object]]
) -> None:
    """A read of one tensor with very many shards is linear. It was quadratic once, and blocked the event loop."""
    lines = []
    for count in (FEW, MANY):
        async with opened(tmp_path / str(count), **ROOM) as engine:
            job = await begin(engine, count)
            lines.append(await lines_of(engine, job, work))
    assert lines[1] < 1.5 * (MANY / FEW) * lines[0]


@pytest.mark.parametrize(
    ("placement", "every_steps"),
    [(TierName.NVME, 1), (TierName.HOST, 1), (TierName.HOST, 2), (TierName.NVME, 0), (TierName.HOST, 0)],
)
async def test_a_few_of_many_groups_change_and_all_are_right_through_restarts(
    tmp_path: Path, placement: TierName, every_steps: int
) -> None:
    expected = torch.arange(MANY * SHARD, dtype=torch.float32)
    async with opened(tmp_path, **ROOM) as engine:
        job = await begin(engine, MANY, placement, every_steps)
        check_tally(job)
        for step, number in enumerate((3, 50, 3, 199), start=1):
            await put_one(engine, job, number, -step)
            expected[number * SHARD : (number + 1) * SHARD] = -step
            assert torch.equal(await whole(engine, job, MANY), expected)
            check_tally(job)
        # The next commit looks at the slabs in `changed` only: those that were put, and those that readers had written
        # to NVMe.
        if placement is TierName.NVME:
            assert len(job.tally.changed) <= 2
    if every_steps:
        async with opened(tmp_path, **ROOM) as engine:
            job = engine.jobs.job(f"of {MANY}")
            check_tally(job)
            assert len(job.tally.changed) <= 2
            assert torch.equal(await whole(engine, job, MANY), expected)
            await engine.delete_job(job.spec.name)
            assert engine.nvme.used_bytes == 0


async def test_what_the_budgets_must_hold_is_that_of_all_slabs(tmp_path: Path) -> None:
    """The engine keeps the sums as slabs change; the test compares them with sums over all slabs."""
    async with opened(tmp_path, **ROOM) as engine:
        job = await begin(engine, FEW)
        # The committed version is there already. The pending version of each slab needs one more page.
        assert engine.admission._bytes_of_next_steps(engine.nvme) == FEW * PAGE_BYTES
        assert Counter(job.tally.passing) == {PAGE_BYTES: FEW} and job.tally.home_bytes == 0
        await put_one(engine, job, 3, 1.0)
        assert engine.admission._bytes_of_next_steps(engine.nvme) == FEW * PAGE_BYTES
        await engine.register(job, [group(n, TierName.HOST) for n in range(10)])
        assert job.tally.home_bytes == 10 * PAGE_BYTES and len(job.tally.passing) == FEW - 10
        check_tally(job)


async def test_ranges_that_are_gathered_equal_those_that_are_read_one_by_one(tmp_path: Path) -> None:
    """The ranges are in one shard or in several, in any order, some of them repeated. Each begins at 16 * n bytes."""
    async with opened(tmp_path, **ROOM) as engine:
        job = await begin(engine, FEW)
        reader = await engine.step_readers.open(job)
        await put_one(engine, job, 3, 1.0)
        ranges = [
            TensorRange("whole", Kind.PARAM, *r) for r in ((50, 3), (0, 1), (10, 100), (799, 1), (3, 17), (50, 3))
        ]
        gathering = await Gathering.of(job, ranges)
        gathered = await engine.step_readers.load(job, gathering.nbytes, lambda view: reader.gather(gathering, view))
        stored, at = engine.host.tensor(gathered, DType.FLOAT32, gathering.nbytes // 4), 0
        for range_ in ranges:
            expected = torch.arange(range_.offset, range_.offset + range_.numel, dtype=torch.float32)
            assert torch.equal(stored[at : at + range_.numel], expected)
            at = -(-(at + range_.numel) // 4) * 4
        engine.scratch.free(gathered)
        reader.close()
