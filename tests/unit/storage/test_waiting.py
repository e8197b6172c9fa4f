"""`wait_out` waits until its futures are done, even if it is cancelled twice, and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from storage.base.waiting import Alarm, finish_all, unlogged, wait_out
from tests.unit.storage.builders import opened


async def test_it_ends_when_all_is_done_however_often_it_is_cancelled() -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
    waiting = asyncio.ensure_future(wait_out(futures))
    for future in futures:
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        assert not waiting.done()
        future.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await wait_out(futures)


async def test_a_task_that_fails_after_the_caller_was_cancelled_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def fail() -> None:
        await go_on.wait()
        raise ValueError("a reader was closed")

    finishing = asyncio.ensure_future(finish_all([asyncio.ensure_future(fail())]))
    await asyncio.sleep(0)
    finishing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    del finishing
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


async def test_a_result_that_comes_after_two_cancellations_is_released(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        go_on = asyncio.Event()
        released: list[str] = []

        async def work() -> str:
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                # This simulates an operation that cannot be cancelled any more.
                await go_on.wait()
            return "result"

        watched = asyncio.ensure_future(engine.backing.watch.unless_stuck(work(), release=released.append))
        for _ in range(2):
            await asyncio.sleep(0.01)
            watched.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watched
        go_on.set()
        await asyncio.sleep(0.01)
        assert released == ["result"]


async def test_an_unlogged_failure_reaches_the_task_that_waits_and_never_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("the failure")

    with pytest.raises(ValueError, match="the failure"):
        await unlogged(asyncio.ensure_future(fail()))
    task = unlogged(asyncio.ensure_future(fail()))
    await asyncio.wait([task])
    del task
    gc.collect()
    assert caplog.messages == []


async def test_an_alarm_that_is_late_is_put_off_by_as_much() -> None:
    """The loop comes to it late if it stood still, and what would make the alarm needless may be unread then."""
    loop = asyncio.get_running_loop()
    rung: asyncio.Future[float] = loop.create_future()
    now = loop.time()
    late = Alarm(now - 1.2, lambda: rung.set_result(loop.time()))
    never = Alarm(now + 0.1, lambda: pytest.fail("it was cancelled"))
    never.cancel()

    assert await asyncio.wait_for(rung, 30) - now > 1.0
    late.cancel()
