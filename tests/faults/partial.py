"""Kills ranks and daemons of a job on two nodes at random moments, and looks for steps that were called safe and lost.

`python -m tests.faults.partial --kills N --seed S`. Each round trains with the next of the stages 1 to 3, states in
host memory or on NVMe, with and without replicas of both parts, until it is finished. It is struck up to ten times:

- `ranks`: all ranks are killed; `rank`: one of them, and the other one must end by itself;
- `daemon`: one daemon is killed and started again, which the ranks outlive;
- `node`: a daemon and its rank are killed together; `all`: both daemons and all ranks are.

A step is called safe by `wait_for_commit` on any rank, by a reader and by a watcher of either daemon. The next launch
must go on from the newest such step or from a later one. At the end, readers of both daemons must get the last step,
and the bits of all states and losses must be those of a run that nothing kills.
Prints a report in JSON; the exit status is 1 if a round has failed.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.faults.rounds import play_rounds
from tests.integration.support.daemon import Daemon, serving
from tests.integration.support.elastic_run import read_job
from tests.integration.support.ranks import Launch
from tests.integration.support.settling_ranks import Plan
from trainer_client import StoreClientSync, StoreError

MODULE = "tests.integration.support.settling_ranks"
CONFIG = {"host_budget": "48MiB", "nvme_budget": "256MiB", "session_grace_seconds": 0.5}
JOB = "partial"
STEPS = 40
RANKS = 2
KINDS = ("ranks", "rank", "daemon", "node", "all")
# After the first commit of a launch, a strike comes within so many seconds: some twenty steps of the small model.
WITHIN_SECONDS = 1.0
# The time in which a launch must commit, and in which it must end.
END_SECONDS = 180.0
# A reader asks each daemon this often which step it gets.
READ_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way of training: the stage, the home of the states, and whether both parts have replicas."""

    stage: int
    home: str
    replicated: bool

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.home}{', replicated' if self.replicated else ''}"


CELLS = [
    Cell(stage=stage, home=home, replicated=replicated)
    for replicated in (False, True)
    for home in ("nvme", "cpu")
    for stage in (3, 2, 1)
]


@dataclass(slots=True)
class Safe:
    """The newest step that readers and watchers of the daemons were given."""

    newest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def note(self, step: int) -> None:
        with self.lock:
            self.newest = max(self.newest, step)

    def read(self, address: str) -> None:
        """Open readers of a daemon again and again until the end."""
        while not self.ended.wait(READ_SECONDS):
            with suppress(StoreError), StoreClientSync.connect(address, timeout=1.0) as client:
                while not self.ended.wait(READ_SECONDS):
                    with client.read(JOB, timeout=1.0) as reader:
                        self.note(reader.step)

    def watch(self, address: str) -> None:
        """Watch a daemon until the end."""
        while not self.ended.wait(READ_SECONDS):
            with suppress(StoreError), StoreClientSync.connect(address, timeout=1.0) as client:
                for commit in client.watch(JOB, timeout=1.0):
                    self.note(commit.step)
                    if self.ended.is_set():
                        return


@contextmanager
def observed(daemons: list[Daemon]) -> Iterator[Safe]:
    """Read and watch the job at each daemon within the context."""
    safe = Safe()
    threads = [
        threading.Thread(target=act, args=(daemon.address,), daemon=True)
        for daemon in daemons
        for act in (safe.read, safe.watch)
    ]
    for thread in threads:
        thread.start()
    try:
        yield safe
    finally:
        safe.ended.set()


