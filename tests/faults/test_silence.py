"""A short round of the campaign that silences nodes, links, daemons and trainers; see silence.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.common.namespaces import why_not_switched
from tests.faults.partial import CELLS
from tests.faults.silence import SilentRound, Strike

# The first two end a start each. The others may come too late, because the run is short.
STRIKES = ("long deaf", "long node", "mute", "kill daemon")

pytestmark = pytest.mark.skipif(why_not_switched() is not None, reason=f"no namespaces: {why_not_switched()}")


@pytest.mark.campaigns
def test_what_the_table_of_silence_says_follows_each_strike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(STRIKES)
    monkeypatch.setattr(Strike, "choose", lambda nodes, rng: Strike(kind=next(kinds), node=1, seconds=1.0))
    silent = SilentRound(tmp_path / "round", CELLS[0], random.Random(1), steps=24, nodes=2)
    found = silent.play(len(STRIKES))
    assert "error" not in found, found["error"]
    assert found["kills"][:2] == list(STRIKES[:2])
