"""What every test gets: the daemon's kind of event loop, and a failure when something blocks that loop."""

from __future__ import annotations

import sys
import threading
import traceback
from asyncio import Future
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TypeVar

import pytest
import uvloop

T = TypeVar("T")

TICK_SECONDS = 0.05
BLOCKED_TICKS = 20


class LoopWatchdog:
    """A thread that asks a running loop for a sign of life at each tick and keeps the stack of what blocks it.

    Time is counted in ticks that the watchdog itself got to run, not read from a clock: on a starved machine both
    threads wait, and no test fails for its neighbours.
    """

    def __init__(self, loop: uvloop.Loop) -> None:
        self.report: str | None = None
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._alive = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def __enter__(self) -> LoopWatchdog:
        self._loop.call_soon(self._alive.set)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        silent_ticks = 0
        while self.report is None and not self._stopped.wait(TICK_SECONDS):
            if self._alive.is_set():
                silent_ticks = 0
                self._alive.clear()
                self._loop.call_soon_threadsafe(self._alive.set)
                continue
            silent_ticks += 1
            if silent_ticks >= BLOCKED_TICKS:
                self.report = (
                    f"the event loop was blocked for more than {BLOCKED_TICKS * TICK_SECONDS:g} s (move the call to a "
                    f"thread: asyncio.to_thread); it was here:\n{self._stack()}"
                )

    def _stack(self) -> str:
        frames = traceback.extract_stack(sys._current_frames()[self._loop_thread])
        loop_frame = max(i for i, frame in enumerate(frames) if frame.name == "run_until_complete")
        return "".join(traceback.format_list(frames[loop_frame + 1 :]))


class WatchedLoop(uvloop.Loop):
    """A uvloop that fails the test or fixture that blocked it; what the test itself raised goes first."""

    def run_until_complete(self, future: Generator[object, None, T] | Awaitable[T] | Future[T]) -> T:
        """Runs `future` under a watchdog; raises pytest's failure when a callback held the loop for too long."""
        with LoopWatchdog(self) as watchdog:
            result = super().run_until_complete(future)
        if watchdog.report is not None:
            pytest.fail(watchdog.report, pytrace=False)
        return result


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Async tests run on what the daemon runs on."""
    return {"uvloop": WatchedLoop}
