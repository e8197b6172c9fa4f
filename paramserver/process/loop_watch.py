"""A detector of blocked event loops: a thread schedules a callback on the loop, and notes when the callback is late.

This module owns the thread and the counts. It must never report a shortage of CPU as a blocked loop. So time is counted
in ticks in which this thread itself ran, less the waits for a CPU that cpu_shortage.py measures.

An idle loop and its watch wake up once each TICK_SECONDS, which takes 0.5 % of a CPU (measured in a virtual machine).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from paramserver.process.cpu_shortage import CpuShortage
from paramserver.process.logs import OwnText

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
STALL_SECONDS = 0.1
INNERMOST_FRAMES = 12
# The least time between two log lines about stalls of the event loop. Without it, a daemon that stalls all the time
# would fill the disk with log lines.
LOG_INTERVAL_SECONDS = 10.0


class LoopWatch:
    """A context that watches an event loop; enter it once, on the loop's thread.

    `on_stall` is called from the watching thread, once during each stall, with the stack of the loop's thread. A stall
    longer than `stall_seconds` plus one tick is always seen, a stall shorter than `stall_seconds` is never seen.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_stall: Callable[[str], None], *, stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.stalls = 0
        self.longest_stall_seconds = 0.0
        self._loop = loop
        self._on_stall = on_stall
        self._stall_ticks = stall_seconds / TICK_SECONDS
        self._alive = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._loop_ident = self._loop_native_id = 0

    def __enter__(self) -> LoopWatch:
        self._loop_ident, self._loop_native_id = threading.get_ident(), threading.get_native_id()
        self._loop.call_soon(self._alive.set)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        shortage = CpuShortage(self._loop_native_id)
        silent_ticks, short_ticks, noted = 0, 0.0, False
        while not self._stopped.wait(TICK_SECONDS):
            if self._alive.is_set():
                silent_ticks, short_ticks, noted = 0, 0.0, False
                shortage.restart()
                self._alive.clear()
                self._loop.call_soon_threadsafe(self._alive.set)
                continue
            silent_ticks += 1
            short_ticks += shortage.seconds(TICK_SECONDS) / TICK_SECONDS
            # A stall does not count the time in which the process had no CPU. Every thread waits a little for its CPU,
            # so only whole ticks of such waiting are subtracted.
            stalled_ticks = silent_ticks - round(short_ticks)
            if stalled_ticks < self._stall_ticks:
                continue
            self.longest_stall_seconds = max(self.longest_stall_seconds, stalled_ticks * TICK_SECONDS)
            if not noted:
                noted = True
                self._on_stall(self._stack())
                self.stalls += 1

    def _stack(self) -> str:
        frames = traceback.extract_stack(sys._current_frames()[self._loop_ident])
        return "".join(traceback.format_list(frames[-INNERMOST_FRAMES:]))


class StallLog:
    """A callback for LoopWatch that writes stalls of the event loop to the log.

    It logs the first stall of each LOG_INTERVAL_SECONDS with its stack, and counts the others.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def __call__(self, stack: str) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        log.warning(
            "the event loop has not answered for more than %g s (%d stalls since the last such line); it is here:\n%s",
            STALL_SECONDS,
            self._left_out + 1,
            OwnText(stack),
        )
        self._next, self._left_out = now + LOG_INTERVAL_SECONDS, 0
