"""No step is called durable while a path of the store does not lead to the file that is open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.base.errors import DeviceError
from tests.unit.storage.builders import Layout, Training, opened, quiesce
from tests.unit.storage.crashes import assert_survives_a_crash

FILES = ["data.0", "lock", "catalog.sqlite", "catalog.sqlite-wal"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_replaced", [False, True], ids=["away", "replaced"])
async def test_nothing_is_committed_while_a_file_is_not_in_its_place(
    tmp_path: Path, name: str, is_replaced: bool
) -> None:
    path, away = tmp_path / "state" / name, tmp_path / name
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, Layout()).begin()
        await training.hand_over()
        path.rename(away)
        if is_replaced:
            shutil.copy(away, path)
        with pytest.raises(DeviceError, match=rf"{path} does not lead to the file that this daemon has open any more"):
            await training.commit(1)
        with pytest.raises(DeviceError, match=str(path)):
            await engine.kept_steps.keep(training.job, 0, "first")
        # Reads use the file that is open.
        await training.assert_at(0, as_of=0)
        away.rename(path)
        assert await training.commit(1)
        await assert_survives_a_crash(training, 1)


async def test_a_removed_file_is_noticed_in_each_directory(tmp_path: Path) -> None:
    other = tmp_path / "other"
    async with opened(tmp_path / "state", nvme_dirs=[tmp_path / "state", other], nvme_budget_bytes=128 << 20) as engine:
        training = await Training(engine, Layout()).begin()
        for name in ("lock", "data.1"):
            (other / name).rename(other / "away")
            with pytest.raises(DeviceError, match=str(other / name)):
                await training.step()
            (other / "away").rename(other / name)
            await engine.pending_steps.abandon(training.job)
        await training.step()


async def test_a_snapshot_is_not_durable_while_the_directory_is_away(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with opened(state) as engine:
        training = await Training(engine, Layout(every_steps=2)).begin()
        await quiesce(engine)
        state.rename(tmp_path / "away")
        await training.step()
        await training.step()
        await quiesce(engine)
        assert training.job.durable == {0}
        (tmp_path / "away").rename(state)
        await training.step()
        await training.hand_over()
        with pytest.raises(DeviceError, match=f"{state / 'lock'} does not lead"):
            await training.commit(4)
        await training.commit(4)
        await quiesce(engine)
        await assert_survives_a_crash(training, 4)


async def test_a_store_that_closes_leaves_the_files_of_another_store_that_is_at_its_path(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with opened(tmp_path / "state") as former:
        await Training(former, Layout()).begin()
        state.rename(tmp_path / "away")
        latter_is_open = opened(state)
        latter = await latter_is_open.__aenter__()
        training = await Training(latter, Layout()).begin()
        await training.step()
    # A step that is in the log of the catalog only would be lost with the log.
    assert (state / "catalog.sqlite-wal").stat().st_size > 0
    await assert_survives_a_crash(training, 1)
    await latter_is_open.__aexit__(None, None, None)
