"""Ranks that no launcher has numbered share one daemon of their node, and each knows its number there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/integration/support/spawned_ranks.py"


@pytest.mark.parametrize("how", ["group", "variables"])
def test_ranks_of_a_node_share_its_daemon(tmp_path: Path, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(rank["rank"], rank["local"]) for rank in facts] == [(0, [0, 0]), (1, [1, 1])]
    assert facts[0]["daemon"] == facts[1]["daemon"]
