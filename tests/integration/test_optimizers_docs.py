"""The script on the page about optimizers prints the output that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")


def test_its_script_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (printed,) = re.findall(r"print\(.*\)  # (.*)", script)
    # The script imports this checkout's packages, also where another version is installed.
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == printed
