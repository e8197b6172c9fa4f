"""Kills runs of models larger than memory at random moments, resumes them, and compares with runs that nothing kills.

`python -m tests.faults.resumes --kills N --seed S`. Each round trains with the next choice of large_cells.py (gradients
on NVMe, lent memory, boundaries in the store, tiles), on one and on two ranks in turn, until it is finished, and is
killed up to ten times on the way:

- all ranks are killed;
- one rank is killed, and the others must end by themselves;
- the daemon is killed and started again. The ranks outlive that, unless boundaries of a forward were lost with it: then
  they end with an error.

Ranks that ended are started again, and go on from the last commit. Prints a report in JSON; the exit status is 1 if a
run did not end, if a bit differs, or if a gradient, an activation or a lease is left at the end of a round.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.faults.rounds import play_rounds
from tests.integration.support.daemon import admin_of
from tests.integration.support.large_cells import CHOICES, Store, large_run
from tests.integration.support.parking import assert_nothing_left
from tests.integration.support.ranks import END_SECONDS, Launch
from tests.integration.support.training import Result, assert_bit_equal

MODULE = "tests.integration.support.training"
STEPS = 40
KINDS = ("ranks", "rank", "daemon")
# After the first commit of a launch, a kill comes within so many seconds: some ten steps of the small model.
WITHIN_SECONDS = 2.0
# The time in which ranks must notice that another one is gone.
NOTICE_SECONDS = 90.0


class Round:
    """One run of a choice that is killed again and again."""

    def __init__(self, directory: Path, choice: str, world_size: int, rng: random.Random) -> None:
        directory.mkdir(parents=True)
        self.kills: list[str] = []
        self._directory = directory
        self._choice = choice
        self._world_size = world_size
        self._rng = rng

    def play(self, most_kills: int) -> dict[str, Any]:
        """Play the round, and return the findings."""
        began = time.monotonic()
        found: dict[str, Any] = {"choice": self._choice, "ranks": self._world_size, "kills": self.kills}
        with Store(CHOICES[self._choice].store, self._directory) as store:
            try:
                found["resumed_step"] = self._compare(store, most_kills)
            except AssertionError as error:
                found["error"] = str(error)[-4000:]
            except grpc.RpcError as error:
                # The daemon may hang, and its log is removed with the directory.
                found["error"] = f"{error}\n{store.daemon.log}"[-8000:]
        return found | {"seconds": round(time.monotonic() - began, 1)}

    def _compare(self, store: Store, most_kills: int) -> int:
        """Train without kills, then with them, compare the results, and return the step of the last resume.

        It can raise AssertionError and grpc.RpcError.
        """
        quiet = self._result(store, "quiet", most_kills=0)
        killed = self._result(store, "killed", most_kills)
        # The last launch has the losses and norms after the step that it resumed from.
        losses, norms = quiet.losses[-len(killed.losses) :], quiet.norms[-len(killed.norms) :]
        assert_bit_equal(killed, replace(quiet, losses=losses, norms=norms))
        assert_nothing_left(store.daemon)
        return killed.resumed_step

    def _result(self, store: Store, job: str, most_kills: int) -> Result:
        """Train a job to its end, with at most so many kills on the way; return rank 0's result of the last launch."""
        place = CHOICES[self._choice].places[0]
        run = large_run("fp32, each micro-batch", place, self._choice, self._world_size, store.daemon.address, job)
        directory = self._directory / job
        directory.mkdir()
        plan, result = directory / "runs.json", directory / "results.pt"
        plan.write_text(json.dumps([asdict(replace(run, steps=STEPS, dropout=0.1))]))
        is_finished = False
        while not is_finished:
            with Launch(MODULE, self._world_size, (plan, result), directory) as launch:
                is_finished = self._finish(store, launch, job, most_kills)
        (content,) = torch.load(result)
        return Result(**content)

    def _finish(self, store: Store, launch: Launch, job: str, most_kills: int) -> bool:
        """Kill what is to be killed in a launch, wait for its end, and return whether it has finished the training."""
        here: list[str] = []
        while len(self.kills) < most_kills and not {"rank", "ranks"} & {*here}:
            if not self._wait_for_commit(store, launch, job):
                break
            time.sleep(self._rng.uniform(0.0, WITHIN_SECONDS))
            if not launch.is_whole:
                break
            here.append(self._rng.choice(KINDS if self._world_size > 1 else ("ranks", "daemon")))
            self.kills.append(here[-1])
            self._kill(here[-1], store, launch)
        codes = launch.wait(NOTICE_SECONDS if "rank" in here else END_SECONDS)
        if codes == [0] * self._world_size:
            return True
        may_end = {"rank", "ranks"} & {*here} or (here and CHOICES[self._choice].offloads)
        assert may_end, f"exit codes {codes} after {here}\n{launch.output()}"
        return False

    def _wait_for_commit(self, store: Store, launch: Launch, job: str) -> bool:
        """Wait until the ranks have committed a step since they were started; return whether they still run."""
        first = self._committed(store, job)
        until = time.monotonic() + END_SECONDS
        while launch.is_whole and self._committed(store, job) <= first:
            assert time.monotonic() < until, launch.output()
            time.sleep(0.01)
        return launch.is_whole

    @staticmethod
    def _committed(store: Store, job: str) -> int:
        with admin_of(store.daemon.address) as admin:
            jobs = admin.ListJobs(admin_pb.ListJobsRequest(), timeout=30).jobs
        return max((each.committed_step for each in jobs if each.name == job), default=0)

    def _kill(self, kind: str, store: Store, launch: Launch) -> None:
        if kind == "daemon":
            store.restart()
        else:
            for rank in launch.ranks if kind == "ranks" else [self._rng.choice(launch.ranks)]:
                rank.kill()


def play(number: int, directory: Path, rng: random.Random, most_kills: int) -> dict[str, Any]:
    """Play a round with the next choice, and return the findings."""
    choices = [name for name in CHOICES if name != "none"]
    world_size = 1 + (number % len(choices) + number // len(choices)) % 2
    return Round(directory, choices[number % len(choices)], world_size, rng).play(most_kills)


def main() -> None:
    """Play the rounds, and print the report."""
    play_rounds("tests.faults.resumes", __doc__, play)


if __name__ == "__main__":
    main()
