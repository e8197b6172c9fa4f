"""Ray Train runs the ranks of the example over a daemon that an actor holds, and a second run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.forked import ROOT

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (pip install 'ray[train]')")


def train(tmp_path: Path, steps: int) -> dict[str, Any]:
    """Run the example up to a step, and return the last line of its output."""
    script = ROOT / "deploy" / "ray" / "train_on_ray.py"
    budgets = ["--host-budget", "64MiB", "--nvme-budget", "256MiB"]
    places = ["--state-dir", str(tmp_path / "state"), "--storage", str(tmp_path / "ray")]
    own = {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(
        [sys.executable, script, "--steps", str(steps), *budgets, *places],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(600)
def test_two_workers_train_and_a_second_run_resumes(tmp_path: Path) -> None:
    first, second = train(tmp_path, 3), train(tmp_path, 5)

    assert (first["resumed_step"], first["step"], second["resumed_step"], second["step"]) == (0, 3, 3, 5)
    assert first["data_plane"] == second["data_plane"] == "arena"
    assert first["daemons"] == second["daemons"] == [0]
    assert not (tmp_path / "state" / "paramserver.sock").exists()
