"""The watch reports what blocks the event loop, and reports neither long awaits nor a machine that is short of CPU."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from paramserver.process import loop_watch
from paramserver.process.loop_watch import LoopWatch, StallLog
from tests.conftest import REPORTED_SECONDS, WatchedLoop

BUSY = "while True: pass"


def watched(main: Callable[[LoopWatch], Coroutine[Any, Any, None]]) -> tuple[LoopWatch, list[str]]:
    """Run `main` on a loop of its own, and return the watch and the stacks that the watch reported."""
    stacks: list[str] = []
    loop = uvloop.new_event_loop()
    with LoopWatch(loop, stacks.append) as watch:
        loop.run_until_complete(main(watch))
    loop.close()
    return watch, stacks


def spin(seconds: float) -> None:
    """Use that much CPU time of this thread, which takes longer on a busy machine."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def sleep_on_the_loop(watch: LoopWatch) -> None:
    """Block the loop until the watch has seen it, because on a busy machine the watch's thread may run late."""
    before = watch.stalls
    while watch.stalls == before:
        time.sleep(0.01)


async def spin_on_the_loop(watch: LoopWatch) -> None:
    before = watch.stalls
    while watch.stalls == before:
        spin(0.01)


async def work_in_pieces(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        spin(0.005)
        await asyncio.sleep(0)


def test_each_stall_is_counted_and_reported_once_with_what_blocked() -> None:
    async def stall_twice(watch: LoopWatch) -> None:
        await sleep_on_the_loop(watch)
        await asyncio.sleep(0.1)
        await spin_on_the_loop(watch)
        await asyncio.sleep(0.1)

    watch, stacks = watched(stall_twice)
    assert watch.stalls == len(stacks) == 2
    assert watch.longest_stall_seconds >= loop_watch.STALL_SECONDS
    assert "time.sleep(0.01)" in stacks[0] and "sleep_on_the_loop" in stacks[0]
    assert "in spin" in stacks[1]


def test_waiting_and_working_in_pieces_are_no_stalls() -> None:
    async def main(watch: LoopWatch) -> None:
        await asyncio.sleep(0.3)
        await work_in_pieces(0.3)

    watch, stacks = watched(main)
    assert (watch.stalls, watch.longest_stall_seconds, stacks) == (0, 0.0, [])


def test_a_machine_that_is_short_of_cpu_is_no_blocked_loop() -> None:
    """With sixteen busy processes on one CPU, the loop's thread waits for the CPU far longer than a stall lasts."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    crowd = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(16)]
    try:
        watch, stacks = watched(lambda watch: work_in_pieces(0.1))
        late, _ = watched(sleep_on_the_loop)
    finally:
        for process in crowd:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cpus)
    assert (watch.stalls, stacks) == (0, [])
    assert late.stalls == 1


def test_the_detector_of_the_tests_reports_what_blocks_its_loop_and_fails_what_does_for_very_long() -> None:
    reports: list[str] = []
    patient, impatient = WatchedLoop(reports), WatchedLoop(reports, failed_seconds=REPORTED_SECONDS)
    patient.run_until_complete(block(patient))
    blocked = r"(?s)was blocked for \d+\.\d+ s.*in sleep_on_the_loop"
    assert len(reports) == 1 and re.search(blocked, reports[0])
    with pytest.raises(pytest.fail.Exception, match=blocked):
        impatient.run_until_complete(block(impatient))
    impatient.run_until_complete(asyncio.sleep(2 * REPORTED_SECONDS))
    with pytest.raises(ZeroDivisionError):
        impatient.run_until_complete(fail_after_blocking(impatient))
    assert len(reports) == 1
    patient.close()
    impatient.close()


async def block(loop: WatchedLoop) -> None:
    assert loop.watch is not None
    await sleep_on_the_loop(loop.watch)


async def fail_after_blocking(loop: WatchedLoop) -> None:
    await block(loop)
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
