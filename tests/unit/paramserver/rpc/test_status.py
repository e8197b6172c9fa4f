"""Work for a client that has gone is finished, and its failure is not logged."""

from __future__ import annotations

import asyncio
import gc

import pytest

from paramserver.rpc.status import finished


async def test_work_goes_on_when_its_client_has_gone_and_fails_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    go_on, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go_on.wait()
        done.set()
        raise ValueError("too late for anybody")

    caller = asyncio.ensure_future(finished(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    go_on.set()
    await done.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert caller.cancelled()
    assert caplog.messages == []


async def test_a_client_that_waits_gets_the_result_or_the_failure() -> None:
    async def half(number: int) -> int:
        return 1 // number

    assert await finished(half(1)) == 1
    with pytest.raises(ZeroDivisionError):
        await finished(half(0))
