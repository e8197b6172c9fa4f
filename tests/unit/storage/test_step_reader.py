"""A reader of a committed step sees all of it, bit for bit, whatever happens to the job, and frees its space."""

from __future__ import annotations

import asyncio
import operator
from functools import partial
from pathlib import Path

import pytest
import torch

from storage.base.errors import BudgetExceededError, ConflictError, DataLossError, DiskFullError, NotFoundError
from storage.base.shard import DType, Kind, TierName
from storage.steps.reader import StepReader
from tests.unit.storage.builders import MIB, Fault, Layout, Training, held, opened, quiesce, room_taken

LAYOUTS = {
    "nvme": Layout(precision=DType.BFLOAT16),
    "host": Layout(precision=DType.BFLOAT16, weights=TierName.HOST, moments=TierName.HOST),
    "snapshots": Layout(moments=TierName.HOST, every_steps=3),
    "memory": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=0),
    "weights": Layout(weights=TierName.HOST, moments=TierName.HOST, every_steps=2),
}
ROOMY = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 32 * MIB}


async def read(reader: StepReader, layout: Layout, fqn: str, kind: Kind, numel: int) -> torch.Tensor:
    data = b"".join([piece async for piece in reader.read(fqn, kind, 0, numel)])
    return torch.frombuffer(bytearray(data), dtype=layout.dtype(kind).torch)


async def assert_reads(reader: StepReader, training: Training) -> None:
    """Check that every tensor of every kind is that of torch after the reader's step."""
    layout = training.layout
    for (_, fqn, kind), expected in training.reference.states(reader.step).items():
        assert torch.equal(await read(reader, layout, fqn, kind, len(expected)), expected), f"{fqn} {kind}"


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_step_is_seen_whole_while_training_goes_on(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS[name]).begin()
        readers = []
        for step in range(1, 6):
            await training.step()
            if step % 2:
                readers.append(await engine.step_readers.open(training.job))
            for reader in readers:
                await assert_reads(reader, training)
        assert [reader.step for reader in readers] == [1, 3, 5]
        for reader in readers:
            reader.close()
        await training.step()
        await training.assert_at(6)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_space_is_free_again_when_the_last_reader_leaves(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS[name]).begin()
        await training.step()
        readers = [await engine.step_readers.open(training.job) for _ in range(2)]
        assert readers[0].nbytes == training.version_bytes
        for _ in range(3):
            await training.step()
        with_readers = engine.nvme.used_bytes
        readers[0].close()
        readers[0].close()
        assert engine.nvme.used_bytes == with_readers
        readers[1].close()
        assert engine.nvme.used_bytes == with_readers - training.version_bytes
        with pytest.raises(NotFoundError, match="reader of step 1 of job 'job' is closed"):
            await read(readers[1], training.layout, "block.0.weight.0", Kind.PARAM, 3)


async def test_it_stays_the_same_when_its_step_is_rolled_back_and_its_job_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["nvme"]).begin()
        await training.step()
        await training.step(settled=1)
        reader = await engine.step_readers.open(training.job)
        await engine.roll_back(training.job, 1)
        await training.step()
        await assert_reads(reader, training)
        await engine.delete_job("job")
        await assert_reads(reader, training)
        assert engine.nvme.used_bytes == reader.nbytes
        reader.close()


async def test_an_older_retained_step_can_be_read(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["nvme"]).begin()
        await training.step(settled=0)
        reader = await engine.step_readers.open(training.job, 0)
        await training.step()
        await assert_reads(reader, training)
        reader.close()
        with pytest.raises(NotFoundError, match="does not hold step 0; it holds: 2"):
            await engine.step_readers.open(training.job, 0)


async def test_what_was_overwritten_in_memory_is_data_loss_by_name(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["memory"]).begin()
        await training.step(settled=0)
        with pytest.raises(DataLossError, match=r"step 0 of job 'job' cannot be read whole: the bytes of job/block\.0"):
            await engine.step_readers.open(training.job, 0)


async def test_one_that_is_opened_during_a_commit_sees_one_step_or_the_other_whole(tmp_path: Path) -> None:
    for name in ("memory", "nvme"):
        async with opened(tmp_path / name, **ROOMY) as engine:
            training = await Training(engine, LAYOUTS[name]).begin()
            for turns in range(0, 60, 3):
                step = training.job.next_step
                await training.hand_over()
                committing = asyncio.ensure_future(training.commit(step))
                for _ in range(turns):
                    await asyncio.sleep(0)
                reader = await engine.step_readers.open(training.job)
                await committing
                assert reader.step in (step - 1, step)
                await assert_reads(reader, training)
                reader.close()
            await training.assert_at(training.job.next_step - 1)


# Layouts with bytes that are in host memory only, which a reader has to write to NVMe first.
IN_MEMORY = ("snapshots", "memory", "weights")


async def read_beside(training: Training, opened: list[int]) -> None:
    """Open one reader of the newest step after the other until cancelled, and check that each sees one whole step."""
    while True:
        before = training.job.newest
        reader = await training.engine.step_readers.open(training.job)
        try:
            assert before is not None and reader.step >= before
            opened.append(reader.step)
            if len(opened) % 5 == 0:
                await assert_reads(reader, training)
        finally:
            reader.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", LAYOUTS)
