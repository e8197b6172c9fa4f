"""The example that uses the engine alone does what it says, also when it runs again on its own results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_trains_reads_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        command = [sys.executable, str(ROOT / "examples" / "storage_engine.py"), str(tmp_path / "state")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seen += [line for line in done.stdout.splitlines() if "weight" in line]
    assert seen == [
        "step 1: weight = [0.75, 0.75, 0.75] ...",
        "step 2: weight = [0.375, 0.375, 0.375] ...",
        "step 3: weight = [-0.0625, -0.0625, -0.0625] ...",
        "step 4: weight = [-0.53125, -0.53125, -0.53125] ...",
    ]
