"""If any system call of a step fails, the committed step stays readable, no byte leaks, and training can go on."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.base import syscalls
from storage.base.errors import BudgetExceededError, DeviceError, DiskFullError, StorageError
from storage.base.shard import DType, Kind, TierName
from storage.base.shown_sizes import shown_size
from storage.engine import Engine
from storage.tiers import threaded_io
from storage.tiers.contract import Region
from tests.unit.storage.builders import Fault, Layout, Training, engine_config, on_nvme, opened

ERRORS: list[StorageError] = [DiskFullError("the disk is full"), DeviceError("input/output error")]
# Two groups of two tiles each: a step makes so few calls that a test can fail each of them.
LAYOUT = Layout(numels=(80_000, 17), precision=DType.BFLOAT16)
SMALL: dict[str, Any] = {"host_budget_bytes": 20 << 20}


@pytest.mark.parametrize("error", ERRORS, ids=["full", "broken"])
@pytest.mark.parametrize("function", ["read_exact", "write_exact", "sync_data"])
@pytest.mark.parametrize("moments", [TierName.NVME, TierName.HOST])
async def test_each_call_of_a_step_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: StorageError, moments: TierName
) -> None:
    # Without coalescing each request is one call, so that the number of calls is the same in each step.
    monkeypatch.setattr(threaded_io, "COALESCED_BYTES", 0)
    layout = Layout(numels=LAYOUT.numels, precision=LAYOUT.precision, moments=moments)
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, layout).begin()
        await training.step()
        free_copies(engine)
        fault = Fault(monkeypatch, function)
        await training.step()
        calls_of_a_step = fault.calls
        assert calls_of_a_step > 0
        for number in range(calls_of_a_step):
            used = engine.nvme.used_bytes
            step = training.job.next_step
            free_copies(engine)
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
        # Another job may take the free bytes after the registration. So the file must grow during the step.
        taken = await engine.nvme.allocate(engine.nvme.files[0].path.stat().st_size - engine.nvme.used_bytes)
        engine.nvme.budget_bytes *= 2
        growth = Fault(monkeypatch, "extend")
        growth.fail(DiskFullError("cannot reserve"))
        with pytest.raises(DiskFullError, match="cannot reserve"):
            await training.step()
        growth.heal()
        await engine.roll_back(training.job, 0)
        await training.assert_goes_on_from(0)
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
        free_copies(engine)
        reads = Fault(monkeypatch, "read_exact")
        reads.fail(DeviceError("input/output error"))
        with pytest.raises(DeviceError, match="input/output error"):
            await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
        engine.pins.prefetch("owner", training.job, [("block.1", Kind.PARAM, 1.0)])
        while engine.queue.depth:
            await engine.nvme.sync()
        reads.heal()
        await training.assert_at(0)


async def test_a_file_truncated_behind_the_engine_is_an_error_of_the_shard_not_a_hang(tmp_path: Path) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        free_copies(engine)
        size = engine.nvme.files[0].path.stat().st_size
        with engine.nvme.files[0].path.open("r+b") as file:
            file.truncate(0)
        with pytest.raises(DeviceError, match=r"data\.0 ends before byte .*restore it"):
            await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
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


async def test_what_a_failed_sync_covered_is_read_back_and_written_elsewhere_before_its_commit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        await refuse_by_a_failed_sync(training, monkeypatch)
        doubtful = {slab: on_nvme(slab.versions[1]).extents for slab in training.job.slabs()}
        assert engine.nvme.problems == [
            f"{len(doubtful)} versions were not confirmed by the device, and will be written again"
        ]
        assert await training.commit(1)
        assert all(on_nvme(slab.versions[1]).extents != extents for slab, extents in doubtful.items())
        assert engine.nvme.problems == []
        await training.assert_at(1)
    await assert_reopens_at(tmp_path, LAYOUT, 1)


async def test_what_a_failed_sync_of_another_job_covered_is_written_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports lost bytes to one sync of a file, and the next one succeeds without them."""
    first_began, go_on, real, calls = threading.Event(), threading.Event(), syscalls.sync_data, itertools.count()

    def fail_first(fd: int, path: Path) -> None:
        if next(calls) == 0:
            first_began.set()
            assert go_on.wait(20)
            raise DeviceError("input/output error")
        real(fd, path)

    async with opened(tmp_path, host_budget_bytes=40 << 20, nvme_budget_bytes=64 << 20) as engine:
        layouts = [replace(LAYOUT, name=name) for name in ("other", "committed", "kept")]
        layouts[2] = replace(layouts[2], every_steps=0)
        other, committed, kept = [await Training(engine, layout).begin() for layout in layouts]
        await kept.step()
        for training in (other, committed):
            await training.hand_over()
            await training.finish_updates()
        before = {slab: on_nvme(slab.versions[1]).extents for t in (committed, kept) for slab in t.job.slabs()}
        monkeypatch.setattr(syscalls, "sync_data", fail_first)
        failing = asyncio.ensure_future(other.commit(1))
        await asyncio.to_thread(first_began.wait, 20)
        committing = asyncio.ensure_future(committed.commit(1))
        keeping = asyncio.ensure_future(engine.kept_steps.keep(kept.job, 1, "one"))
        # After this time both have begun to sync, and wait behind the sync that is going to fail.
        await asyncio.sleep(0.1)
        go_on.set()
        with pytest.raises(DeviceError, match="input/output error"):
            await failing
        assert await committing
        for job in (committed.job, await keeping):
            for slab in job.slabs():
                region = on_nvme(slab.versions[1])
                original = slab if slab in before else kept.job.slab(slab.key.group, slab.key.kind)
                assert not region.doubtful and region.extents != before[original]
        await committed.assert_at(1)
    await assert_reopens_at(tmp_path, layouts[1], 1)


