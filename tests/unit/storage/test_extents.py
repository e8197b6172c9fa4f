"""Extents are exact and disjoint, are joined again when they are freed, and are split only if no run is long enough."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from storage.tiers.base import PAGE_BYTES
from storage.tiers.extents import SPLIT_BYTES, Extent, ExtentAllocator, overlapping, unused_runs, without

PAGES = SPLIT_BYTES // PAGE_BYTES
FILE_PAGES = 50 * PAGES


def pages(first: int, count: int) -> Extent:
    return Extent(first * PAGE_BYTES, count * PAGE_BYTES)


def allocator(*free: Extent) -> ExtentAllocator:
    space = ExtentAllocator()
    for extent in free:
        space.add(extent)
    return space


def test_sizes_are_rounded_up_to_pages_and_no_further() -> None:
    space = allocator(pages(0, 10))
    assert space.allocate(PAGE_BYTES + 1) == (pages(0, 2),)
    assert space.free_bytes == 8 * PAGE_BYTES


def test_the_shortest_run_that_fits_is_taken() -> None:
    space = allocator(pages(0, 9), pages(20, 3), pages(40, 5))
    assert space.allocate(3 * PAGE_BYTES) == (pages(20, 3),)
    assert space.allocate(4 * PAGE_BYTES) == (pages(40, 4),)


def test_it_splits_only_where_no_run_is_long_enough_longest_first() -> None:
    space = allocator(pages(0, 2), pages(100, PAGES + 1), pages(200, 3))
    assert space.allocate(SPLIT_BYTES + 2 * PAGE_BYTES) == (pages(100, PAGES), pages(0, 2))
    assert space.free_bytes == 4 * PAGE_BYTES


def test_a_split_is_at_a_multiple() -> None:
    space = allocator(pages(0, PAGES + 3), pages(100, PAGES + 2), pages(200, PAGES + 1), pages(300, 3))
    taken = space.allocate(3 * SPLIT_BYTES + PAGE_BYTES)
    assert taken == (pages(0, PAGES), pages(100, PAGES), pages(200, PAGES + 1))
    assert space.usable_bytes == 0, "what is left is too short to be split, and good for a last part only"
    assert space.allocate(4 * PAGE_BYTES) is None
    assert space.allocate(3 * PAGE_BYTES) == (pages(PAGES, 3),)


def test_too_little_space_gives_nothing_and_takes_nothing() -> None:
    space = allocator(pages(0, PAGES), pages(100, PAGES))
    assert space.allocate(2 * SPLIT_BYTES + PAGE_BYTES) is None
    assert space.allocate(2 * SPLIT_BYTES) == (pages(0, PAGES), pages(100, PAGES))


def test_what_is_freed_joins_its_neighbours() -> None:
    space = allocator(pages(0, 2), pages(4, 2))
    space.add(pages(2, 2))
    assert space.allocate(6 * PAGE_BYTES) == (pages(0, 6),)


def test_what_the_catalog_names_is_used_and_the_rest_is_free() -> None:
    used = [pages(6, 2), pages(1, 2), pages(3, 1)]
    assert unused_runs(10 * PAGE_BYTES, used) == [pages(0, 1), pages(4, 2), pages(8, 2)]
    assert unused_runs(0, []) == []


@pytest.mark.parametrize("used", [[pages(0, 2), pages(1, 1)], [pages(3, 2)]])
def test_extents_that_overlap_or_leave_the_file_are_refused(used: list[Extent]) -> None:
    with pytest.raises(ValueError, match="overlaps another or leaves the file"):
        unused_runs(4 * PAGE_BYTES, used)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_campaign_agrees_with_a_set_of_pages(seed: int) -> None:
    rng = random.Random(seed)
    free = set(range(FILE_PAGES))
    space = allocator(pages(0, FILE_PAGES))
    live: list[tuple[Extent, ...]] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            for extent in live.pop(rng.randrange(len(live))):
                space.add(extent)
                free |= _numbers(extent)
        else:
            count = rng.randint(1, 8 * PAGES)
            longest = _longest_run(free)
            granted = space.allocate(count * PAGE_BYTES)
            if granted is None:
                assert count > _in_whole_pages(free)
                continue
            taken = set().union(*map(_numbers, granted))
            assert len(taken) == count and taken <= free
            assert (len(granted) == 1) == (count <= longest)
            assert all(extent.nbytes % SPLIT_BYTES == 0 for extent in granted[:-1])
            free -= taken
            live.append(granted)
        assert space.free_bytes == len(free) * PAGE_BYTES


def _numbers(extent: Extent) -> set[int]:
    first = extent.offset // PAGE_BYTES
    return set(range(first, first + extent.nbytes // PAGE_BYTES))


def _runs(free: set[int]) -> list[int]:
    breaks = [-1, *(n for n in range(FILE_PAGES) if n not in free), FILE_PAGES]
    return [b - a - 1 for a, b in pairwise(breaks)]


def _longest_run(free: set[int]) -> int:
    return max(_runs(free))


def _in_whole_pages(free: set[int]) -> int:
    return sum(length // PAGES * PAGES for length in _runs(free))


def test_the_parts_of_an_extent_outside_of_holes() -> None:
    holes = [pages(3, 1), pages(0, 2), pages(8, 4), Extent(5 * PAGE_BYTES, PAGE_BYTES, file=1)]
    assert list(without(pages(1, 9), holes)) == [pages(2, 1), pages(4, 4)]
    assert list(without(pages(3, 1), holes)) == []
    assert list(without(pages(20, 1), holes)) == [pages(20, 1)]


def test_where_a_part_of_a_sequence_of_extents_is() -> None:
    extents = [pages(10, 4), pages(0, 8), pages(30, 1)]
    assert list(overlapping(extents, 3 * PAGE_BYTES, 6 * PAGE_BYTES)) == [pages(13, 1), pages(0, 5)]
    assert list(overlapping(extents, 12 * PAGE_BYTES, PAGE_BYTES)) == [pages(30, 1)]
    assert list(overlapping(extents, 13 * PAGE_BYTES, PAGE_BYTES)) == []
