"""The campaign of hostile files, shortened: every format is opened, and nothing does harm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults.hostile_specimens import OPENERS

ROOT = Path(__file__).parents[2]


def test_fifty_files_do_no_harm() -> None:
    command = [sys.executable, "-m", "tests.faults.hostile_files", "--files=50", "--seed=1", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["findings"] == []
    assert done.returncode == 0 and report["files"] == 50
    assert set(report["outcomes"]) == set(OPENERS)
    assert sum(outcomes.get("refused", 0) for outcomes in report["outcomes"].values()) > 25
