"""The arena hands out exact, page-aligned, disjoint ranges of shared memory, and loses none."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from storage import syscalls
from storage.errors import DiskFullError
from storage.tiers.arena import Arena, ArenaRange
from storage.tiers.base import PAGE_BYTES


@contextmanager
def arena_of(pages: int) -> Iterator[Arena]:
    arena = Arena(pages * PAGE_BYTES)
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
        assert arena.used_bytes == arena.size_bytes and arena.largest_free_bytes == 0
        assert arena.allocate(1) is None
        arena.view(rest)[-1] = 7


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
            assert arena.largest_free_bytes == 6 * PAGE_BYTES
            assert arena.used_bytes == PAGE_BYTES


def test_what_lives_for_a_step_comes_from_the_top_and_the_rest_from_the_bottom() -> None:
    with arena_of(16) as arena:
        assert take(arena, 2, from_top=True).offset == 14 * PAGE_BYTES
        assert take(arena, 2).offset == PAGE_BYTES
        assert take(arena, 3, from_top=True).offset == 11 * PAGE_BYTES
        assert arena.largest_free_bytes == 8 * PAGE_BYTES


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
        # Blocks that the kernel has allocated: no later touch can end in SIGBUS.
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.size_bytes
        with mmap.mmap(arena.fd, arena.size_bytes) as mapping:
            assert mapping[: len(arena.nonce)] == arena.nonce
            range_ = take(arena, 1)
            mapping[range_.offset] = 42
            assert arena.view(range_)[0] == 42


def test_more_memory_than_is_available_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel does not refuse a large memfd: it kills processes, others than this one first, to make room.
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("memory was asked for"))
    available = syscalls.available_memory()
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(DiskFullError, match=f"host_budget: {1 << 60} bytes.*lower host_budget"):
        syscalls.create_shared_memory("too-large", 1 << 60)


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
