"""The watch sees what blocks the loop, and nothing else: neither long awaits nor a machine that is short of CPU."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from paramserver import loop_watch
from paramserver.loop_watch import LoopWatch, StallLog
from tests.conftest import BLOCKED_SECONDS, WatchedLoop

BUSY = "while True: pass"


def watched(main: Coroutine[Any, Any, None]) -> tuple[LoopWatch, list[str]]:
    """Runs `main` on a loop of its own; the watch, and the stacks that it reported."""
    stacks: list[str] = []
    loop = uvloop.new_event_loop()
    with LoopWatch(loop, stacks.append) as watch:
        loop.run_until_complete(main)
    loop.close()
    return watch, stacks


def spin(seconds: float) -> None:
    """Takes CPU time, however long that takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def sleep_on_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def work_in_pieces(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        spin(0.005)
        await asyncio.sleep(0)


def test_each_stall_is_counted_and_reported_once_with_what_blocked() -> None:
    async def stall_twice() -> None:
        await sleep_on_the_loop(0.3)
        await asyncio.sleep(0.1)
        spin(0.3)
        await asyncio.sleep(0.1)

    watch, stacks = watched(stall_twice())
    assert watch.stalls == len(stacks) == 2
    assert watch.longest_stall_seconds >= 0.15
    assert "time.sleep(seconds)" in stacks[0] and "sleep_on_the_loop" in stacks[0]
    assert "in spin" in stacks[1]


def test_waiting_and_working_in_pieces_are_no_stalls() -> None:
    async def main() -> None:
        await asyncio.sleep(0.3)
        await work_in_pieces(0.3)

    watch, stacks = watched(main())
    assert (watch.stalls, watch.longest_stall_seconds, stacks) == (0, 0.0, [])


def test_a_machine_that_is_short_of_cpu_is_no_blocked_loop() -> None:
    """Sixteen busy processes on one CPU: the loop's thread waits for its turn far longer than a stall lasts."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(16)]
    try:
        watch, stacks = watched(work_in_pieces(0.1))
        late, _ = watched(sleep_on_the_loop(0.5))
    finally:
        for process in crowd:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cpus)
    assert (watch.stalls, stacks) == (0, [])
    assert late.stalls == 1


def test_the_detector_of_the_tests_fails_what_blocks_its_loop() -> None:
    loop = WatchedLoop()
    with pytest.raises(pytest.fail.Exception, match=r"(?s)was blocked for 0\.\d+ s.*in sleep_on_the_loop"):
        loop.run_until_complete(sleep_on_the_loop(2 * BLOCKED_SECONDS))
    loop.run_until_complete(asyncio.sleep(2 * BLOCKED_SECONDS))
    with pytest.raises(ZeroDivisionError):
        loop.run_until_complete(fail_after_blocking())
    loop.close()


async def fail_after_blocking() -> None:
    await sleep_on_the_loop(2 * BLOCKED_SECONDS)
    raise ZeroDivisionError


def test_the_log_says_what_blocked_and_cannot_be_flooded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = StallLog()
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            log("a stack")
        now += loop_watch.LOG_INTERVAL_SECONDS
        log("another stack")
    first, second = caplog.messages
    assert "1 stalls since the last such line" in first and "a stack" in first
    assert "1000 stalls" in second and "another stack" in second
