"""Workers are known by name to operators, and yield as far as they are told to; the loop's thread never does."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from storage.engine import Engine
from storage.optimizer_threads import OptimizerThreads
from storage.shard import DType
from tests.unit.storage.builders import Layout, Training, engine_config

WORKERS = {"data.0-read-0", "data.0-write-0", "data.0-read-che", "optimizer_0"}


def niceness() -> dict[str, int]:
    """Of each thread of this process, by the name that the kernel knows."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[(task / "comm").read_text().strip()] = int(fields[16])
    return found


@pytest.mark.parametrize("nice", [0, 7])
async def test_workers_have_their_names_and_niceness(tmp_path: Path, nice: int) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    engine = await Engine.open(engine_config(tmp_path, worker_nice=own + nice))
    try:
        await (await Training(engine, Layout(precision=DType.BFLOAT16)).begin()).step()
        found = niceness()
        assert {name: found.get(name) for name in WORKERS} == dict.fromkeys(WORKERS, own + nice)
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
    finally:
        await engine.close()


async def test_workers_go_on_where_the_kernel_refuses_their_niceness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    engine = await Engine.open(engine_config(tmp_path, worker_nice=19))
    try:
        training = await Training(engine, Layout()).begin()
        await training.step()
        await training.assert_at(1)
    finally:
        await engine.close()
    assert "worker_nice: cannot make a thread's niceness 19: Permission denied. Thread data.0-read-0" in caplog.text


async def cores_of(threads: OptimizerThreads) -> list[set[int]]:
    """Where each of them may run, seen while all of them do."""
    together = threading.Barrier(threads.count)

    def look() -> set[int]:
        together.wait(30)
        return os.sched_getaffinity(0)

    try:
        return await asyncio.gather(*(threads.run(look) for _ in range(threads.count)))
    finally:
        threads.close()


async def test_as_many_optimizer_threads_as_cores_have_one_each() -> None:
    own = os.sched_getaffinity(0)
    found = await cores_of(OptimizerThreads(len(own), nice=0))
    assert sorted(core for cores in found for core in cores) == sorted(own)
    assert os.sched_getaffinity(0) == own


@pytest.mark.parametrize("more", [-1, 1])
async def test_fewer_or_more_go_where_the_kernel_puts_them(more: int) -> None:
    own = os.sched_getaffinity(0)
    count = len(own) + more
    if count < 1:
        pytest.skip("one core: there is no smaller number of threads than that")
    assert await cores_of(OptimizerThreads(count, nice=0)) == [own] * count


async def test_they_go_on_where_the_kernel_refuses_to_bind_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert len(await cores_of(OptimizerThreads(2, nice=0))) == 2
    assert "an optimizer thread cannot be bound to core 1: Operation not permitted" in caplog.text
