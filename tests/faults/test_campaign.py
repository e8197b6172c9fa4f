"""The campaign, shortened: it reaches all failpoints, finds nothing in the engine, and finds deliberate faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.base.failpoints import Failpoint

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim")


def campaign(keep: Path, *flags: str) -> dict[str, Any]:
    """Run a campaign in processes of its own, and return its report."""
    command = [sys.executable, "-m", "tests.faults.campaign", f"--keep={keep}", "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(report["failures"])
    return report


def test_no_kill_and_no_power_loss_leaves_anything_but_whole_committed_steps(tmp_path: Path) -> None:
    report = campaign(tmp_path / "kept", "--rounds=25", "--seed=1")
    assert report["failures"] == []
    assert {f"failpoint: {failpoint.value}" for failpoint in Failpoint} <= report["kills"].keys()
    assert report["kills"]["time"] > 0
    # The shim sees the calls of the engine and of SQLite, and power losses undo some of their writes.
    kills = " ".join(report["kills"])
    assert "write data." in kills and "catalog.sqlite" in kills
    assert report["fates"].keys() == {"kept", "dropped", "torn"}
    assert report["commits"] > 25


@pytest.mark.campaigns
def test_the_campaign_fails_an_engine_that_does_not_sync_its_data(tmp_path: Path) -> None:
    report = campaign(tmp_path / "kept", "--rounds=12", "--seed=1", "--mutant=sync-nothing")
    assert report["failures"]
    first = report["failures"][0]
    assert "damaged, stale or of another shard" in "".join(first["errors"])
    assert (Path(first["kept"]) / "errors.txt").exists()
    assert first["repeat"].startswith("python -m tests.faults.campaign --seed 1 --first ")


@pytest.mark.campaigns
@pytest.mark.parametrize("mutant", ["forget-readers", "forget-new-versions", "forget-pins", "forget-ranges"])
def test_the_campaign_fails_an_engine_that_forgets_to_give_something_back(tmp_path: Path, mutant: str) -> None:
    # Eight rounds find about every second mutant, because the moments of some kills are random.
    for seed in range(1, 17):
        report = campaign(tmp_path / f"kept-{seed}", "--rounds=8", f"--seed={seed}", f"--mutant={mutant}")
        if report["failures"]:
            break
    assert report["failures"]
    assert "is not what the jobs explain" in "".join(report["failures"][0]["errors"])
