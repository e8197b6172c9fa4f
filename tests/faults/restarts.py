"""Kills or stops the daemon of a run of two ranks at random moments, starts it again, and compares with a quiet run.

`python -m tests.faults.restarts --kills N --seed S`. Ten kills make a round; each round trains with another stage and
placement. Prints a report in JSON at the end; the exit status is 1 if a rank ended, or a bit differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


_COMMITTING = ("step", "after step")


class Assassin:
    """Kills or stops the daemon once in each of the given steps.

    Every other kill comes at a random time of the step. The others come while a rank hands gradients over or commits,
    because in small models that takes so little time that random kills would miss it.
    """

    def __init__(self, plan: Plan, steps: list[int], rng: random.Random) -> None:
        # For each kill, the step and the moment of each rank.
        self.kills: list[list[str]] = []
        self._files = [plan.progress_file(rank) for rank in range(RANKS)]
        self._steps = sorted(steps)
        self._rng = rng
        self._seen: dict[int, float] = {}
        self._due: float | None = None

    def __call__(self, daemon: Daemon, _: Launch) -> None:
        """Read the progress of the ranks, and kill the daemon if it is time. This is called every few milliseconds."""
        places = [self._place(file) for file in self._files]
        step = min(step for step, _ in places)
        now = time.monotonic()
        self._seen.setdefault(step, now)
        there = bool(self._steps) and step >= self._steps[0]
        commits = any(moment in _COMMITTING for _, moment in places)
        if there and self._due is None and len(self.kills) % 2 and commits:
            self._due = now
        elif there and self._due is None and len(self.kills) % 2 == 0:
            # The median of all steps' durations is that of a step without a kill.
            times = sorted(self._seen.values())
            durations = [later - earlier for earlier, later in itertools.pairwise(times)]
            self._due = now + self._rng.uniform(0.0, statistics.median(durations) if durations else 0.1)
        if self._due is not None and now >= self._due:
            # Every third time an operator stops the daemon in order. Then a commit that is under way is finished.
            if len(self.kills) % 3 == 2:
                daemon.stop()
            else:
                daemon.kill()
            self.kills.append([f"step {step}: {moment}" for step, moment in places])
            self._steps.pop(0)
            self._due = None

    @staticmethod
    def _place(file: Path) -> tuple[int, str]:
        """Return the step and the moment that a rank has reached."""
        lines = file.read_text().splitlines() if file.exists() else []
        step, _, moment = lines[-1].partition(" ") if lines else ("0", "", "starting")
        return int(step), moment


def play(directory: Path, name: str, kills: int, rng: random.Random) -> dict[str, Any]:
    """Run one round, a quiet run and a run whose daemon is killed, and return the findings."""
    config = {"zero_optimization": dict(CONFIGS[name])}
    steps = STEPS_PER_KILL * kills + 2
    whole = outlive(make_plan(directory / "whole", config, steps=steps), RANKS)
    plan = make_plan(directory / "killed", config, steps=steps)
    # The chosen steps are never neighbours, so that the run has gone on before the next kill.
    chosen = [1 + STEPS_PER_KILL * index + rng.randrange(STEPS_PER_KILL - 1) for index in range(kills)]
    assassin = Assassin(plan, chosen, rng)
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
