"""Walks in slices: all items come, the loop goes on between them, and many walks take no more of a turn than one."""

from __future__ import annotations

import asyncio
import time

import pytest

from storage.slices import SLICE_SECONDS, in_slices

# Of one item: more than all walks together may take of a turn.
LONG_SECONDS = 1.1 * SLICE_SECONDS


async def walk(count: int) -> list[int]:
    """Spends some time on each item, as a walk over many things does."""
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
    """Not for each slice of the longest one: a hundred clients would hold it up a hundred times as long."""
    walks = [asyncio.ensure_future(walk(5)) for _ in range(6)]
    turns = 0
    while not all(each.done() for each in walks):
        turns += 1
        await asyncio.sleep(0)
    assert all(each.result() == list(range(5)) for each in walks)
    # The end of a walk needs no turn of its own.
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
