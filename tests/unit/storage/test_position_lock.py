"""A lock that its tasks hold in the order of their positions, also when tasks fail or are cancelled while they wait."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from storage.base.position_lock import PositionLock


async def nothing() -> None:
    """Do nothing while another task has the lock."""


async def test_the_turn_goes_to_the_lowest_position() -> None:
    turns, order = PositionLock(), []

    async def take(position: float) -> None:
        async with turns.at(position):
            order.append(position)
            await asyncio.sleep(0)

    waiting = [asyncio.ensure_future(take(position)) for position in (9, 5, 7, 5.5, 1)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [1, 5.5, 7, 9], "the first to come has no turn before the others that the same event wakes"


async def test_a_turn_gives_way_to_lower_positions_only() -> None:
    turns, order = PositionLock(), []

    async def take(name: str, position: float) -> None:
        async with turns.at(position) as give_way:
            for number in range(3):
                await give_way(partial(note, f"{name} waits"))
                order.append(f"{name}{number}")
                if order == ["a0"]:
                    others.extend(asyncio.ensure_future(take(*other)) for other in (("b", 5), ("c", 9), ("d", 1)))
                await asyncio.sleep(0)

    async def note(what: str) -> None:
        order.append(what)

    others: list[asyncio.Future[None]] = []
    await take("a", 5)
    await asyncio.gather(*others)
    assert order == ["a0", "a waits", "d0", "d1", "d2", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]


@pytest.mark.parametrize("returns_first", [False, True])
async def test_one_that_fails_while_it_gives_way_does_not_hold_up_the_rest(returns_first: bool) -> None:
    turns, order = PositionLock(), []
    has_passed = asyncio.Event()

    async def fail() -> None:
        if returns_first:
            # In this case the task gets the lock back before its function raises.
            await has_passed.wait()
        raise ValueError("a mistake")

    async def take(position: float) -> None:
        async with turns.at(position):
            order.append(position)
        has_passed.set()

    async def give_way() -> None:
        async with turns.at(5) as give_way:
            others.extend(asyncio.ensure_future(take(position)) for position in (1, 9))
            await asyncio.sleep(0)
            await give_way(fail)

    others: list[asyncio.Future[None]] = []
    with pytest.raises(ValueError, match="a mistake"):
        await give_way()
    await asyncio.gather(*others)
    assert order == [1, 9]
    async with turns.at(0):
        order.append(0)


async def test_one_that_goes_while_it_gives_way_does_not_pass_on_what_is_anothers() -> None:
    turns, order = PositionLock(), []

    async def take(name: str, position: float, rounds: int) -> None:
        async with turns.at(position) as give_way:
            for number in range(rounds):
                await give_way(nothing)
                order.append(f"{name}{number}")
                if order == ["a0"]:
                    others.extend(asyncio.ensure_future(take(*other)) for other in (("b", 1, 3), ("c", 2, 2)))
                await asyncio.sleep(0)

    others: list[asyncio.Future[None]] = []
    gone = asyncio.ensure_future(take("a", 5, 9))
    while "b0" not in order:
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, *others, return_exceptions=True)
    assert order == ["a0", "b0", "b1", "b2", "c0", "c1"]
    async with turns.at(0):
        order.append("free")


async def test_a_turn_that_is_given_to_one_who_has_gone_passes_on() -> None:
    turns, order = PositionLock(), []

    async def take(position: float) -> None:
        async with turns.at(position):
            order.append(position)

    async with turns.at(0):
        waiting = [asyncio.ensure_future(take(position)) for position in (1, 2)]
        await asyncio.sleep(0)
    # The first task has got the lock, but has not run since. It is cancelled now.
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [2]
    async with turns.at(0):
        order.append(0)
