"""Jobs on the simulated device that are killed and resumed, or that go on with another number of ranks.

A chain is a job in several launches. Under each schedule of lag, it has the bits of the chain without lag; a chain that
is killed has those of one that is not.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.device.matrix_cells import PROMPT, latenesses
from tests.device.matrix_rank import Task, tasks_as_json
from tests.device.training_on_lanes import Lateness
from tests.integration.support.elastic_run import job_sessions
from tests.integration.support.matrix_cells import run_of
from tests.integration.support.ranks import Launch
from tests.integration.support.waiting import wait_until

MODULE = "tests.device.matrix_rank"
PART_SECONDS = 240.0
STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A job in several launches.

    Attributes:
        training, place: see tests/integration/support/matrix_cells.py.
        parts: for each launch the number of ranks, and the step to which they train.
    """

    training: str
    place: str
    parts: Sequence[tuple[int, int]]


KILLED = {
    "killed, 1 rank, nvme": Chain(
        training="fp32, each micro-batch", place="zero-3 + everything nvme", parts=[(1, STEPS)]
    ),
    "killed, 1 rank, fractions": Chain(training="bf16", place="zero-3 + fractions", parts=[(1, STEPS)]),
    "killed, 1 rank, device": Chain(training="bf16", place="zero-2", parts=[(1, STEPS)]),
    "killed, 2 ranks, host": Chain(
        training="fp32, each micro-batch", place="zero-3 + everything host", parts=[(2, STEPS)]
    ),
}
ELASTIC = {
    "1, 2, 3, 1 ranks, nvme": Chain(
        training="fp32, each micro-batch",
        place="zero-3 + everything nvme",
        parts=[(1, 1), (2, 3), (3, 4), (1, 5)],
    ),
    "2, 1, 2 ranks, stage 2": Chain(training="mixed", place="zero-2 + optimizer host", parts=[(2, 1), (1, 2), (2, 4)]),
}


class LaunchError(Exception):
    """A launch ended in another way than it should have."""


def launch_part(
    chain: Chain, address: str, job: str, part: tuple[int, int], lateness: Lateness, directory: Path, **kill: Any
) -> dict[str, Any] | None:
    """Train one part of a job, and return its line; None if a rank was killed, as `kill` says (see Task)."""
    ranks, until = part
    run = replace(run_of(chain.training, chain.place, ranks, address, job), steps=until)
    lines, plan = directory / "lines.jsonl", directory / "plan.json"
    lines.unlink(missing_ok=True)
    plan.write_text(tasks_as_json([Task(name=job, run=asdict(run), lateness=asdict(lateness), **kill)], lines))
    with Launch(MODULE, ranks, (plan,), directory) as launch:
        codes = launch.wait(PART_SECONDS)
        output = launch.output()
    if kill and -signal.SIGKILL in codes:
        # The job can be opened again when the store knows that the rank has gone.
        wait_until(lambda: job_sessions(address, job) == 0, seconds=60)
        return None
    if codes != [0] * ranks:
        raise LaunchError(f"{job}: exit codes {codes}\n{output[-4000:]}")
    line: dict[str, Any] = json.loads(lines.read_text())
    if line["races"]:
        raise LaunchError(f"{job}: {line['races']}")
    return line


def play(
    address: str,
    directory: Path,
    seeds: int,
    kills: int,
    rng: random.Random,
    names: Collection[str] = (*KILLED, *ELASTIC),
) -> Mapping[str, dict[str, Any]]:
    """Play the chains `names`, and return what each of them has shown.

    Args:
        seeds: see matrix_cells.latenesses.
        kills: how often each job of KILLED is killed before it may end.
    """
    place = directory / "chains"
    place.mkdir()
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        chain = (KILLED | ELASTIC)[name]
        shown: dict[str, Any] = {"runs": 0, "kills": 0, "problems": []}
        found[name] = shown
        expected: list[str] = []
        polls = 0
        for schedule, lateness in latenesses(seeds, number, max(ranks for ranks, _ in chain.parts)).items():
            job = f"{name} @ {schedule}"
            digests: list[str] = []
            try:
                for part in chain.parts:
                    if name in KILLED and lateness is not PROMPT:
                        shown["kills"] += _kill(chain, address, job, lateness, place, polls, kills, rng)
                    line = launch_part(chain, address, job, part, lateness, place)
                    assert line is not None, "without a kill"
                    # The losses of a run that was killed are those of its last part.
                    digests.append(line["digest" if name in ELASTIC else "end_digest"])
                    polls = polls or line["polls"]
            except (LaunchError, AssertionError) as error:
                shown["problems"].append(str(error))
                continue
            shown["runs"] += 1
            expected = expected or digests
            if digests != expected:
                shown["problems"].append(f"{job}: {digests} instead of {expected}")
    return found


def _kill(
    chain: Chain, address: str, job: str, lateness: Lateness, place: Path, polls: int, kills: int, rng: random.Random
) -> int:
    """Start a job `kills` times and kill one of its ranks at a random moment each time; return how many died.

    A job that resumes has fewer steps left, and ends before a late moment comes.
    """
    died = 0
    for number in range(kills):
        at = rng.randrange(1, max(2, polls * (kills - number) // (kills + 1)))
        victim = rng.randrange(chain.parts[0][0])
        died += launch_part(chain, address, job, chain.parts[0], lateness, place, dies_at=at, victim=victim) is None
    return died
