"""Kills or stops the daemon of a run of two ranks at random moments, starts it again, and compares with a quiet run.

`python -m tests.faults.restarts --kills N --seed S`. Ten kills make a round; each round trains with another stage and
placement. Prints a report in JSON at the end; the exit status is 1 if a rank ended, or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.moments import Moments, spread
from tests.integration.support.daemon import Daemon
from tests.integration.support.outliving import differences, make_plan, outlive
from tests.integration.support.outliving_run import Plan
from tests.integration.support.ranks import Launch

RANKS = 2
KILLS_OF_ROUND = 10
STEPS_PER_KILL = 3

_NVME, _HOST = {"device": "nvme"}, {"device": "cpu"}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "stage 3, nvme": {"stage": 3, "offload_param": _NVME, "offload_optimizer": _NVME},
    "stage 3, host": {"stage": 3, "offload_param": _HOST, "offload_optimizer": _HOST},
    "stage 2, optimizer on nvme": {"stage": 2, "offload_optimizer": _NVME},
    "stage 1, optimizer on host": {"stage": 1, "offload_optimizer": _HOST},
    "stage 0": {"stage": 0},
}


class Assassin:
    """Kills or stops the daemon once in each of the given steps, at the moments of moments.py."""

    def __init__(self, plan: Plan, steps: list[int], rng: random.Random) -> None:
        self._moments = Moments(plan, RANKS, steps, rng)

    @property
    def kills(self) -> list[list[str]]:
        """The step and the moment of each rank, for each kill."""
        return self._moments.struck

    def __call__(self, daemon: Daemon, _: Launch) -> None:
        """Kill the daemon if it is time. This is called every few milliseconds."""
        if not self._moments.has_come():
            return
        # Every third time an operator stops the daemon in order. Then a commit that is under way is finished.
        if len(self.kills) % 3 == 0:
            daemon.stop()
        else:
            daemon.kill()


def play(directory: Path, name: str, kills: int, rng: random.Random) -> dict[str, Any]:
    """Run one round, a quiet run and a run whose daemon is killed, and return the findings."""
    config = {"zero_optimization": dict(CONFIGS[name])}
    steps = STEPS_PER_KILL * kills + 2
    whole = outlive(make_plan(directory / "whole", config, steps=steps), RANKS)
    plan = make_plan(directory / "killed", config, steps=steps)
    assassin = Assassin(plan, spread(kills, STEPS_PER_KILL, rng), rng)
    began = time.monotonic()
    found: dict[str, Any] = {"config": name, "steps": steps, "kills": assassin.kills}
    try:
        results = outlive(plan, RANKS, assassin)
    except AssertionError as error:
        return found | {"error": str(error)}
    # There are fewer restarts than kills if a kill hit a daemon to which no rank had attached yet.
    outlived = [restart for result in results for restart in result["restarts"]]
    return found | {
        "restarts_of_ranks": [len(result["restarts"]) for result in results],
        "seconds_until_ranks_went_on": {
            "median": round(statistics.median(seconds for seconds, _, _ in outlived), 2),
            "most": round(max(seconds for seconds, _, _ in outlived), 2),
        },
        "commits_handed_over_again": sorted({again for _, _, again in outlived if again is not None}),
        "ranks_started_anew": 0,
        "differences": differences(results, whole),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run the rounds, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.restarts", description=__doc__)
    parser.add_argument("--kills", type=int, default=KILLS_OF_ROUND)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="restarts-") as temporary:
        for number, first in enumerate(range(0, args.kills, KILLS_OF_ROUND)):
            name = list(CONFIGS)[number % len(CONFIGS)]
            kills = min(KILLS_OF_ROUND, args.kills - first)
            rounds.append(play(Path(temporary) / str(number), name, kills, random.Random(f"{seed} {number}")))
    failed = [played for played in rounds if "error" in played or played["differences"]]
    total = sum(len(played["kills"]) for played in rounds)
    print(json.dumps({"seed": seed, "kills": total, "failed_rounds": len(failed), "rounds": rounds}, indent=2))
    raise SystemExit(1 if failed or total < args.kills else 0)


if __name__ == "__main__":
    main()
