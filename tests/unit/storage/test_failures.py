"""Whatever system call of a step fails: the committed step stays readable, no byte leaks, and training can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.engine import Engine
from storage.errors import DeviceError, DiskFullError, StorageError
from storage.shard import DType, Kind, TierName
from storage.tiers import threaded_io
from tests.unit.storage.builders import Fault, Layout, Training, engine_config, opened

ERRORS: list[StorageError] = [DiskFullError("the disk is full"), DeviceError("input/output error")]
# Small, so that each of a step's calls can be failed: two groups of two tiles each.
LAYOUT = Layout(numels=(10_000, 17), precision=DType.BFLOAT16)
SMALL: dict[str, Any] = {"host_budget_bytes": 2560 << 10}


@pytest.mark.parametrize("error", ERRORS, ids=["full", "broken"])
@pytest.mark.parametrize("function", ["read_exact", "write_exact", "sync_data"])
@pytest.mark.parametrize("moments", [TierName.NVME, TierName.HOST])
async def test_each_call_of_a_step_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: StorageError, moments: TierName
) -> None:
    # A call for each request, so that their number is the same in each step.
    monkeypatch.setattr(threaded_io, "COALESCED_BYTES", 0)
    layout = Layout(numels=LAYOUT.numels, precision=LAYOUT.precision, moments=moments)
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        drop_copies(engine)
        fault = Fault(monkeypatch, function)
        await training.step()
        calls_of_a_step = fault.calls
        assert calls_of_a_step > 0
        for number in range(calls_of_a_step):
            used = engine.nvme.used_bytes
            step = training.job.next_step
            drop_copies(engine)
            fault.fail(error, when=number.__le__)
            with pytest.raises(StorageError, match=str(error)):
                await training.step()
            fault.heal()
            await engine.roll_back(training.job, step - 1)
            assert engine.nvme.used_bytes == used
            await training.assert_at(step - 1)
            await training.step()
        await training.assert_at(calls_of_a_step + 2)
    await assert_reopens_at(tmp_path, layout, calls_of_a_step + 2)


async def test_a_full_disk_while_the_file_grows_leaves_the_committed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        # Bytes that another job may take between the registration and the step: the file must grow in the step.
        taken = await engine.nvme.allocate(engine.nvme.files[0].path.stat().st_size - engine.nvme.used_bytes)
        engine.nvme.budget_bytes *= 2
        growth = Fault(monkeypatch, "extend")
        growth.fail(DiskFullError("cannot reserve"))
        with pytest.raises(DiskFullError, match="cannot reserve"):
            await training.step()
        growth.heal()
        await engine.roll_back(training.job, 0)
        await training.assert_at(0)
        await training.step()
        await training.assert_at(1)
        engine.nvme.free(taken)


async def test_initial_values_that_cannot_be_written_can_be_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = Training(engine, LAYOUT)
        await training.open(must_exist=False)
        writes = Fault(monkeypatch, "write_exact")
        writes.fail(DiskFullError("the disk is full"), when=lambda n: n == 2)
        with pytest.raises(DiskFullError):
            await training.stage_all()
        writes.heal()
        await training.stage_all()
        await training.commit(0)
        await training.assert_at(0)


async def test_a_read_that_fails_is_raised_by_the_fetch_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        drop_copies(engine)
        reads = Fault(monkeypatch, "read_exact")
        reads.fail(DeviceError("input/output error"))
        with pytest.raises(DeviceError, match="input/output error"):
            await engine.fetch(training.job, "block.0", Kind.PARAM)
        engine.prefetch("owner", training.job, [("block.1", Kind.PARAM, 1.0)])
        while engine.queue.depth:
            await engine.nvme.sync()
        reads.heal()
        await training.assert_at(0)


async def test_a_file_truncated_behind_the_engine_is_an_error_of_the_shard_not_a_hang(tmp_path: Path) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        drop_copies(engine)
        size = engine.nvme.files[0].path.stat().st_size
        with engine.nvme.files[0].path.open("r+b") as file:
            file.truncate(0)
        with pytest.raises(DeviceError, match=r"data\.0 ends before byte .*restore it"):
            await engine.fetch(training.job, "block.0", Kind.PARAM)
        with engine.nvme.files[0].path.open("r+b") as file:
            file.truncate(size)


@pytest.mark.parametrize("function", ["sync_directory", "create_shared_memory", "open_data_file"])
async def test_an_engine_that_cannot_open_lets_go_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    fault = Fault(monkeypatch, function)
    fault.fail(DeviceError("it cannot be done"))
    with pytest.raises(DeviceError, match="it cannot be done"):
        await Engine.open(engine_config(tmp_path))
    fault.heal()
    async with opened(tmp_path, **SMALL) as engine:
        await Training(engine, LAYOUT).begin()


def drop_copies(engine: Engine) -> None:
    """So that the next reads go to the disk."""
    for slab in (slab for job in engine.jobs.values() for slab in job.slabs()):
        if not slab.at_home_in_host:
            engine.residents.detach(slab)


async def assert_reopens_at(state_dir: Path, layout: Layout, step: int) -> None:
    async with opened(state_dir, **SMALL) as engine:
        again = await Training(engine, layout).open()
        assert again.job.newest == step
        await again.assert_at(step)
