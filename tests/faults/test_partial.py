"""A short round of the campaign that strikes a job on two nodes; see partial.py."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.partial import CELLS, Round


def test_no_step_that_was_called_safe_is_lost(tmp_path: Path) -> None:
    found = Round(tmp_path / "round", CELLS[0], random.Random(1), steps=16).play(2)
    assert "error" not in found, found["error"]
    assert len(found["kills"]) == 2
