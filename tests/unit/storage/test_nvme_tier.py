"""The NVMe tier on a real file: bytes are read back from any extents, and errors name the budget or the file."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from storage.base import syscalls
from storage.base.errors import BudgetExceededError, DamagedBlockError, DataLossError, DeviceError, DiskFullError
from storage.base.integrity import BLOCK_BYTES
from storage.base.tracing import Tracer
from storage.tiers import data_file, threaded_io
from storage.tiers import nvme as nvme_module
from storage.tiers.arena import Arena
from storage.tiers.base import PAGE_BYTES
from storage.tiers.data_file import DataFile
from storage.tiers.extents import SPLIT_BYTES, Extent
from storage.tiers.nvme import NvmeTier
from tests.unit.storage.builders import Fault, held

BUDGET_PAGES = 512
# The number of pages in a checksum's block.
PAGES = BLOCK_BYTES // PAGE_BYTES


@asynccontextmanager
async def tier_at(path: Path, *, pages: int = BUDGET_PAGES, used: tuple[Extent, ...] = ()) -> AsyncIterator[NvmeTier]:
    file = DataFile(0, path, used, read_threads=3, write_threads=2)
    try:
        tier = NvmeTier(
            [file], pages * PAGE_BYTES, (), tracer=Tracer(), on_damage=lambda _error, _extents: None, on_freed=()
        )
    except BaseException:
        await file.close()
        raise
    try:
        yield tier
    finally:
        await tier.close()


def path_of(tier: NvmeTier) -> Path:
    return tier.files[0].path


@pytest.mark.parametrize("request_bytes", [4 << 20, 2 * BLOCK_BYTES])
async def test_bytes_come_back_from_extents_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_bytes: int
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", request_bytes)
    rng, arena = random.Random(1), Arena(64 * BLOCK_BYTES)
    source, target = arena.allocate(15 * BLOCK_BYTES), arena.allocate(15 * BLOCK_BYTES)
    assert source is not None and target is not None
    async with tier_at(tmp_path / "data", pages=128 * PAGES) as tier:
        # The free holes have different sizes, so that the next region has several extents.
        pieces = [await tier.allocate(rng.randint(1, 9) * BLOCK_BYTES // 4) for _ in range(80)]
        filler = await tier.allocate(tier.budget_bytes - tier.used_bytes)
        for piece in pieces[::3]:
            tier.free(piece)
        region = await tier.allocate(15 * BLOCK_BYTES)
        assert len(region.extents) > 3

        data = rng.randbytes(15 * BLOCK_BYTES)
        arena.view(source)[:] = data
        await tier.write_from(region, 0, arena.view(source))
        await tier.sync()
        for start, count in [(0, 15), (0, 1), (14, 1), (2, 8), (3, 2)]:
            view = arena.view(target)[: count * BLOCK_BYTES]
            await tier.read_into(region, start * BLOCK_BYTES, view)
            assert bytes(view) == data[start * BLOCK_BYTES : (start + count) * BLOCK_BYTES]
        await tier.write_from(region, BLOCK_BYTES, arena.view(source)[: 5 * BLOCK_BYTES])
        await tier.read_into(region, 0, arena.view(target))
        assert bytes(arena.view(target)) == data[:BLOCK_BYTES] + data[: 5 * BLOCK_BYTES] + data[6 * BLOCK_BYTES :]
        for left in [*pieces[1::3], *pieces[2::3], filler, region]:
            tier.free(left)
        assert tier.used_bytes == 0
        assert tier.counters.bytes_written == 20 * BLOCK_BYTES
    arena.close()


async def test_a_move_that_leaves_its_region_is_refused_before_any_byte_moves(tmp_path: Path) -> None:
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
        with pytest.raises(BudgetExceededError, match="raise nvme_budget to at least 1MiB, or") as caught:
            await tier.allocate(5 * PAGE_BYTES)
        told = "nvme_budget 40.0 KiB is too small: 28.0 KiB are in use and 20.0 KiB more are needed in"
        assert f"{told} {path_of(tier)}; " in str(caught.value)
        await tier.allocate(3 * PAGE_BYTES)
        assert tier.used_bytes == tier.budget_bytes == path_of(tier).stat().st_size


async def test_the_file_grows_in_large_steps_never_beyond_the_budget(tmp_path: Path) -> None:
    growth = data_file.GROWTH_BYTES
    async with tier_at(tmp_path / "data", pages=growth // PAGE_BYTES + 3) as tier:
        region = await tier.allocate(1)
        assert path_of(tier).stat().st_size == growth
        await tier.allocate(growth - region.nbytes)
        assert path_of(tier).stat().st_size == growth
        await tier.allocate(2 * PAGE_BYTES)
        assert path_of(tier).stat().st_size == tier.budget_bytes
        assert path_of(tier).stat().st_blocks * 512 >= tier.budget_bytes, "its blocks are promised, not sparse"


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
        DataFile(0, tmp_path / "data", [Extent(0, 2 * PAGE_BYTES)], read_threads=1, write_threads=1)


async def test_a_budget_below_the_committed_bytes_is_refused(tmp_path: Path) -> None:
    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(9 * PAGE_BYTES)
    with pytest.raises(
        BudgetExceededError, match=r"nvme_budget 4\.0 KiB.*raise nvme_budget to at least 1MiB or delete jobs"
    ):
        async with tier_at(tmp_path / "data", pages=1, used=region.extents):
            pass


async def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    arena = Arena(4 * PAGE_BYTES)
    buffer = arena.allocate(2 * PAGE_BYTES)
    assert buffer is not None
    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(2 * PAGE_BYTES)
        os.truncate(path_of(tier), PAGE_BYTES)
        with pytest.raises(DeviceError, match=f"{path_of(tier)} ends before"):
            await tier.read_into(region, 0, arena.view(buffer))
    arena.close()


async def test_a_file_system_without_direct_io_is_used_buffered_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def open_without_direct_io(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    async with tier_at(tmp_path / "direct") as tier:
        assert tier.detail == f"{path_of(tier)} (O_DIRECT)"
    monkeypatch.setattr(os, "open", open_without_direct_io)
    async with tier_at(tmp_path / "buffered") as tier:
        assert "buffered: no O_DIRECT" in tier.detail and "refuses O_DIRECT" in caplog.text
        region = await tier.allocate(5)
        data = memoryview(bytearray(b"y" * PAGE_BYTES))
        await tier.write_from(region, 0, data)
        back = memoryview(bytearray(PAGE_BYTES))
        await tier.read_into(region, 0, back)
        assert back == data


async def test_a_device_that_refuses_direct_reads_is_used_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def refuse_direct(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    async with tier_at(tmp_path / "data") as tier:
        assert not tier.files[0].direct


def test_a_full_device_is_told_from_a_broken_one() -> None:
    full = Path("/dev/full")
    fd = os.open(full, os.O_WRONLY)
    try:
        with pytest.raises(DiskFullError, match="/dev/full: No space left on device; free space there or lower"):
            syscalls.write_exact(fd, [memoryview(b"x")], 0, full)
        with pytest.raises(DeviceError, match="cannot read 1 bytes at 0 of /dev/full") as caught:
            syscalls.read_exact(fd, [memoryview(bytearray(1))], 0, full)
        assert not isinstance(caught.value, DiskFullError)
    finally:
        os.close(fd)


async def test_one_failed_request_of_a_move_fails_it_when_no_buffer_is_in_use_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(threaded_io, "COALESCED_BYTES", BLOCK_BYTES)
    real = syscalls.read_exact
    under_way: set[int] = set()

    def read(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        under_way.add(offset)
        if offset == 0:
            time.sleep(0.05)
            under_way.discard(offset)
            raise DeviceError("this block is bad")
        time.sleep(0.1)
        real(fd, buffers, offset, path)
        under_way.discard(offset)

    async with tier_at(tmp_path / "data") as tier:
        region = await tier.allocate(16 * BLOCK_BYTES)
        arena = Arena(20 * BLOCK_BYTES)
        buffer = arena.allocate(16 * BLOCK_BYTES)
        assert buffer is not None
        await tier.write_from(region, 0, arena.view(buffer))
        monkeypatch.setattr(syscalls, "read_exact", read)
        with pytest.raises(DeviceError, match="this block is bad"):
            await tier.read_into(region, 0, arena.view(buffer))
        assert under_way == set() and tier.queue_depth == 0
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
        assert path_of(tier).stat().st_size == 12 * PAGE_BYTES
        with pytest.raises(
            DiskFullError, match=f"cannot reserve {9 * PAGE_BYTES} bytes in {path_of(tier)}: No space left"
        ):
            await tier.allocate(9 * PAGE_BYTES)
        # The blocks that were allocated before the error are free again.
        assert path_of(tier).stat().st_size == tier.used_bytes == 12 * PAGE_BYTES


async def test_a_block_that_lies_in_two_extents_is_recorded_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(8 * BLOCK_BYTES)
    source, target = arena.allocate(2 * BLOCK_BYTES), arena.allocate(2 * BLOCK_BYTES)
    assert source is not None and target is not None
    async with tier_at(tmp_path / "data", pages=3 * PAGES) as tier:
        pieces = [await tier.allocate(SPLIT_BYTES) for _ in range(3 * BLOCK_BYTES // SPLIT_BYTES)]
        for piece in pieces[1:-1]:
            if piece is not pieces[9]:
                tier.free(piece)
        region = await tier.allocate(2 * BLOCK_BYTES)
        assert not region.blocks_are_whole
        arena.view(source)[:] = random.Random(5).randbytes(2 * BLOCK_BYTES)
        await tier.write_from(region, 0, arena.view(source))
        await tier.read_into(region, 0, arena.view(target))
        assert bytes(arena.view(target)) == bytes(arena.view(source))

        real, wrong = syscalls.read_exact, [1]

        def read(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
            real(fd, buffers, offset, path)
            if wrong and wrong.pop():
                buffers[0][3] ^= 1

        monkeypatch.setattr(syscalls, "read_exact", read)
        await tier.read_into(region, 0, arena.view(target))
        assert bytes(arena.view(target)) == bytes(arena.view(source)), "what was wrong once is read once more"
        with path_of(tier).open("r+b") as file:
            file.seek(region.extents[1].offset + 7)
            file.write(b"damage")
        with pytest.raises(DataLossError, match="damaged"):
            await tier.read_into(region, 0, arena.view(target))
        assert tier.damaged_blocks == 1
    arena.close()


async def test_damage_in_a_version_that_is_freed_while_it_is_read_is_never_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next commit may free a version while the scrubber or a prefetch reads it."""
    go_on, began, real = threading.Event(), threading.Event(), syscalls.read_exact

    def late(fd: int, buffers: Sequence[memoryview], offset: int, path: Path) -> None:
        began.set()
        assert go_on.wait(20)
        real(fd, buffers, offset, path)

    arena = Arena(5 * BLOCK_BYTES)
    buffer = arena.allocate(4 * BLOCK_BYTES)
    assert buffer is not None
    async with tier_at(tmp_path / "data", pages=8 * PAGES) as tier:
        region = await tier.allocate(4 * BLOCK_BYTES)
        await tier.write_from(region, 0, arena.view(buffer))
        with path_of(tier).open("r+b") as file:
            file.seek(region.extents[0].offset + BLOCK_BYTES + 7)
            file.write(b"damage")
        monkeypatch.setattr(syscalls, "read_exact", late)
        reading = asyncio.ensure_future(tier.read_into(region, 0, arena.view(buffer)))
        await asyncio.to_thread(began.wait, 20)
        tier.free(region)
        go_on.set()
        with pytest.raises(DamagedBlockError):
            await reading
        assert (tier.used_bytes, tier.bad_bytes, tier.problems) == (BLOCK_BYTES, BLOCK_BYTES, [])
        (bad,) = tier.bad
        others = await tier.allocate(tier.budget_bytes - BLOCK_BYTES)
        assert not any(extent.offset < bad.end and bad.offset < extent.end for extent in others.extents)
    arena.close()


