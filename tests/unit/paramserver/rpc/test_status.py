"""Work for a client that has gone is finished, its failure is not logged, and a refused call leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paramserver.contract.channel import channel_to
from paramserver.rpc.status import answering_errors, finished
from paramserver.security.gate import Context
from storage.base.errors import NotFoundError


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


@pytest.mark.parametrize("is_aborted", [False, True])
async def test_a_refused_call_leaves_no_circle_of_objects_behind(tmp_path: Path, is_aborted: bool) -> None:
    """gRPC keeps the error of a refusal with the call's state. The error's traceback would keep the frames that know
    the call, until the collector finds the circle."""

    async def refuse(_: bytes, context: Context) -> None:
        async with answering_errors(context, "Refuse"):
            if is_aborted:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is nothing")
            raise NotFoundError("there is nothing")

    address = f"unix:{tmp_path}/socket"
    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    server.add_registered_method_handlers("Test", handlers)
    server.add_insecure_port(address)
    await server.start()
    gc.collect()
    gc.disable()
    try:
        with channel_to(address) as channel:
            call: Any = channel.unary_unary("/Test/Refuse")
            for _ in range(20):
                with pytest.raises(grpc.RpcError, match="there is nothing"):
                    await asyncio.to_thread(call, b"")
        await server.stop(None)
        left = [thing for thing in gc.get_objects() if type(thing).__name__ == "_ServicerContext"]
    finally:
        gc.enable()
    # The last call may still be ending.
    assert len(left) <= 1
