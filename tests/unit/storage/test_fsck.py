"""A state directory is checked without a daemon: what is whole passes, damage is named, and nothing changes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from storage import fsck
from storage.base.errors import ConflictError, DataLossError, DeviceError, NotFoundError
from storage.base.shard import DType, Kind
from storage.fsck import StateCheck, check_state
from storage.tiers.extents import Extent
from tests.unit.storage.builders import MIB, Layout, Training, on_nvme, opened

ROOMY = {"host_budget_bytes": 8 * MIB, "nvme_budget_bytes": 64 * MIB}


def checked(state_dir: Path, *nvme_dirs: Path) -> StateCheck:
    *_, result = check_state(state_dir, nvme_dirs)
    return result


async def stored(state_dir: Path, **config: object) -> tuple[int, Path, int]:
    """Store a job with a kept step; return the used bytes, a data file, and where the file has moments of block.1."""
    async with opened(state_dir, **ROOMY | config) as engine:
        training = await Training(engine, Layout(precision=DType.BFLOAT16)).begin()
        await training.step()
        await engine.kept_steps.keep(training.job, 1, "one")
        await training.step()
        extent = on_nvme(training.job.slab("block.1", Kind.EXP_AVG).versions[2]).extents[0]
        files = {file.number: file.path for file in engine.nvme.files}
        return engine.nvme.used_bytes, files[extent.file], extent.offset


async def test_a_whole_store_passes_and_no_data_file_changes(tmp_path: Path) -> None:
    used, file, _ = await stored(tmp_path / "state")
    before = file.read_bytes(), file.stat().st_mtime_ns
    result = checked(tmp_path / "state")
    assert (result.jobs, result.kept_steps, result.problems) == (1, 1, [])
    assert result.verified_bytes == result.total_bytes == used
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    async with opened(tmp_path / "state", **ROOMY) as engine:
        await (await Training(engine, Layout(precision=DType.BFLOAT16)).open()).assert_at(2)


async def test_a_damaged_block_is_named_with_its_parameters(tmp_path: Path) -> None:
    used, path, offset = await stored(tmp_path / "state")
    with path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"damage")
    result = checked(tmp_path / "state")
    (problem,) = result.problems
    assert problem.startswith("job/block.1/exp_avg at step 2: bytes 0 to ") and "(block.1.weight.0" in problem
    assert result.verified_bytes == used


async def test_a_file_that_is_too_short_or_missing_is_named(tmp_path: Path) -> None:
    _, path, _ = await stored(tmp_path / "state")
    whole = path.read_bytes()
    path.write_bytes(whole[:4096])
    problems = checked(tmp_path / "state").problems
    assert any(f"of {path}, which has only 4096 bytes" in problem for problem in problems)
    assert any("it was truncated" in problem for problem in problems)
    path.unlink()
    problems = checked(tmp_path / "state").problems
    assert problems[0] == f"{path} is missing, and holds committed bytes" and len(problems) > 1
    assert not path.exists()


async def test_a_damaged_catalog_and_a_directory_in_use_or_without_a_store_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "state", **ROOMY) as engine:
        await Training(engine, Layout()).begin()
        with pytest.raises(ConflictError, match="is in use by the daemon with pid"):
            checked(tmp_path / "state")
    with pytest.raises(NotFoundError, match="is not a state directory"):
        checked(tmp_path / "nowhere")
    database = sqlite3.connect(tmp_path / "state/catalog.sqlite")
    database.execute("UPDATE commits SET step = step + 1")
    database.commit()
    database.close()
    with pytest.raises(DataLossError):
        checked(tmp_path / "state")


async def test_versions_over_each_other_are_named(tmp_path: Path) -> None:
    await stored(tmp_path / "state")
    group = Layout().group("block.0")
    extents = [(Extent(0, 8192),), (Extent(4096, 8192),), (Extent(12288, 4096),)]
    versions = [
        fsck.StoredBytes(label=f"{name} at step 1", group=group, kind=Kind.PARAM, extents=places, checksums=b"")
        for name, places in zip("abc", extents, strict=True)
    ]
    with (tmp_path / "state/data.0").open("rb") as file:
        problems = list(fsck.misplaced(versions, {0: (Path("data.0"), file.fileno())}))
    assert problems == ["b at step 1 and a at step 1 have the same bytes of data.0, at 4096"]


async def test_data_files_of_other_directories_are_found_where_they_were_moved(tmp_path: Path) -> None:
    used, path, _ = await stored(tmp_path / "state", nvme_dirs=(tmp_path / "a", tmp_path / "b"))
    assert checked(tmp_path / "state").verified_bytes == used
    path.parent.rename(tmp_path / "moved")
    assert any("is missing" in problem for problem in checked(tmp_path / "state").problems)
    result = checked(tmp_path / "state", tmp_path / "moved")
    assert (result.problems, result.verified_bytes) == ([], used)


def test_a_place_at_which_this_user_may_not_look_is_named(tmp_path: Path) -> None:
    # The kernel refuses this name, whichever user asks, as it refuses the directory of another user.
    with pytest.raises(DeviceError, match=r"cannot look at .*/catalog.sqlite: File name too long"):
        checked(tmp_path / ("x" * 300))
