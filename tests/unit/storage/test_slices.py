"""Walks in slices yield all items, let the event loop run in between, and share the time of a turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from storage.base.slices import SLICE_SECONDS, in_slices

# The time that a walk spends on one item. It is more than all walks together may take in one turn.
LONG_SECONDS = 1.1 * SLICE_SECONDS


async def walk(count: int) -> list[int]:
    """Spend LONG_SECONDS on each item, and return the items."""
    seen = []
    async for item in in_slices(range(count)):
        seen.append(item)
        until = time.monotonic() + LONG_SECONDS
        while time.monotonic() < until:
            pass
    return seen


async def test_a_walk_over_nothing_ends() -> None:
    with pytest.raises(StopAsyncIteration):
        await anext(in_slices([]))


async def test_the_loop_has_a_turn_for_each_slice_of_all_walks() -> None:
    """If each walk had a slice in each turn, a hundred clients would block the event loop a hundred times as long."""
    walks = [asyncio.ensure_future(walk(5)) for _ in range(6)]
    turns = 0
    while not all(each.done() for each in walks):
        turns += 1
        await asyncio.sleep(0)
    assert all(each.result() == list(range(5)) for each in walks)
    # Each slice needs a turn, but the end of a walk needs none.
    assert turns >= 5 * 6 - 6


async def test_a_walk_that_is_cancelled_holds_up_no_other() -> None:
    walks = [asyncio.ensure_future(walk(4)) for _ in range(4)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    walks[1].cancel()
    walks[2].cancel()
    done = await asyncio.gather(*walks, return_exceptions=True)
    assert done[0] == done[3] == [0, 1, 2, 3]
    assert all(isinstance(done[i], asyncio.CancelledError) for i in (1, 2))


def test_each_loop_has_turns_of_its_own() -> None:
    for _ in range(3):
        assert asyncio.run(walk(3)) == [0, 1, 2]