async def test_readers_that_are_opened_again_and_again_beside_commits_hold_nothing_at_the_end(
    tmp_path: Path, name: str
) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS[name]).begin()
        steps: list[int] = []
        training.reference.states(24)
        readers = [asyncio.ensure_future(read_beside(training, steps)) for _ in range(4)]
        for _ in range(24):
            await training.step()
        for reader in readers:
            reader.cancel()
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
        assert len(set(steps)) > 3


@pytest.mark.parametrize("name", IN_MEMORY)
async def test_one_that_fails_or_is_cancelled_half_way_releases_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write = Fault(monkeypatch, "write_exact")
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS[name]).begin()
        await training.step()
        before = engine.host.used_bytes
        for failing in range(40):
            write.fail(DiskFullError("no room"), partial(operator.eq, failing))
            try:
                reader = await engine.step_readers.open(training.job)
            except DiskFullError:
                assert all(account.is_balanced for account in await engine.accountant.take())
                continue
            reader.close()
            break
        write.heal()
        assert failing > 1
        for turns in range(60):
            await training.step()
            opening = asyncio.ensure_future(engine.step_readers.open(training.job))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                opening.result().close()
        await training.step()
        await quiesce(engine)
        assert engine.host.used_bytes == before


async def test_two_readers_and_a_snapshot_write_a_copy_once_and_the_next_update_goes_on(tmp_path: Path) -> None:
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["weights"]).begin()
        await training.step()
        written = engine.nvme.counters.bytes_written
        opening = [asyncio.ensure_future(engine.step_readers.open(training.job)) for _ in range(2)]
        await asyncio.sleep(0)
        # Step 2 is a snapshot that does not change the second group, so the snapshot and both readers claim its copies.
        await training.hand_over(training.layout.groups[:1])
        await training.commit(2)
        readers = await asyncio.gather(*opening)
        assert [reader.step for reader in readers] == [1, 1]
        assert training.job.snapshot is not None
        await asyncio.wait([training.job.snapshot])
        # The first group was written twice, at steps 1 and 2, and the second one once.
        of_a_group = training.version_bytes // 2
        assert engine.nvme.counters.bytes_written - written == 3 * of_a_group
        for reader in readers:
            reader.close()
        await training.hand_over()
        await training.commit(3)


async def test_a_fetch_that_waited_for_room_while_its_job_was_deleted_ends_and_frees_nothing_twice(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUTS["nvme"]).begin()
        await engine.end_run(training.job)
        with room_taken(engine):
            fetches = [
                asyncio.ensure_future(engine.pins.fetch(training.job, group, Kind.EXP_AVG))
                for group in training.layout.groups
            ]
            for _ in range(20):
                await asyncio.sleep(0)
            await engine.delete_job("job")
        outcomes = await asyncio.gather(*fetches, return_exceptions=True)
        assert all(isinstance(outcome, ConflictError) for outcome in outcomes), outcomes
        assert engine.nvme.used_bytes == 0
        # If an extent had been freed twice, two versions of this job would overlap.
        await (await Training(engine, LAYOUTS["nvme"]).begin()).step()


async def test_one_that_is_opened_while_its_job_is_deleted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes in host memory are on their way to NVMe for the reader when the job goes."""
    async with opened(tmp_path, **ROOMY) as engine:
        training = await Training(engine, LAYOUTS["memory"]).begin()
        await training.step()
        with held(monkeypatch, "write_exact") as go_on:
            opening = asyncio.ensure_future(engine.step_readers.open(training.job))
            while not engine.nvme.queue_depth:
                await asyncio.sleep(0.001)
            await engine.delete_job("job")
            go_on.set()
            with pytest.raises(DataLossError, match="the deletion of the job discarded the bytes of step 1"):
                await opening
        assert engine.nvme.used_bytes == 0


async def test_a_reader_for_which_there_is_no_room_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    layout = LAYOUTS["nvme"]
    async with opened(tmp_path / "measured", **ROOMY) as engine:
        version = (await Training(engine, layout).begin()).version_bytes
    async with opened(tmp_path / "small", nvme_budget_bytes=2 * version + version // 2) as engine:
        training = await Training(engine, layout).begin()
        with pytest.raises(BudgetExceededError, match="raise nvme_budget to at least"):
            await engine.step_readers.open(training.job)
        await training.step()
        await training.assert_at(1)
    async with opened(tmp_path / "enough", nvme_budget_bytes=3 * version) as engine:
        training = await Training(engine, layout).begin()
        reader = await engine.step_readers.open(training.job)
        for _ in range(3):
            await training.step()
        await assert_reads(reader, training)
        reader.close()


async def test_a_job_without_a_step_has_nothing_to_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        training = await Training(engine, LAYOUTS["nvme"]).open(must_exist=False)
        with pytest.raises(ConflictError, match="no committed step yet"):
            await engine.step_readers.open(training.job)
