"""Several directories: bytes are spread by the devices' speeds, and files are known by labels, whatever their paths."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from storage.base import syscalls
from storage.base.errors import ConflictError, DataLossError, DeviceError, DiskFullError, NotFoundError
from storage.base.integrity import BLOCK_BYTES
from storage.engine import Engine
from storage.jobs.directories import adopt
from storage.tiers import nvme as nvme_module
from tests.unit.storage.builders import MIB, Fault, Layout, Training, engine_config, opened

LAYOUT = Layout(numels=(120_003, 17))


def config(tmp_path: Path, *names: str, **changes: Any) -> dict[str, Any]:
    return {"nvme_dirs": tuple(tmp_path / name for name in names), **changes}


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", BLOCK_BYTES)


async def test_bytes_are_spread_in_proportion_to_speed(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b", "c", nvme_budget_bytes=512 * MIB)) as engine:
        assert engine.nvme.files[0].size_bytes == 32 * MIB
        assert all(file.bandwidth is not None and file.bandwidth > 0 for file in engine.nvme.files), "measured"
        for file, bandwidth in zip(engine.nvme.files, (3e9, 1e9, 2e9), strict=True):
            file.bandwidth = bandwidth
        region = await engine.nvme.allocate(6 * MIB)
        shares = [file.used_bytes / region.nbytes for file in engine.nvme.files]
        assert shares == pytest.approx([3 / 6, 1 / 6, 2 / 6], abs=0.02)
        engine.nvme.free(region)
        assert engine.nvme.used_bytes == 0


async def test_where_the_budget_has_no_room_to_measure_all_count_the_same(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        assert all(file.bandwidth is None and file.size_bytes == 0 for file in engine.nvme.files)
        region = await engine.nvme.allocate(6 * MIB)
        assert [file.used_bytes for file in engine.nvme.files] == [3 * MIB, 3 * MIB]
        engine.nvme.free(region)


async def test_steps_are_whole_over_several_directories_and_after_a_restart_in_another_order(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        training = await Training(engine, LAYOUT).begin()
        for _ in range(3):
            await training.step()
        await training.assert_at(3)
        assert all(file.used_bytes > training.version_bytes // 4 for file in engine.nvme.files)
    (tmp_path / "b").rename(tmp_path / "moved")
    async with opened(tmp_path / "state", **config(tmp_path, "moved", "a")) as engine:
        training = await Training(engine, LAYOUT).open()
        await training.assert_goes_on_from(3)


async def test_a_directory_can_be_added_and_an_empty_one_left_out(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
    async with opened(tmp_path / "state", **config(tmp_path, "state", "new", nvme_budget_bytes=32 * MIB)) as engine:
        training = await Training(engine, LAYOUT).open()
        await training.step()
        await training.assert_at(2)
        assert engine.nvme.files[1].used_bytes > 0
        await engine.delete_job("job")
    async with opened(tmp_path / "state") as engine:
        await Training(engine, LAYOUT).begin()


async def test_a_missing_directory_with_committed_bytes_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        await Training(engine, LAYOUT).begin()
    with pytest.raises(
        ConflictError, match=rf"data\.2 holds committed bytes .* last {tmp_path}/b, is not among nvme_dirs"
    ):
        await Engine.open(engine_config(tmp_path / "state", **config(tmp_path, "a")))
    (tmp_path / "b" / "paramserver.json").unlink()
    with pytest.raises(ConflictError, match="any more; mount the right disk there"):
        await Engine.open(engine_config(tmp_path / "state", **config(tmp_path, "a", "b")))


async def test_the_directory_of_another_store_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "one", **config(tmp_path, "a", "b")):
        pass
    with pytest.raises(ConflictError, match=f"{tmp_path}/b belongs to another store"):
        await Engine.open(engine_config(tmp_path / "other", **config(tmp_path, "b")))
    with pytest.raises(ConflictError, match="twice"):
        await Engine.open(engine_config(tmp_path / "one", **config(tmp_path, "a", "a")))


async def test_a_data_directory_that_cannot_be_made_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match=rf"cannot make directory {tmp_path}/file/a: .*choose another --nvme-dir"):
        await Engine.open(engine_config(tmp_path / "state", **config(tmp_path, "file/a")))


async def test_two_stores_never_have_a_data_directory_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        await Training(engine, LAYOUT).begin()
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        in_use = f"directory {tmp_path}/a is in use by the daemon with pid {os.getpid()}"
        with pytest.raises(ConflictError, match=in_use):
            await Engine.open(engine_config(tmp_path / "copy", **config(tmp_path, "a", "b")))
        # The state directory of another store is refused as a data directory.
        with pytest.raises(ConflictError, match=f"directory {tmp_path}/state is in use"):
            await Engine.open(engine_config(tmp_path / "other", nvme_dirs=(tmp_path / "state",)))
    # The engines that were refused have released their locks.
    for name in ("a", "b", "copy"):
        os.close(syscalls.lock_file(tmp_path / name / "lock"))


async def test_an_engine_that_finds_a_data_file_too_short_lets_go_of_its_directories(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        await Training(engine, LAYOUT).begin()
    with (tmp_path / "a" / "data.1").open("r+b") as file:
        file.truncate(0)
    with pytest.raises(DataLossError, match=r"data\.1 does not match the catalog"):
        await Engine.open(engine_config(tmp_path / "state", **config(tmp_path, "a", "b")))
    for name in ("a", "b", "state"):
        os.close(syscalls.lock_file(tmp_path / name / "lock"))


async def test_a_copy_of_a_state_directory_is_known_and_can_take_the_place_of_its_original(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        training = await Training(engine, LAYOUT).begin()
        await training.step()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        training = await Training(engine, LAYOUT).open()
        await training.step()
    with pytest.raises(ConflictError, match=rf"{tmp_path}/a belongs to the original .* run `paramserver adopt`"):
        await Engine.open(engine_config(tmp_path / "copy", **config(tmp_path, "a", "b")))
    # The attempt has not changed the original, which still works after its state directory is renamed.
    (tmp_path / "state").rename(tmp_path / "renamed")
    async with opened(tmp_path / "renamed", **config(tmp_path, "a", "b")) as engine:
        training = await Training(engine, LAYOUT).open()
        await training.assert_at(2)
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "renamed", tmp_path / "copy")
    await adopt(tmp_path / "copy", [tmp_path / "a", tmp_path / "b"])
    async with opened(tmp_path / "copy", **config(tmp_path, "a", "b")) as engine:
        training = await Training(engine, LAYOUT).open()
        await training.assert_at(2)
        with pytest.raises(ConflictError, match="in use"):
            await adopt(tmp_path / "renamed", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ConflictError, match="belongs to the original"):
        await Engine.open(engine_config(tmp_path / "renamed", **config(tmp_path, "a", "b")))


async def test_a_copy_with_all_its_files_inside_is_a_store_of_its_own(tmp_path: Path) -> None:
    async with opened(tmp_path / "state") as engine:
        await (await Training(engine, LAYOUT).begin()).step()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    async with opened(tmp_path / "state") as engine, opened(tmp_path / "copy") as copy:
        for one in (engine, copy):
            training = await Training(one, LAYOUT).open()
            await training.step()
            await training.assert_at(2)


async def test_only_the_directories_of_a_copy_can_be_adopted(tmp_path: Path) -> None:
    async with opened(tmp_path / "one", **config(tmp_path, "a")), opened(tmp_path / "two", **config(tmp_path, "b")):
        pass
    with pytest.raises(ConflictError, match=f"{tmp_path}/b belongs to another store"):
        await adopt(tmp_path / "one", [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(NotFoundError, match="it is not a state directory"):
        await adopt(tmp_path / "a", [tmp_path / "b"])


async def test_a_crash_before_the_label_leaves_a_directory_that_can_be_used(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a")):
        pass
    label = json.loads((tmp_path / "a" / "paramserver.json").read_text())
    shutil.rmtree(tmp_path / "a")
    async with opened(tmp_path / "state", **config(tmp_path, "a")) as engine:
        await Training(engine, LAYOUT).begin()
    assert json.loads((tmp_path / "a" / "paramserver.json").read_text()) == label


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"store": 1}'])
async def test_a_damaged_label_is_refused(tmp_path: Path, text: str) -> None:
    async with opened(tmp_path / "state", **config(tmp_path, "a")):
        pass
    (tmp_path / "a" / "paramserver.json").write_text(text)
    with pytest.raises((ConflictError, DeviceError), match=r"paramserver\.json"):
        await Engine.open(engine_config(tmp_path / "state", **config(tmp_path, "a")))


async def test_what_one_full_disk_cannot_take_goes_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = syscalls.extend

    def extend(fd: int, size: int, length: int, path: Path) -> None:
        if path.parent.name == "a" and size + length > MIB:
            raise DiskFullError(f"cannot reserve {length} bytes in {path}: No space left on device")
        real(fd, size, length, path)

    monkeypatch.setattr(syscalls, "extend", extend)
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b")) as engine:
        region = await engine.nvme.allocate(8 * MIB)
        used = {file.path.parent.name: file.used_bytes for file in engine.nvme.files}
        assert used["a"] <= MIB and used["b"] >= 7 * MIB
        engine.nvme.free(region)
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        await training.assert_at(1)


@pytest.mark.parametrize("function", ["write_exact", "read_exact"])
async def test_a_device_whose_speed_cannot_be_measured_counts_as_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    fault = Fault(monkeypatch, function)
    fault.fail(DeviceError("input/output error"), when=(0).__eq__)
    async with opened(tmp_path / "state", **config(tmp_path, "a", "b", nvme_budget_bytes=512 * MIB)) as engine:
        assert "its speed could not be measured: input/output error" in caplog.text
        assert [file.bandwidth is None for file in engine.nvme.files] == [True, False]
        region = await engine.nvme.allocate(6 * MIB)
        assert [file.used_bytes for file in engine.nvme.files] == [3 * MIB, 3 * MIB]
        engine.nvme.free(region)
        training = await Training(engine, LAYOUT).begin()
        await training.step()
        await training.assert_at(1)
