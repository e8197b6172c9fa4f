"""What a job has after a crash at this moment, by a copy of the present files."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from storage.base import syscalls
from storage.engine import Engine
from tests.unit.storage.builders import Training, opened


@asynccontextmanager
async def crashed(engine: Engine) -> AsyncIterator[Engine]:
    """Yield an engine that opens a copy of the present files of another one."""
    state_dir = engine.config.state_dir
    image = state_dir.with_name(state_dir.name + "-image")
    shutil.copytree(state_dir, image)
    try:
        async with opened(image) as found:
            yield found
    finally:
        shutil.rmtree(image)


async def assert_survives_a_crash(training: Training, step: int | None) -> None:
    """Check that the job is at `step` (None: is gone) in an engine that opens a copy of the present files."""
    async with crashed(training.engine) as engine:
        if step is None:
            assert engine.jobs.by_name == {}
            return
        again = await Training(engine, training.layout).open()
        assert again.job.newest == step
        assert again.job.retained[step].client_states == {0: str(step).encode()}
        await again.assert_at(step)
        await again.step()
        await again.assert_at(step + 1)


async def assert_survives_a_crash_at(training: Training, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the same as `assert_survives_a_crash` while the test holds `sync_data`; the copy's engine does not sync."""
    with monkeypatch.context() as patch:
        patch.setattr(syscalls, "sync_data", lambda *_: None)
        await assert_survives_a_crash(training, step)
