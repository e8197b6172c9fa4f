"""After a failed sync, versions are written anew from copies in memory, whichever job's they are; others are lost."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.base import syscalls
from storage.base.errors import DataLossError, DeviceError
from storage.base.shard import DType, TierName
from storage.engine import Engine
from tests.unit.storage.builders import Fault, Layout, Training, on_nvme, opened, quiesce, room_taken
from tests.unit.storage.test_puts import Table

ROOM: dict[str, Any] = {"host_budget_bytes": 24 << 20, "nvme_budget_bytes": 64 << 20}


@contextmanager
def failing_sync(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[None]:
    """Make the next data sync fail, and lose all bytes that no sync has covered; see that one is made in the block."""
    real, calls = syscalls.sync_data, itertools.count()

    def fail_first(fd: int, path: Path) -> None:
        if next(calls) == 0:
            lose(engine)
            raise DeviceError("cannot sync: Input/output error")
        real(fd, path)

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "sync_data", fail_first)
        yield
        assert next(calls)


def lose(engine: Engine) -> None:
    """Overwrite the bytes of all versions that the catalog does not name, as a device that has lost their writes."""
    with engine.nvme.files[0].path.open("r+b") as file:
        for slab in [slab for job in engine.jobs.by_name.values() for slab in job.slabs()]:
            for version, region in slab.versions.items():
                for extent in on_nvme(region).extents if version not in slab.recorded else ():
                    file.seek(extent.offset)
                    file.write(b"\xa5" * extent.nbytes)


@asynccontextmanager
async def two_pending(state_dir: Path) -> AsyncIterator[tuple[Engine, Training, Training]]:
    """Yield an engine and two jobs whose step 1 is written, and neither synced nor committed."""
    async with opened(state_dir, **ROOM) as engine:
        layout = Layout(name="bystander", precision=DType.BFLOAT16)
        bystander = await Training(engine, layout).begin()
        other = await Training(engine, replace(layout, name="other")).begin()
        for training in (bystander, other):
            await training.hand_over()
            await training.finish_updates()
        yield engine, bystander, other


async def assert_reopens_at_1(state_dir: Path, layout: Layout) -> None:
    async with opened(state_dir, **ROOM) as engine:
        again = await Training(engine, layout).open()
        assert again.job.newest == 1
        await again.assert_at(1)


async def test_a_snapshot_job_is_durable_again_with_the_next_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that no later step writes has its only certain bytes in host memory, for as long as the job lives."""
    async with opened(tmp_path) as engine:
        with failing_sync(monkeypatch, engine):
            table = await Table(engine, TierName.HOST, every_steps=2).begin()
            reader = await engine.step_readers.open(table.job)
            await quiesce(engine)
        await table.assert_reads(reader)
        await table.step("b")
        await table.put("b", 2)
        with pytest.raises(DeviceError, match="Input/output error"):
            await table.commit("b")
        await table.commit("b")
        await quiesce(engine)
        assert table.job.durable == {2}
        assert engine.nvme.problems == []
        # The reader's step is not in host memory any more.
        await table.step("a", "b", "c")
        await table.assert_reads(reader)
        reader.close()
        expected = table.expected
    async with opened(tmp_path) as engine:
        table = await Table(engine, TierName.HOST, every_steps=2).open()
        table.expected = expected
        assert table.job.newest == 2
        await table.assert_at(2)


async def test_a_sync_that_fails_for_one_job_costs_another_one_nothing_that_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pending(tmp_path) as (engine, bystander, other):
        with failing_sync(monkeypatch, engine), pytest.raises(DeviceError, match="Input/output error"):
            await other.commit(1)
        # The copies may be evicted from here on, because their versions were written anew when the sync had failed.
        with room_taken(engine, later_than=-1):
            assert all(slab.current_copy is None for slab in bystander.job.slabs())
            assert await bystander.commit(1)
        await bystander.assert_at(1)
    await assert_reopens_at_1(tmp_path, bystander.layout)


async def test_what_cannot_be_written_anew_at_once_is_written_anew_by_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_pending(tmp_path) as (engine, bystander, other):
        writes = Fault(monkeypatch, "write_exact")
        writes.fail(DeviceError("cannot write: Input/output error"))
        with failing_sync(monkeypatch, engine), pytest.raises(DeviceError, match="cannot sync"):
            await other.commit(1)
        assert "could not be written again yet: cannot write" in caplog.text
        writes.heal()
        assert await bystander.commit(1)
    await assert_reopens_at_1(tmp_path, bystander.layout)


async def test_a_kept_step_is_written_anew_from_the_copy_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine, every_steps=0).begin()
        with failing_sync(monkeypatch, engine), pytest.raises(DeviceError, match="Input/output error"):
            await engine.kept_steps.keep(table.job, 0, "first")
        await engine.kept_steps.keep(table.job, 0, "first")
    async with opened(tmp_path) as engine:
        await table.assert_reads(await engine.step_readers.open(engine.kept_steps.find("table", "first")))


async def test_bytes_without_a_copy_stay_lost_and_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_pending(tmp_path) as (engine, bystander, other):
        with (
            room_taken(engine, later_than=-1),
            failing_sync(monkeypatch, engine),
            pytest.raises(DeviceError, match="Input/output error"),
        ):
            await other.commit(1)
        with pytest.raises(
            DataLossError,
            match=r"bystander/block\.\d/\w+ at step 1: the device has lost these bytes \(block.*\), .* no memory has a "
            r"copy of them.* Check the device, and go back to a durable step \(0\)",
        ):
            await bystander.commit(1)
        await engine.roll_back(bystander.job, 0)
        await bystander.assert_goes_on_from(0)


async def test_a_client_heals_a_lost_tensor_by_putting_it_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        table = await Table(engine, every_steps=2).begin()
        await quiesce(engine)
        await table.step("a")
        with room_taken(engine, later_than=-1), failing_sync(monkeypatch, engine):
            await table.step()
            await quiesce(engine)
        await table.step("b")
        with pytest.raises(DeviceError, match="Input/output error"):
            await table.step("b")
        # The snapshot of step 4 needs the bytes that only the device had.
        await table.commit("b")
        await table.step("b")
        await table.put("a", 6)
        with pytest.raises(DataLossError, match=r"group of a/param at step 1: .* go back to a durable step \(0\)"):
            await table.commit("a")
        await table.commit("a")
        await quiesce(engine)
        assert table.job.durable == {6}
        expected = table.expected
    async with opened(tmp_path) as engine:
        table = await Table(engine, every_steps=2).open()
        table.expected = expected
        await table.assert_at(6)
