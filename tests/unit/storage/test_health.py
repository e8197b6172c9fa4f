"""A device that does not answer: calls raise and name it, its extents are not reused, and work goes on afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from storage.base.errors import DeviceStuckError
from storage.base.shard import Kind
from tests.unit.storage.builders import Layout, Training, held, opened

LAYOUT = Layout(numels=(10_000, 17))
TIMEOUT = 1.0


async def free_copies(training: Training) -> None:
    for slab in training.job.slabs():
        training.engine.host_cache.free_copy(slab)


async def recovered(training: Training) -> None:
    while training.engine.backing.problems_of(training.engine.nvme):
        await asyncio.sleep(0.01)


async def test_a_stuck_read_ends_the_fetch_and_names_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path, device_timeout_seconds=TIMEOUT) as engine:
        training = await Training(engine, LAYOUT).begin()
        await free_copies(training)
        with held(monkeypatch, "read_exact"):
            with pytest.raises(
                DeviceStuckError, match=rf"{tmp_path}/data\.0: the device has not answered for [\d.]+ s"
            ):
                await engine.pins.fetch(training.job, "block.0", Kind.PARAM)
            problems = engine.backing.problems_of(engine.nvme)
            assert [problem.split(":")[0] for problem in problems] == [f"{tmp_path}/data.0"]
            # This raises at once, because the device is known to be stuck.
            with pytest.raises(DeviceStuckError):
                await engine.pins.fetch(training.job, "block.1", Kind.PARAM)
        await recovered(training)
        assert "answers again" in caplog.text
        await training.assert_goes_on_from(0)


async def test_a_stuck_sync_ends_the_commit_which_goes_on_when_the_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, device_timeout_seconds=TIMEOUT) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.hand_over()
        with held(monkeypatch, "sync_data"):
            with pytest.raises(DeviceStuckError):
                await training.commit(1)
            assert training.job.newest == 0
            with pytest.raises(DeviceStuckError, match="has not answered"):
                await training.commit(1)
        await recovered(training)
        while training.job.pending is not None:
            await asyncio.sleep(0.01)
        assert training.job.newest == 1 and training.job.durable == {1}
        await training.assert_at(1)


async def test_a_stuck_write_cannot_reach_what_is_written_to_its_place_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update's extents and buffers are not freed until the device has answered."""
    async with opened(tmp_path, device_timeout_seconds=TIMEOUT) as engine:
        training = await Training(engine, LAYOUT).begin()
        with held(monkeypatch, "write_exact"):
            await training.hand_over()
            with pytest.raises(DeviceStuckError):
                await training.commit(1)
            used = engine.nvme.used_bytes
            rolling_back = asyncio.ensure_future(engine.roll_back(training.job, 0))
            with pytest.raises(DeviceStuckError):
                await rolling_back
            assert engine.nvme.used_bytes == used
        await recovered(training)
        while training.job.pending is not None:
            await asyncio.sleep(0.01)
        newest = training.job.newest
        assert newest is not None
        await training.assert_goes_on_from(newest)
