"""The arena hands out exact, page-aligned, disjoint ranges of shared memory, and loses none."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import random
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.base import syscalls
from storage.base.errors import DeviceError, DiskFullError
from storage.memory.host_cache import EvictionOrder
from storage.tiers.arena import Arena, ArenaRange
from storage.tiers.base import PAGE_BYTES
from storage.tiers.host import HostTier
from tests.unit.storage.builders import Fault

MIB = 1 << 20


@contextmanager
def arena_of(pages: int, *, huge_pages: bool = False, lock_memory: bool = False) -> Iterator[Arena]:
    arena = Arena(pages * PAGE_BYTES, huge_pages=huge_pages, lock_memory=lock_memory)
    try:
        yield arena
    finally:
        arena.close()


def take(arena: Arena, pages: int, *, from_top: bool = False) -> ArenaRange:
    range_ = arena.allocate(pages * PAGE_BYTES, from_top=from_top)
    assert range_ is not None
    return range_


def test_sizes_are_exact_to_the_page_and_the_last_byte_can_be_used() -> None:
    with arena_of(8) as arena:
        first = arena.allocate(1)
        second = arena.allocate(PAGE_BYTES + 1)
        assert first is not None and (first.offset, first.nbytes) == (PAGE_BYTES, PAGE_BYTES)
        assert second is not None and (second.offset, second.nbytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
        rest = take(arena, 4)
        assert arena.used_bytes == arena.size_bytes
        assert arena.allocate(1) is None
        arena.view(rest)[-1] = 7


def test_ranges_lie_in_one_piece_unless_they_are_longer() -> None:
    arena = Arena(16 * PAGE_BYTES, piece_bytes=4 * PAGE_BYTES)
    try:
        ranges = [take(arena, 3, from_top=from_top) for from_top in (False, True, False)]
        # The first page is the header.
        assert [range_.offset // PAGE_BYTES for range_ in ranges] == [1, 13, 4]
        long = take(arena, 5)
        assert long.offset // PAGE_BYTES == 7
        assert take(arena, 1).offset // PAGE_BYTES == 12 and arena.allocate(1) is None
    finally:
        arena.close()


def test_a_settled_arena_says_so_to_its_end() -> None:
    with arena_of(1024) as arena:
        arena.finish_collapse()
        assert arena.settled_bytes == arena.size_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(syscalls, "collapse_pages", lambda *_: iter([(2 * MIB, 0)]))
        arena = Arena(4 * MIB)
        assert arena.finish_collapse() == 0 and arena.settled_bytes == 4 * MIB
        arena.close()


def test_a_budget_that_is_no_multiple_of_a_page_is_rounded_down() -> None:
    arena = Arena(3 * PAGE_BYTES + 17)
    try:
        assert arena.size_bytes == 3 * PAGE_BYTES
    finally:
        arena.close()


def test_freed_neighbours_join_whatever_the_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        with arena_of(7) as arena:
            ranges = [take(arena, 2) for _ in range(3)]
            for index in order:
                arena.free(ranges[index])
            assert arena.used_bytes == PAGE_BYTES
            assert take(arena, 6).offset == PAGE_BYTES


def test_what_lives_for_a_step_comes_from_the_top_and_the_rest_from_the_bottom() -> None:
    with arena_of(16) as arena:
        assert take(arena, 2, from_top=True).offset == 14 * PAGE_BYTES
        assert take(arena, 2).offset == PAGE_BYTES
        assert take(arena, 3, from_top=True).offset == 11 * PAGE_BYTES
        assert take(arena, 8).offset == 3 * PAGE_BYTES


def test_a_reused_range_has_a_generation_that_no_range_ever_had() -> None:
    with arena_of(4) as arena:
        seen = set()
        for _ in range(5):
            range_ = take(arena, 1)
            seen.add(range_.generation)
            arena.free(range_)
        assert len(seen) == 5


def test_the_memory_is_allocated_in_full_and_holds_the_nonce_for_whoever_maps_it() -> None:
    with arena_of(5) as arena:
        # The kernel has allocated all blocks, so no later access can end in SIGBUS.
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.size_bytes
        with mmap.mmap(arena.fd, arena.size_bytes) as mapping:
            assert mapping[: len(arena.nonce)] == arena.nonce
            range_ = take(arena, 1)
            mapping[range_.offset] = 42
            assert arena.view(range_)[0] == 42


def test_more_memory_than_is_available_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel does not refuse a large memfd. It kills processes, other ones first, to make room.
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was asked for"))
    available = syscalls.available_memory()
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(DiskFullError, match=r"host_budget: 1\.0 EiB of .*lower host_budget"):
        syscalls.create_shared_memory("too-large", 1 << 60)


def test_memory_that_the_kernel_does_not_give_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DiskFullError, match=r"host_budget: cannot allocate 8.0 KiB .*No space left.*lower"):
            Arena(2 * PAGE_BYTES)
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(DeviceError, match=r"host_budget: cannot create shared memory \(memfd_create: No space left"):
        Arena(2 * PAGE_BYTES)
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_machine_that_does_not_tell_its_memory_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(syscalls, "_MEMINFO", meminfo)
    for content in (None, "MemTotal: 5 kB\n", "MemAvailable: much kB\n"):
        if content is not None:
            meminfo.write_text(content)
        with pytest.raises(DeviceError, match=f"host_budget: .* cannot be read from {meminfo}.*mount /proc"):
            Arena(2 * PAGE_BYTES)


def test_a_budget_is_held_against_the_tightest_limit_around_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    for name, path in (("_MEMINFO", meminfo), ("_OWN_CGROUP", own), ("_CGROUPS", groups)):
        monkeypatch.setattr(syscalls, name, path)
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert syscalls.available_memory() == 8000 << 10

    def limit(group: str, most: str, used: int, files: int = 0) -> None:
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "memory.max").write_text(f"{most}\n")
        (groups / group / "memory.current").write_text(f"{used}\n")
        (groups / group / "memory.stat").write_text(f"anon 1\nactive_file {files // 2}\ninactive_file {files // 2}\n")

    own.write_text("4:memory:/old\n0::/slice/service\n")
    limit("slice/service", "max", 10)
    assert syscalls.available_memory() == 8000 << 10
    limit("slice", str(5 * MIB), 1 * MIB)
    assert syscalls.available_memory() == 4 * MIB
    # The kernel drops cached files when memory is needed, so their bytes are available.
    limit("slice/service", str(3 * MIB), 3 * MIB, files=2 * MIB)
    assert syscalls.available_memory() == 2 * MIB
    # A container without a cgroup namespace sees a path that does not exist. Its own group is mounted as the root.
    own.write_text("0::/not/seen/from/here\n")
    limit("", str(2 * MIB), 3 * MIB)
    assert syscalls.available_memory() == 0
    with pytest.raises(DiskFullError, match=r"8\.0 KiB of shared memory are asked for and 0 B are available"):
        Arena(2 * PAGE_BYTES)


@pytest.mark.parametrize("lines", ["4:cpu,cpuacct:/other\n3:memory:/docker/x\n", "3:memory,blkio:/docker/x\n0::/x\n"])
def test_limits_of_cgroups_of_version_1_count_as_well_on_hosts_that_have_both_or_only_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    meminfo, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    for name, path in (("_MEMINFO", meminfo), ("_OWN_CGROUP", own), ("_CGROUPS", groups)):
        monkeypatch.setattr(syscalls, name, path)
    meminfo.write_text("MemAvailable:    8000 kB\n")
    own.write_text(lines)

    def limit(group: str, most: int, used: int, files: int = 0) -> None:
        directory = groups / "memory" / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.limit_in_bytes").write_text(f"{most}\n")
        (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
        cached = f"total_active_file {files // 2}\ntotal_inactive_file {files // 2}\n"
        (directory / "memory.stat").write_text(f"active_file 7\n{cached}")

    no_limit = 9223372036854771712
    limit("", no_limit, 4 * MIB)
    limit("docker/x", no_limit, 1 * MIB)
    assert syscalls.available_memory() == 8000 << 10
    limit("docker", 6 * MIB, 3 * MIB, files=1 * MIB)
    assert syscalls.available_memory() == 4 * MIB
    # A container sees its own group as the root, and the path of the host.
    own.write_text(lines.replace("/docker/x", "/not/seen"))
    limit("", 3 * MIB, 1 * MIB)
    assert syscalls.available_memory() == 2 * MIB


@pytest.mark.parametrize("huge_pages", [False, True])
def test_no_process_that_has_the_descriptor_can_change_the_size(huge_pages: bool) -> None:
    """A daemon that touched a page beyond the end would be killed by SIGBUS."""
    with arena_of(512, huge_pages=huge_pages) as arena:
        descriptor = os.dup(arena.fd)
        for size in (0, 2 * arena.size_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0)
        os.close(descriptor)
        assert os.fstat(arena.fd).st_size == arena.size_bytes


def test_huge_pages_are_used_where_there_are_enough_and_else_missed_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    pages = int(fields.get("HugePages_Free", "0").split()[0])
    # The arena has one and a half huge pages, and is rounded down to one if huge pages are used.
    with arena_of(768, huge_pages=True) as arena, mmap.mmap(arena.fd, arena.size_bytes) as mapping:
        assert mapping[: len(arena.nonce)] == arena.nonce
        rest = take(arena, arena.size_bytes // PAGE_BYTES - 1)
        arena.view(rest)[-1] = 7
        assert mapping[-1] == 7
        assert arena.huge_pages == (pages > 0)
        assert arena.size_bytes == (2 if arena.huge_pages else 3) * MIB
        assert len(caplog.messages) == (0 if arena.huge_pages else 1)


def test_without_enough_huge_pages_the_warning_names_reason_and_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, asked = os.memfd_create, []

    def without_huge(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", without_huge)
    with arena_of(1024, huge_pages=True) as arena:
        assert not arena.huge_pages and arena.size_bytes == 4 * MIB and len(asked) == 2
    (warning,) = caplog.messages
    assert "huge_pages: cannot allocate 4.0 MiB in pages of 2 MiB (Invalid argument)" in warning
    assert "vm.nr_hugepages=2" in warning and "Ordinary pages are used" in warning


def test_locked_memory_is_counted_by_the_kernel_or_missed_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = locked_bytes()
    with arena_of(512, lock_memory=True) as arena:
        assert locked_bytes() - before == (arena.size_bytes if arena.locked else 0)
        assert len(caplog.messages) == (0 if arena.locked else 1)


def locked_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmLck"].split()[0]) << 10


def test_where_locking_is_not_allowed_the_warning_names_the_limit_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(syscalls._libc, "mlock", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    with arena_of(4, lock_memory=True) as arena:
        assert not arena.locked
        arena.view(take(arena, 3))[-1] = 7
    (warning,) = caplog.messages
    assert "lock_memory: cannot lock 16.0 KiB (Cannot allocate memory), 8.0 MiB are allowed" in warning
    assert "ulimit -l" in warning and "LimitMEMLOCK=" in warning and "The arena can be swapped out" in warning


@pytest.mark.parametrize(
    ("huge_pages", "lock_memory", "detail"),
    [
        (False, False, "shared memory"),
        (True, False, "shared memory, huge pages"),
        (False, True, "shared memory, locked"),
        (True, True, "shared memory, huge pages, locked"),
    ],
)
def test_the_tier_says_which_memory_it_got_and_not_which_it_wanted(
    monkeypatch: pytest.MonkeyPatch, huge_pages: bool, lock_memory: bool, detail: str
) -> None:
    # The system calls are replaced, so that huge pages and locked memory are granted on any machine.
    monkeypatch.setattr(syscalls, "create_huge_shared_memory", syscalls.create_shared_memory)
    monkeypatch.setattr(syscalls, "lock_memory", lambda _: None)
    monkeypatch.setattr(syscalls, "collapse_pages", lambda *_: iter([]))
    host = HostTier(4 * MIB, EvictionOrder(), lambda: None, huge_pages=huge_pages, lock_memory=lock_memory)
    assert host.detail == detail
    host.arena.close()
    for function in ("create_huge_shared_memory", "lock_memory"):
        Fault(monkeypatch, function).fail(DeviceError("it is not allowed"))
    host = HostTier(4 * MIB, EvictionOrder(), lambda: None, huge_pages=huge_pages, lock_memory=lock_memory)
    assert host.detail == "shared memory"
    host.arena.close()


def test_threads_that_allocate_and_free_at_random_never_share_a_byte_and_lose_none() -> None:
    pages, threads, rounds = 257, 4, 2000
    with arena_of(pages) as arena:
        # Every page of a live range begins with the range's generation. If two threads got one page, one of them would
        # find the other's generation.
        def campaign(seed: int) -> list[int]:
            rng = random.Random(seed)
            live: list[ArenaRange] = []
            generations: list[int] = []
            for _ in range(rounds):
                if live and rng.random() < 0.5:
                    range_ = live.pop(rng.randrange(len(live)))
                    assert marks(range_) == {range_.generation}
                    arena.free(range_)
                elif granted := arena.allocate(rng.randint(1, 9) * PAGE_BYTES, from_top=rng.random() < 0.3):
                    generations.append(granted.generation)
                    for offset in range(0, granted.nbytes, PAGE_BYTES):
                        arena.view(granted)[offset : offset + 8] = granted.generation.to_bytes(8, "little")
                    live.append(granted)
            for held in live:
                assert marks(held) == {held.generation}
                arena.free(held)
            return generations

        def marks(range_: ArenaRange) -> set[int]:
            view = arena.view(range_)
            return {
                int.from_bytes(view[offset : offset + 8], "little") for offset in range(0, range_.nbytes, PAGE_BYTES)
            }

        with ThreadPoolExecutor(threads) as pool:
            generations = list(itertools.chain(*pool.map(campaign, range(threads))))
        assert len(generations) == len(set(generations)) > threads * rounds // 4
        assert arena.used_bytes == PAGE_BYTES
        assert take(arena, pages - 1).offset == PAGE_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_campaign_agrees_with_a_map_of_pages(seed: int) -> None:
    rng, pages = random.Random(seed), 97
    owner: list[int | None] = [None] * pages
    owner[0] = 0
    live: list[ArenaRange] = []
    with arena_of(pages) as arena:
        for _ in range(3000):
            if live and rng.random() < 0.5:
                range_ = live.pop(rng.randrange(len(live)))
                arena.free(range_)
                first = range_.offset // PAGE_BYTES
                owner[first : first + range_.nbytes // PAGE_BYTES] = [None] * (range_.nbytes // PAGE_BYTES)
            else:
                count, from_top = rng.randint(1, 12), rng.random() < 0.3
                granted = arena.allocate(count * PAGE_BYTES - rng.randrange(PAGE_BYTES), from_top=from_top)
                fitting = [i for i in range(pages - count + 1) if not any(o is not None for o in owner[i : i + count])]
                if granted is None:
                    assert not fitting
                else:
                    assert granted.offset == (fitting[-1] if from_top else fitting[0]) * PAGE_BYTES
                    first = granted.offset // PAGE_BYTES
                    owner[first : first + count] = [granted.generation] * count
                    live.append(granted)
            assert arena.used_bytes == sum(o is not None for o in owner) * PAGE_BYTES


def test_pages_become_huge_in_the_background_and_keep_what_is_in_them() -> None:
    with arena_of(6 * MIB // PAGE_BYTES + 3) as arena:
        whole = take(arena, arena.size_bytes // PAGE_BYTES - 1)
        data = random.Random(1).randbytes(whole.nbytes)
        arena.view(whole)[:] = data
        # Old kernels cannot move memory into huge pages. Then it stays in ordinary ones.
        huge_bytes = arena.finish_collapse()
        assert huge_bytes in (0, 6 * MIB)
        assert arena.view(whole) == data
        # The comparison above has mapped the pages again, some of them as huge ones. A piece that is not counted may
        # have huge pages, too, so nothing is known if no piece is counted.
        assert mapped_in_huge_pages(arena.view(whole)) > 0 or huge_bytes == 0


def mapped_in_huge_pages(memory: memoryview) -> int:
    """Return the bytes of the mapping of `memory` that this process's page table maps as huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    is_it, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, end = (int(part, 16) for part in name.split("-"))
            is_it = first <= address < end
        elif is_it and name in ("ShmemPmdMapped:", "FilePmdMapped:"):
            found += int(values[0]) << 10
    return found


def test_where_memory_cannot_be_mapped_pages_stay_ordinary_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mmap_ = syscalls._libc.mmap

    def refusing(address: ctypes.c_void_p, *others: object) -> object:
        return syscalls._MAP_FAILED if address.value is None else mmap_(address, *others)

    monkeypatch.setattr(syscalls._libc, "mmap", refusing)
    with arena_of(1024) as arena:
        assert arena.finish_collapse() == 0
    (warning,) = caplog.messages
    assert "the arena stays in ordinary pages: cannot map" in warning
