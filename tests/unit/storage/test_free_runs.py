"""Free runs are found by place and by length; the reference is a search through a plain list of numbers."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from storage.tiers.free_runs import FreeRuns

SIZE = 400


def runs_of(free: set[int]) -> list[tuple[int, int]]:
    """Return the start and the end of each run of consecutive numbers."""
    groups = [
        [n for _, n in group] for _, group in groupby(enumerate(sorted(free)), key=lambda pair: pair[1] - pair[0])
    ]
    return [(group[0], group[-1] + 1) for group in groups]


def test_where_nothing_is_free_nothing_is_found() -> None:
    runs = FreeRuns()
    assert [runs.lowest_fit(1), runs.highest_fit(1), runs.shortest_fit(1), runs.longest()] == [None] * 4
    assert (len(runs), runs.free_bytes, runs.whole_units(4)) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_taken_crosses_a_barrier_only_if_it_is_longer(seed: int) -> None:
    rng, barrier = random.Random(seed), 20
    runs, free = FreeRuns(barrier), set(range(3, SIZE))
    runs.add(3, SIZE)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        cut = [
            (start, end)
            for piece in range(0, SIZE, barrier)
            for start, end in runs_of(free & set(range(piece, piece + barrier)))
        ]
        assert [runs[i] for i in range(len(runs))] == cut
        assert runs.free_bytes == len(free)
        length = rng.choice((1, 5, 12, barrier, barrier + 1, 50))
        whole = [start for start, end in runs_of(free) if end - start >= length]
        if rng.random() < 0.5:
            if length > barrier:
                start = runs.take_across(length)
                assert start == (whole[0] if whole else None)
            else:
                run = runs.lowest_fit(length)
                start = None if run is None else runs.cut(run, length, from_top=rng.random() < 0.5)
                assert (start is None) == all(end - begin < length for begin, end in cut)
                assert start is None or start // barrier == (start + length - 1) // barrier
            if start is not None:
                free -= set(range(start, start + length))
                taken.append((start, start + length))
        elif taken:
            start, end = taken.pop(rng.randrange(len(taken)))
            runs.add(start, end)
            free |= set(range(start, end))


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_campaign_agrees_with_a_search_through_all_numbers(seed: int) -> None:
    rng = random.Random(seed)
    runs, free = FreeRuns(), set(range(SIZE))
    runs.add(0, SIZE)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        expected = runs_of(free)
        assert [runs[i] for i in range(len(runs))] == expected
        assert runs.free_bytes == len(free)
        assert runs.whole_units(4) == sum((end - start) // 4 for start, end in expected)
        longest = runs.longest()
        if longest is not None:
            assert longest == max(range(len(expected)), key=lambda i: expected[i][1] - expected[i][0])
        length = rng.randint(1, 12)
        fitting = [i for i, (start, end) in enumerate(expected) if end - start >= length]
        found = (runs.lowest_fit(length), runs.highest_fit(length), runs.shortest_fit(length))
        if fitting:
            assert found == (fitting[0], fitting[-1], min(fitting, key=lambda i: expected[i][1] - expected[i][0]))
        else:
            assert found == (None, None, None)
        if fitting and rng.random() < 0.55:
            run, from_top = rng.choice(fitting), rng.random() < 0.5
            start = runs.cut(run, length, from_top=from_top)
            assert start == (expected[run][1] - length if from_top else expected[run][0])
            free -= set(range(start, start + length))
            taken.append((start, start + length))
        elif taken:
            start, end = taken.pop(rng.randrange(len(taken)))
            runs.add(start, end)
            free |= set(range(start, end))