class Round:
    """One run that is struck again and again."""

    def __init__(self, directory: Path, cell: Cell, rng: random.Random, steps: int = STEPS, ranks: int = RANKS) -> None:
        directory.mkdir(parents=True)
        self.kills: list[str] = []
        self._directory = directory
        self._cell = cell
        self._rng = rng
        self._steps = steps
        self._ranks = ranks

    def play(self, most_kills: int) -> dict[str, Any]:
        """Play the round, and return the findings."""
        began = time.monotonic()
        found: dict[str, Any] = {"cell": str(self._cell), "kills": self.kills}
        with self.serving() as daemons:
            try:
                found["safe_steps"] = self._train(daemons, most_kills)
                addresses = [daemon.address for daemon in daemons]
                shown = [step_of(address) for address in addresses]
                assert shown == [self._steps] * self._ranks, f"readers get the steps {shown} at the end"
                tensors = read_job(JOB, addresses)
                expected = quiet(self._steps, self._ranks)
                found["other_losses"] = other_losses(losses(self._directory, self._ranks), expected.losses)
                assert not found["other_losses"], "other losses than without strikes"
                assert_same(tensors, expected.tensors)
            except (AssertionError, StoreError) as error:
                found["error"] = str(error)[-4000:]
        return found | {"seconds": round(time.monotonic() - began, 1)}

    def serving(self) -> AbstractContextManager[list[Daemon]]:
        """Return a context with a daemon for each rank."""
        return serving(self._directory, ("first", "second"), CONFIG)

    def plan(self, daemons: list[Daemon]) -> Plan:
        """Return what the ranks do."""
        return plan_of(self._cell, daemons, self._steps, self._rng.getrandbits(32))

    def launch(self, path: Path) -> Launch:
        """Start the ranks with the plan in a file."""
        return Launch(MODULE, self._ranks, (path, self._directory), self._directory)

    def _train(self, daemons: list[Daemon], most_kills: int) -> int:
        """Train to the end, and return how many different steps the ranks have called safe.

        It can raise AssertionError.
        """
        path = self._directory / "plan.json"
        path.write_text(json.dumps(asdict(self.plan(daemons))))
        with observed(daemons) as safe:
            is_finished = False
            while not is_finished:
                before = max([safe.newest, *self.noted("safe")])
                launches = len(self.noted("resumed", rank=0))
                with self.launch(path) as launch:
                    is_finished = self.strike(daemons, launch, most_kills)
                    resumed = self.noted("resumed", rank=0)[launches:]
                    lost = f"goes on from step {resumed}, and step {before} was called safe\n{launch.output()}"
                    assert all(step >= before for step in resumed), lost
        return len(set(self.noted("safe")))

    def strike(self, daemons: list[Daemon], launch: Launch, most_kills: int) -> bool:
        """Strike a launch, wait for its end, and return whether it has finished the training."""
        ends = False
        launches = len(self.noted("resumed", rank=0))
        while len(self.kills) < most_kills and not ends:
            if not self.wait_for_start(launch, launches):
                break
            time.sleep(self._rng.uniform(0.0, WITHIN_SECONDS))
            if not launch.is_whole:
                break
            kind = self._rng.choice(KINDS)
            self.kills.append(kind)
            number = self._rng.randrange(RANKS)
            ends = kind != "daemon"
            for rank in {"daemon": (), "rank": (number,), "node": (number,)}.get(kind, tuple(range(RANKS))):
                launch.ranks[rank].kill()
            for place in {"daemon": (number,), "node": (number,), "all": tuple(range(RANKS))}.get(kind, ()):
                daemons[place].kill()
            for place, daemon in enumerate(daemons):
                if daemon.process.poll() is not None:
                    daemons[place] = Daemon(daemon.state_dir, CONFIG)
        codes = launch.wait(END_SECONDS)
        assert ends or codes == [0] * RANKS, f"exit codes {codes} after {self.kills}\n{launch.output()}"
        return codes == [0] * RANKS

    def wait_for_start(self, launch: Launch, launches: int) -> bool:
        """Wait until the ranks of a launch train, and return whether they still run."""
        until = time.monotonic() + END_SECONDS
        while launch.is_whole and len(self.noted("resumed", rank=0)) <= launches:
            assert time.monotonic() < until, launch.output()
            time.sleep(0.01)
        return launch.is_whole

    def noted(self, what: str, rank: int | None = None) -> list[int]:
        """Return the steps that ranks have written to their files."""
        ranks = range(self._ranks) if rank is None else (rank,)
        paths = [self._directory / f"{what}-{number}.txt" for number in ranks]
        return [int(line) for path in paths if path.exists() for line in path.read_text().splitlines() if line]


def step_of(address: str) -> int:
    """Return the step of the job that a reader gets at a daemon which names none."""
    with StoreClientSync.connect(address) as client, client.read(JOB) as reader:
        return reader.step


def plan_of(cell: Cell, daemons: list[Daemon], steps: int, seed: int) -> Plan:
    addresses = tuple(daemon.address for daemon in daemons)
    replicated = {"replicas": 1, "replica": {"addresses": list(addresses)}, "durability": "replicated"}
    section = replicated if cell.replicated else {"durability": "step"}
    return Plan(job=JOB, addresses=addresses, until=steps, section=section, home=cell.home, stage=cell.stage, seed=seed)


@dataclass(frozen=True, slots=True)
class Quiet:
    """A run that nothing strikes: all states at its end, and the losses of each rank, which are those of each cell."""

    tensors: dict[str, torch.Tensor]
    losses: list[list[str]]


@cache
def quiet(steps: int, ranks: int) -> Quiet:
    """Train without strikes."""
    names = [f"node-{number}" for number in range(ranks)]
    with TemporaryDirectory() as temporary, serving(Path(temporary), names, CONFIG) as daemons:
        directory = Path(temporary)
        path = directory / "plan.json"
        path.write_text(json.dumps(asdict(plan_of(CELLS[0], daemons, steps, 0))))
        with Launch(MODULE, ranks, (path, directory), directory) as launch:
            codes = launch.wait(END_SECONDS)
            assert codes == [0] * ranks, launch.output()
        tensors = read_job(JOB, [daemon.address for daemon in daemons])
        return Quiet(tensors, losses(directory, ranks))


def losses(directory: Path, ranks: int) -> list[list[str]]:
    """Return the losses that each rank has written, each with the step before it, in the order of all launches."""
    return [(directory / f"losses-{rank}.txt").read_text().splitlines() for rank in range(ranks)]


def other_losses(found: list[list[str]], expected: list[list[str]]) -> list[str]:
    """Return which lines of the ranks' losses are not among those of a quiet run, with their numbers."""
    return [
        f"rank {rank}, line {number}: {line}"
        for rank, (lines, known) in enumerate(zip(found, map(set, expected), strict=True))
        for number, line in enumerate(lines, 1)
        if line not in known
    ]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two states are the same, bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    different = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert not different, f"other bits than without strikes: {different[:5]}, {len(different)} in all"


def play(number: int, directory: Path, rng: random.Random, most_kills: int) -> dict[str, Any]:
    """Play a round with the next cell, and return the findings."""
    return Round(directory, CELLS[number % len(CELLS)], rng).play(most_kills)


def main() -> None:
    """Play the rounds, and print the report."""
    play_rounds("tests.faults.partial", __doc__, play)


if __name__ == "__main__":
    main()
