"""Worker threads have names and the configured niceness, and the event loop's thread keeps its niceness."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.base.shard import DType
from storage.engine import Engine
from tests.unit.storage.builders import Layout, Training, engine_config

WORKERS = {"data.0-read-0", "data.0-write-0", "data.0-read-che", "optimizer_0"}


def niceness() -> dict[str, int]:
    """Return the niceness of each thread of this process, by the thread's name in the kernel."""
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