async def test_a_commit_goes_on_where_the_failed_sync_of_another_job_has_renewed_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, host_budget_bytes=40 << 20, nvme_budget_bytes=64 << 20) as engine:
        other, committed = [await Training(engine, replace(LAYOUT, name=name)).begin() for name in ("other", "job")]
        for training in (other, committed):
            await training.hand_over()
            await training.finish_updates()
        real, calls = engine.backing.copy_to_durable, Counter[str]()
        begun: list[str] = []
        commit_came, others_are_renewed = asyncio.Event(), asyncio.Event()

        async def copy_to_durable(region: Region, view: memoryview | None = None) -> Region:
            """Let the commit come to a version while the failed sync renews it, and go on when that has renewed all."""
            calls[region.label] += 1
            if region.label in begun:
                commit_came.set()
                await others_are_renewed.wait()
            elif region.label.startswith("job/") and not begun:
                begun.append(region.label)
                await commit_came.wait()
            return await real(region, view)

        monkeypatch.setattr(engine.backing, "copy_to_durable", copy_to_durable)
        Fault(monkeypatch, "sync_data").fail(DeviceError("input/output error"), when=(0).__eq__)
        failing = asyncio.ensure_future(other.commit(1))
        while not begun:
            await asyncio.sleep(0)
        committing = asyncio.ensure_future(committed.commit(1))
        with pytest.raises(DeviceError, match="input/output error"):
            await failing
        others_are_renewed.set()
        assert await committing
        assert [label for label, count in calls.items() if count > 1] == begun
        slabs = [*other.job.slabs(), *committed.job.slabs()]
        assert engine.nvme.used_bytes == sum(region.nbytes for slab in slabs for region in slab.versions.values())
        await committed.assert_at(1)
    await assert_reopens_at(tmp_path, committed.layout, 1)


async def test_the_budget_is_kept_by_allocated_blocks_whatever_the_file_system_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, nvme_budget_bytes=96 << 20, **SMALL) as engine:
        training = await Training(engine, LAYOUT).begin()
        real = syscalls.allocated_bytes
        # This simulates a file system that allocates two blocks for each block of a file.
        monkeypatch.setattr(syscalls, "allocated_bytes", lambda fd: 2 * real(fd))
        size = engine.nvme.files[0].size_bytes
        with pytest.raises(
            BudgetExceededError, match=f"nvme_budget {shown_size(engine.nvme.budget_bytes)}: .* occupy all but 0 B"
        ):
            await engine.nvme.allocate(engine.nvme.budget_bytes - engine.nvme.used_bytes)
        assert engine.nvme.files[0].size_bytes == size
        await training.step()
        await training.assert_at(1)


async def refuse_by_a_failed_sync(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train step 1, free its copies, and make its first data sync fail, which must refuse the step."""
    await training.hand_over()
    await training.finish_updates()
    free_copies(training.engine)
    fault = Fault(monkeypatch, "sync_data")
    fault.fail(DeviceError("input/output error"), when=(0).__eq__)
    with pytest.raises(DeviceError, match="input/output error"):
        await training.commit(1)


def free_copies(engine: Engine) -> None:
    """Drop the host copies, so that the next reads go to the disk."""
    for slab in (slab for job in engine.jobs.by_name.values() for slab in job.slabs()):
        if not slab.at_home_in_host:
            engine.host_cache.free_copy(slab)


async def assert_reopens_at(state_dir: Path, layout: Layout, step: int) -> None:
    async with opened(state_dir, **SMALL) as engine:
        again = await Training(engine, layout).open()
        assert again.job.newest == step
        await again.assert_at(step)