@asynccontextmanager
async def tier_over(directory: Path, *, pages: int) -> AsyncIterator[NvmeTier]:
    """Open a tier over two files."""
    files = [DataFile(n, directory / f"data.{n}", (), read_threads=1, write_threads=1) for n in range(2)]
    tier = NvmeTier(
        files, pages * PAGE_BYTES, (), tracer=Tracer(), on_damage=lambda _error, _extents: None, on_freed=()
    )
    try:
        yield tier
    finally:
        await tier.close()


async def test_what_no_file_has_room_for_alone_is_spread_over_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", BLOCK_BYTES)
    arena, data = Arena(3 * BLOCK_BYTES), random.Random(7).randbytes(BLOCK_BYTES)
    source, target = arena.allocate(BLOCK_BYTES), arena.allocate(BLOCK_BYTES)
    assert source is not None and target is not None
    arena.view(source)[:] = data
    async with tier_over(tmp_path, pages=3 * PAGES) as tier:
        for _ in range(2):
            await tier.allocate(BLOCK_BYTES)
        tier.reserve(BLOCK_BYTES)
        assert all(file.usable_bytes < BLOCK_BYTES for file in tier.files)
        region = await tier.allocate(BLOCK_BYTES)
        assert {extent.file for extent in region.extents} == {0, 1}
        await tier.write_from(region, 0, arena.view(source))
        await tier.read_into(region, 0, arena.view(target))
        assert bytes(arena.view(target)) == data
        assert tier.used_bytes == tier.budget_bytes
    arena.close()


