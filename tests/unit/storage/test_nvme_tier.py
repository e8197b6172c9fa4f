"""The nvme tier on a real file: bytes come back from any pieces, and budget and disk are refused by name."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage import syscalls
from storage.errors import BudgetExceededError, DataLossError, DeviceError, DiskFullError
from storage.tiers import nvme as nvme_module
from storage.tiers.arena import Arena
from storage.tiers.base import PAGE_BYTES
from storage.tiers.extents import Extent
from storage.tiers.nvme import NvmeTier

BUDGET_PAGES = 512


@asynccontextmanager
async def tier_at(path: Path, *, pages: int = BUDGET_PAGES, used: tuple[Extent, ...] = ()) -> AsyncIterator[NvmeTier]:
    tier = NvmeTier(path, pages * PAGE_BYTES, used, read_threads=3, write_threads=2)
    try:
        yield tier
    finally:
        await tier.close()


@pytest.mark.parametrize("request_bytes", [4 << 20, 3 * PAGE_BYTES])
async def test_bytes_come_back_from_extents_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_bytes: int
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", request_bytes)
    rng, arena = random.Random(1), Arena(256 * PAGE_BYTES)
    source, target = arena.allocate(60 * PAGE_BYTES), arena.allocate(60 * PAGE_BYTES)
    assert source is not None and target is not None
    async with tier_at(tmp_path / "data") as tier:
        # Holes of different sizes, so that the next region is in pieces.
        pieces = [await tier.allocate(rng.randint(1, 9) * PAGE_BYTES) for _ in range(80)]
        filler = await tier.allocate(tier.budget_bytes - tier.used_bytes)
        for piece in pieces[::3]:
            tier.free(piece)
        region = await tier.allocate(60 * PAGE_BYTES)
        assert len(region.extents) > 3

        data = rng.randbytes(60 * PAGE_BYTES)
        arena.view(source)[:] = data
        await tier.write_from(region, 0, arena.view(source))
        await tier.sync()
        for start, count in [(0, 60), (0, 4), (56, 4), (8, 32), (12, 8)]:
            view = arena.view(target)[: count * PAGE_BYTES]
            await tier.read_into(region, start * PAGE_BYTES, view)
            assert bytes(view) == data[start * PAGE_BYTES : (start + count) * PAGE_BYTES]
        await tier.write_from(region, 4 * PAGE_BYTES, arena.view(source)[: 20 * PAGE_BYTES])
        await tier.read_into(region, 0, arena.view(target))
        assert bytes(arena.view(target)) == data[: 4 * PAGE_BYTES] + data[: 20 * PAGE_BYTES] + data[24 * PAGE_BYTES :]
        for left in [*pieces[1::3], *pieces[2::3], filler, region]:
            tier.free(left)
        assert tier.used_bytes == 0
        assert tier.counters.bytes_written == 80 * PAGE_BYTES
    arena.close()


async def test_a_transfer_that_leaves_its_region_is_refused_before_any_byte_moves(tmp_path: Path) -> None:
    arena = Arena(8 * PAGE_BYTES)
    buffer = arena.allocate(2 * PAGE_BYTES)
    assert buffer is not None
    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(2 * PAGE_BYTES)
        with pytest.raises(ValueError, match="leaves its region"):
            await tier.write_from(region, PAGE_BYTES, arena.view(buffer))
        assert tier.queue_depth == 0
    arena.close()


async def test_the_budget_is_kept_and_the_refusal_names_the_figure_that_would_do(tmp_path: Path) -> None:
    async with tier_at(tmp_path / "data", pages=10) as tier:
        await tier.allocate(7 * PAGE_BYTES)
        with pytest.raises(BudgetExceededError, match=f"raise nvme_budget to at least {12 * PAGE_BYTES}") as caught:
            await tier.allocate(5 * PAGE_BYTES)
        assert f"nvme_budget {10 * PAGE_BYTES}" in str(caught.value) and str(tier.path) in str(caught.value)
        await tier.allocate(3 * PAGE_BYTES)
        assert tier.used_bytes == tier.budget_bytes == tier.path.stat().st_size


async def test_the_file_grows_in_large_steps_never_beyond_the_budget(tmp_path: Path) -> None:
    growth = nvme_module.GROWTH_BYTES
    async with tier_at(tmp_path / "data", pages=growth // PAGE_BYTES + 3) as tier:
        region = await tier.allocate(1)
        assert tier.path.stat().st_size == growth
        await tier.allocate(growth - region.nbytes)
        assert tier.path.stat().st_size == growth
        await tier.allocate(2 * PAGE_BYTES)
        assert tier.path.stat().st_size == tier.budget_bytes
        assert tier.path.stat().st_blocks * 512 >= tier.budget_bytes, "its blocks are promised, not sparse"


async def test_reopened_it_knows_what_is_used_and_reads_it(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE_BYTES)
    buffer = arena.allocate(PAGE_BYTES)
    assert buffer is not None
    arena.view(buffer)[:] = b"x" * PAGE_BYTES
    async with tier_at(tmp_path / "data") as tier:
        await tier.allocate(3 * PAGE_BYTES)
        region = await tier.allocate(PAGE_BYTES)
        await tier.write_from(region, 0, arena.view(buffer))
    async with tier_at(tmp_path / "data", used=region.extents) as tier:
        assert tier.used_bytes == PAGE_BYTES
        arena.view(buffer)[:] = bytes(PAGE_BYTES)
        await tier.read_into(region, 0, arena.view(buffer))
        assert bytes(arena.view(buffer)) == b"x" * PAGE_BYTES
        assert region.extents[0] not in (await tier.allocate(tier.budget_bytes - PAGE_BYTES)).extents
    arena.close()


def test_a_file_that_does_not_match_the_catalog_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataLossError, match="does not match the catalog"):
        NvmeTier(tmp_path / "data", 1 << 20, [Extent(0, PAGE_BYTES)], read_threads=1, write_threads=1)


async def test_a_budget_below_the_committed_bytes_is_refused(tmp_path: Path) -> None:
    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(9 * PAGE_BYTES)
    with pytest.raises(BudgetExceededError, match=f"nvme_budget {PAGE_BYTES}.*raise nvme_budget or delete jobs"):
        NvmeTier(tmp_path / "data", PAGE_BYTES, region.extents, read_threads=1, write_threads=1)


async def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE_BYTES)
    buffer = arena.allocate(2 * PAGE_BYTES)
    assert buffer is not None
    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(2 * PAGE_BYTES)
        os.truncate(tier.path, PAGE_BYTES)
        with pytest.raises(DeviceError, match=f"{tier.path} ends before"):
            await tier.read_into(region, 0, arena.view(buffer))
    arena.close()


async def test_a_file_system_without_direct_io_is_used_buffered_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_without_direct_io(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    async with tier_at(tmp_path / "direct") as tier:
        assert tier.detail == f"{tier.path} (O_DIRECT)"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_without_direct_io)
        tier = NvmeTier(tmp_path / "buffered", 1 << 20, [], read_threads=1, write_threads=1)
    assert not tier.direct and "buffered: no O_DIRECT" in tier.detail
    region = await tier.allocate(5)
    data = memoryview(bytearray(b"y" * PAGE_BYTES))
    await tier.write_from(region, 0, data)
    back = memoryview(bytearray(PAGE_BYTES))
    await tier.read_into(region, 0, back)
    assert back == data
    await tier.close()


def test_a_full_device_is_told_from_a_broken_one() -> None:
    full = Path("/dev/full")
    fd = os.open(full, os.O_WRONLY)
    try:
        with pytest.raises(DiskFullError, match="/dev/full: No space left on device; free space there or lower"):
            syscalls.write_exact(fd, memoryview(b"x"), 0, full)
        with pytest.raises(DeviceError, match="cannot read 1 bytes at 0 of /dev/full") as caught:
            syscalls.read_exact(fd, memoryview(bytearray(1)), 0, full)
        assert not isinstance(caught.value, DiskFullError)
    finally:
        os.close(fd)


async def test_one_failed_request_of_a_transfer_fails_it_after_all_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", PAGE_BYTES)
    real = syscalls.read_exact
    done: list[int] = []

    def read(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        if offset == 0:
            raise DeviceError("this block is bad")
        real(fd, buffer, offset, path)
        done.append(offset)

    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(16 * PAGE_BYTES)
        monkeypatch.setattr(syscalls, "read_exact", read)
        arena = Arena(32 * PAGE_BYTES)
        buffer = arena.allocate(16 * PAGE_BYTES)
        assert buffer is not None
        with pytest.raises(DeviceError, match="this block is bad"):
            await tier.read_into(region, 0, arena.view(buffer))
        assert len(done) == 15 and tier.queue_depth == 0
        arena.close()


async def test_a_nearly_full_disk_gives_what_is_needed_if_not_what_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 20 * PAGE_BYTES
    real = os.posix_fallocate

    def allocate_some(fd: int, offset: int, length: int) -> None:
        real(fd, offset, min(length, room - offset))
        if offset + length > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate_some)
    async with tier_at(tmp_path / "data") as tier:
        await tier.allocate(12 * PAGE_BYTES)
        assert tier.path.stat().st_size == 12 * PAGE_BYTES
        with pytest.raises(DiskFullError, match=f"cannot reserve {9 * PAGE_BYTES} bytes in {tier.path}: No space left"):
            await tier.allocate(9 * PAGE_BYTES)
        # What was allocated in vain was given back.
        assert tier.path.stat().st_size == tier.used_bytes == 12 * PAGE_BYTES
