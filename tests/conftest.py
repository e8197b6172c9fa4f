"""What every test gets: the daemon's kind of event loop, and a failure when something blocks that loop."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TypeVar

import pytest
import uvloop

from paramserver.loop_watch import LoopWatch

T = TypeVar("T")

# What the tests themselves compute on the loop, as their reference, fits into this, and what a virtual machine is kept
# from its processors for, which no guest can see: 0.25 s were too few for one whose host was busy. The daemon's loop
# does nothing but the daemon's work, and is held to loop_watch.STALL_SECONDS by the campaign of requests
# (tests/faults/fuzz.py).
BLOCKED_SECONDS = 0.5


class WatchedLoop(uvloop.Loop):
    """A uvloop that fails the test or fixture that blocked it; what the test itself raised goes first."""

    def run_until_complete(self, future: Generator[object, None, T] | Awaitable[T] | Future[T]) -> T:
        """Runs `future` under a watchdog; raises pytest's failure when a callback held the loop for too long."""
        stacks: list[str] = []

        def note(stack: str) -> None:
            # A loop that waits in its own poll was kept from the processor, and by nobody's call.
            if not stack.splitlines()[-2].endswith("in run_until_complete"):
                stacks.append(stack)

        with LoopWatch(self, note, stall_seconds=BLOCKED_SECONDS) as watch:
            result = super().run_until_complete(future)
        if stacks:
            pytest.fail(
                f"the event loop was blocked for {watch.longest_stall_seconds:.2f} s (move the call to a thread: "
                f"asyncio.to_thread); it was here:\n{stacks[0]}",
                pytrace=False,
            )
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this suite."""
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="tests/integration/test_matrix.py: each training at each place and world size, not a part of them",
    )


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Async tests run on what the daemon runs on."""
    return {"uvloop": WatchedLoop}