async def test_a_device_that_fails_while_a_version_is_placed_keeps_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "REQUEST_BYTES", BLOCK_BYTES)
    real = syscalls.extend

    def extend(fd: int, size: int, length: int, path: Path) -> None:
        if path.name == "data.1":
            raise DeviceError(f"cannot reserve {length} bytes in {path}: Read-only file system")
        real(fd, size, length, path)

    monkeypatch.setattr(syscalls, "extend", extend)
    async with tier_over(tmp_path, pages=8 * PAGES) as tier:
        with pytest.raises(DeviceError, match="Read-only file system"):
            await tier.allocate(4 * BLOCK_BYTES)
        assert tier.used_bytes == 0


async def test_a_sync_says_nothing_of_bytes_that_a_version_gets_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job may sync between two tiles of an update, and the sync that fails afterwards has lost the second."""
    arena = Arena(5 * BLOCK_BYTES)
    buffer = arena.allocate(BLOCK_BYTES)
    assert buffer is not None
    async with tier_at(tmp_path / "data", pages=8 * PAGES) as tier:
        region, whole = [await tier.allocate(2 * BLOCK_BYTES) for _ in range(2)]
        for first in (region, whole):
            await tier.write_from(first, 0, arena.view(buffer))
        with held(monkeypatch, "sync_data") as go_on:
            syncing = asyncio.ensure_future(tier.sync())
            await asyncio.sleep(0.02)
            await tier.write_from(region, BLOCK_BYTES, arena.view(buffer))
            go_on.set()
            await syncing
        syncs = Fault(monkeypatch, "sync_data")
        syncs.fail(DeviceError("input/output error"))
        with pytest.raises(DeviceError, match="input/output error"):
            await tier.sync()
        assert (region.doubtful, whole.doubtful) == (True, False)
        assert len(tier.problems) == 1
    arena.close()
