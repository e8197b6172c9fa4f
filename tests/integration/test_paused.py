"""A daemon that is stopped for longer than its trainers wait for a sign of life, and goes on."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paramserver.contract.silence import ANSWER_SECONDS, PING_SECONDS
from tests.faults.pauses import Pause, play

# So long that each connection has broken, and longer than the time-out of sessions.
DAEMON = Pause(kind="daemon", seconds=PING_SECONDS + ANSWER_SECONDS + 1.0)
# By its name, the config, the number of ranks, and the pauses of a run.
RUNS = {
    "two-ranks": ("stage 3, nvme", 2, [DAEMON]),
    "one-rank": ("stage 2, optimizer on nvme", 1, [DAEMON]),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The findings of all runs, which nearly only wait, so they are played at the same time."""

    def one(name: str) -> dict[str, Any]:
        config, ranks, pauses = RUNS[name]
        directory: Path = tmp_path_factory.mktemp(name)
        found = play(directory, config, ranks, list(pauses), random.Random(7))
        return found | {"log": (directory / "paused" / "state.log").read_text()}

    with ThreadPoolExecutor(len(RUNS)) as pool:
        return dict(zip(RUNS, pool.map(one, RUNS), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_a_daemon_that_stood_still_is_waited_for(played: dict[str, dict[str, Any]], name: str) -> None:
    """The ranks resume their sessions: none is opened anew, and the run has the bits of one without a pause."""
    found, ranks = played[name], RUNS[name][1]

    assert "error" not in found, found["error"]
    assert found["differences"] == [] and found["last_words"] == []
    assert "the daemon stood still for" in found["log"]
    # A start also looks for earlier jobs in a short session, whose name is not that of a rank.
    assert found["log"].count("session opened by pid ") == ranks
    assert found["log"].count("taken up again") == ranks
