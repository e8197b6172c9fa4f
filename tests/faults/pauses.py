"""Stops daemons and trainers of a run with SIGSTOP at random moments, wakes them, and compares with a quiet run.

`python -m tests.faults.pauses --pauses N --seed S`. Three pauses make a round; each round trains with the next stage
and placement, on one rank and on two in turn. A pause hits

- the daemon, for 2 to 60 s: the run goes on, whatever the time;
- all ranks, for less than the daemon's heartbeat time-out: the run goes on;
- all ranks, for longer: each rank goes on in another session, or ends with the one error that docs/silence.md names for
  this. Then the job is started again, and goes on from its last commit;
- one of two ranks, for longer: each rank ends with an error, and the job goes on when it is started again.

Prints a report in JSON at the end; the exit status is 1 if a rank ended otherwise, did not end, or a bit differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.moments import Moments, spread
from tests.faults.restarts import CONFIGS
from tests.integration.support.daemon import Daemon
from tests.integration.support.outliving import MODULE, make_plan, outlive, start_daemon
from tests.integration.support.outliving_run import Plan
from tests.integration.support.ranks import END_SECONDS, Launch

PAUSES_OF_ROUND = 3
STEPS_APART = 4
HEARTBEAT_TIMEOUT_SECONDS = 4.0
DAEMON_SECONDS = (2.0, 5.0, 8.0, 9.0, 12.0, 15.0, 30.0, 60.0)
KINDS = ("daemon", "ranks", "ranks for long", "rank for long")
# Every rank that ends says one of these, and nothing else.
LAST_WORDS = (
    "SessionEndedError: this process was silent, or its connection broken, for longer than",
    "StepAbortedError: rank ",
    "CollectiveError: ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """One pause: what is stopped, and for how long."""

    kind: str
    seconds: float

    @classmethod
    def choose(cls, kind: str, rng: random.Random) -> Pause:
        match kind:
            case "daemon":
                return cls(kind=kind, seconds=rng.choice(DAEMON_SECONDS))
            case "ranks":
                return cls(kind=kind, seconds=rng.uniform(0.1, HEARTBEAT_TIMEOUT_SECONDS / 2))
            case _:
                return cls(kind=kind, seconds=HEARTBEAT_TIMEOUT_SECONDS + rng.uniform(1.5, 4.0))

    @property
    def may_end(self) -> bool:
        """Whether the ranks may end because of the pause."""
        return "for long" in self.kind


class Pauser:
    """Stops processes of a run at the moments of moments.py, and wakes them."""

    def __init__(self, moments: Moments, pauses: list[Pause], rng: random.Random) -> None:
        self.made: list[Pause] = []
        self._moments = moments
        self._pauses = pauses
        self._rng = rng
        self._stopped: list[Any] = []
        self._until = 0.0

    def __call__(self, daemon: Daemon, launch: Launch) -> None:
        """Do what is due. This is called every few milliseconds."""
        if self._stopped:
            if time.monotonic() >= self._until:
                self.wake()
        elif self._pauses and self._moments.has_come():
            pause = self._pauses.pop(0)
            self.made.append(pause)
            self._stopped = self._processes(pause, daemon, launch)
            for process in self._stopped:
                process.send_signal(signal.SIGSTOP)
            self._until = time.monotonic() + pause.seconds

    def wake(self) -> None:
        """Have what is stopped go on."""
        for process in self._stopped:
            process.send_signal(signal.SIGCONT)
        self._stopped = []

    def _processes(self, pause: Pause, daemon: Daemon, launch: Launch) -> list[Any]:
        if pause.kind == "daemon":
            return [daemon.process]
        return [self._rng.choice(launch.ranks)] if pause.kind == "rank for long" else list(launch.ranks)


def play(directory: Path, name: str, ranks: int, pauses: list[Pause], rng: random.Random) -> dict[str, Any]:
    """Run one round, a quiet run and one with pauses, and return the findings."""
    config = {"zero_optimization": dict(CONFIGS[name])}
    daemon = {"heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS}
    options: dict[str, Any] = {"steps": STEPS_APART * len(pauses) + 2, "only_trains": True, "daemon": daemon}
    whole = outlive(make_plan(directory / "whole", config, **options), ranks)
    plan = make_plan(directory / "paused", config, goes_on=True, **options)
    moments = Moments(plan, ranks, spread(len(pauses), STEPS_APART, rng), rng)
    pauser = Pauser(moments, list(pauses), rng)
    began = time.monotonic()
    found: dict[str, Any] = {"config": name, "ranks": ranks, "moments": moments.struck}
    try:
        found["last_words"] = _train(plan, ranks, pauser)
    except AssertionError as error:
        found["error"] = str(error)[-6000:]
    found["pauses"] = [asdict(pause) for pause in pauser.made]
    if "error" not in found:
        results = [torch.load(plan.results_file(rank)) for rank in range(ranks)]
        found["differences"] = _differences(results, whole)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _train(plan: Plan, ranks: int, pauser: Pauser) -> list[str]:
    """Train to the end, and return the errors with which ranks ended before they were started again."""
    directory = Path(plan.directory)
    last_words: list[str] = []
    plans = directory / "plans.json"
    plans.write_text(json.dumps([asdict(plan)]))
    daemon = start_daemon(plan)
    try:
        while True:
            with Launch(MODULE, ranks, (plans,), directory) as launch:
                deadline = time.monotonic() + END_SECONDS
                while any(rank.poll() is None for rank in launch.ranks):
                    assert time.monotonic() < deadline, f"a rank does not end\n{launch.output()}\n{daemon.log}"
                    pauser(daemon, launch)
                    time.sleep(0.005)
                codes = [rank.poll() for rank in launch.ranks]
                output = launch.output()
            if codes == [0] * ranks:
                return last_words
            last_words += _check_end(codes, pauser, output, daemon)
    finally:
        pauser.wake()
        daemon.kill()


def _check_end(codes: list[int | None], pauser: Pauser, output: str, daemon: Daemon) -> list[str]:
    """Check that the ranks may have ended, and return what they have said."""
    shown = f"exit codes {codes} after {pauser.made}\n{output}\n{daemon.log}"
    assert pauser.made and pauser.made[-1].may_end, shown
    said = [line for line in output.splitlines() if any(words in line for words in LAST_WORDS)]
    assert said, shown
    return said


def _differences(results: list[Mapping[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """Return the names of the weights and moments that differ at the end; the losses are those since the last start."""
    return [
        f"rank {rank}: {kind} of {name}"
        for rank, (one, other) in enumerate(zip(results, expected, strict=True))
        for kind in ("weights", "moments")
        for name, value in one[kind].items()
        if not torch.equal(value, other[kind][name])
    ]


def main() -> None:
    """Run the rounds, and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.pauses", description=__doc__)
    parser.add_argument("--pauses", type=int, default=PAUSES_OF_ROUND)
    parser.add_argument("--seed", type=int, default=None, help="of all choices; a random one by default")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", file=sys.stderr)
    rounds: list[dict[str, Any]] = []
    left = args.pauses
    with tempfile.TemporaryDirectory(prefix="pauses-") as temporary:
        while left > 0:
            number, rng = len(rounds), random.Random(f"{seed} {len(rounds)}")
            ranks = 1 + number % 2
            kinds = KINDS if ranks > 1 else KINDS[:-1]
            pauses = [Pause.choose(rng.choice(kinds), rng) for _ in range(min(PAUSES_OF_ROUND, left))]
            name = list(CONFIGS)[number % len(CONFIGS)]
            rounds.append(play(Path(temporary) / str(number), name, ranks, pauses, rng))
            print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
            left -= len(pauses)
    failed = [played for played in rounds if "error" in played or played["differences"]]
    total = Counter(pause["kind"] for played in rounds for pause in played["pauses"])
    print(json.dumps({"seed": seed, "pauses": total, "failed_rounds": len(failed), "rounds": rounds}, indent=2))
    raise SystemExit(1 if failed or total.total() < args.pauses else 0)


if __name__ == "__main__":
    main()
