"""Found by the campaign: a step that an engine has shown after a crash may be gone after a power loss that follows.

A process that is killed between writing a transaction to SQLite's WAL and syncing it leaves a whole transaction in the
page cache. The next engine finds it, and reports the step as committed and durable without having synced it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import shim
from tests.faults.power_loss import Mood, lose_power

ROOT = Path(__file__).parents[2]

TRAIN = """
from tests.faults.oracle import Oracle
from tests.faults.power_loss import SystemCall
from tests.faults.refusals import SHAPE
from tests.faults.worker import Trainer

async def live():
    oracle = Oracle([SHAPE])
    engine = await Engine.open(engine_config(state_dir))
    trainer = await Trainer.resume(engine, SHAPE, oracle, oracle.hear, random.Random(0))
    await trainer.step()
    shim.match("catalog.sqlite-wal", SystemCall.SYNC)
    shim.kill_at(1)
    await trainer.step()
"""
LOOK = """
async def live():
    engine = await Engine.open(engine_config(state_dir))
    job = engine.jobs.by_name["job"]
    print(job.newest, max(job.durable), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim")
def test_a_step_that_was_shown_as_durable_after_a_kill_survives_a_power_loss(tmp_path: Path) -> None:
    state_dir, log = tmp_path / "state", tmp_path / "undo.log"
    state_dir.mkdir()
    environment = shim.environment(shim.build(tmp_path))

    def run(program: str) -> list[str]:
        begin = f"""
import os, random, uvloop
from pathlib import Path
from storage.engine import Engine
from tests.faults import shim
from tests.faults.worker import engine_config
state_dir = Path({str(state_dir)!r})
shim.configure(state_dir, Path({str(log)!r}))
"""
        command = [sys.executable, "-c", f"{begin}{program}\nuvloop.run(live())"]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -9
        return done.stdout.split()

    run(TRAIN)
    shown = run(LOOK)
    lose_power(state_dir, log, random.Random(0), Mood.DROP)
    assert run(LOOK) == shown
