"""The scripts on the page about models larger than memory do what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "large-models.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_its_scripts_run(tmp_path: Path) -> None:
    assert len(SCRIPTS) == 5
    running = []
    for number, script in enumerate(SCRIPTS):
        directory = tmp_path / str(number)
        directory.mkdir()
        # The scripts import this checkout's packages, also where another version is installed.
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        running.append(
            subprocess.Popen(
                [sys.executable, "-W", "error::DeprecationWarning", "-c", script],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        printed = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for number, process in enumerate(running):
        assert process.returncode == 0, printed[number]
    assert "0.weight [256, 64] from element 0 on: 16384" in printed[4]
