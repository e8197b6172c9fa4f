"""A heat: contestants that train the same model in turns, so that other load on the machine slows all alike.

In each round, every contestant makes a block of steps while the others wait. Round 0 is a warm-up; memory is sampled
in it, which costs time, so its times do not count. In the other rounds, the first step of a block does not count,
because it need not wait for background work of a step before. A contestant's result is the median over the rounds of
its step time divided by plain PyTorch's in the same round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.measure import Progress, Threads
from benchmarks.common.processes import Memory
from benchmarks.training.bandwidth import StepProbe
from benchmarks.training.contestant_process import Block, ContestantError, Running, RunningContestant
from benchmarks.training.task import TrainingTask

# A contestant whose steps move fewer bytes is not probed. Its only writes are a few of the store's catalog, and every
# disk is fast enough for them.
LEAST_PROBED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of the disk probes right before and right after a block; `seconds` is the smaller of both times."""

    nbytes: int
    seconds: float
    direct: bool


@dataclass(slots=True, kw_only=True)
class Standing:
    """The results of one contestant in a heat.

    Attributes:
        not_run: the reason why the contestant has no results; None: it has.
        blocks: the blocks of the rounds that count.
        losses: the losses of all steps, those of the warm-up first.
        memory: the largest memory that was seen.
        probes: one for each block; empty if the contestant is not probed.
    """

    entry: RunningContestant
    not_run: str | None = None
    blocks: list[Block] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: Memory | None = None
    probes: list[Probe] = field(default_factory=list)

    def round_seconds(self) -> list[float]:
        """Return for each round the median time of the steps that count."""
        return [statistics.median(block.seconds[1:]) for block in self.blocks]

    def io_seconds(self) -> list[float]:
        """Return for each round the time of the disk alone for a step's bytes; empty if it was not measured."""
        if not self.probes:
            return []
        return [
            probe.seconds * (block.use.bytes_read + block.use.bytes_written) / len(block.seconds) / probe.nbytes
            for probe, block in zip(self.probes, self.blocks, strict=True)
        ]


class Heat:
    """A comparison of contestants, which take turns; all processes and files are gone when `run` returns."""

    def __init__(
        self, task: TrainingTask, directory: Path, *, threads: Threads, progress: Progress, together: bool = False
    ) -> None:
        """Prepare a heat.

        Args:
            task: the model and the data that all contestants train.
            directory: where contestants and probes keep their files.
            threads: the number of I/O threads of the probes.
            progress: called with each step of the heat.
            together: the contestants build their models at the same time, which needs a core and memory for each.
        """
        self._task = task
        self._directory = directory
        self._threads = threads
        self._progress = progress
        self._together = together
        self._running: dict[str, Running] = {}
        self._probes: dict[str, StepProbe] = {}
        self._standings: dict[str, Standing] = {}

    def run(self, entries: Sequence[RunningContestant], *, rounds: int, steps: int) -> list[Standing]:
        """Run the contestants in turns, and return their standings in the order of the entries.

        Args:
            entries: the contestants.
            rounds: the number of rounds that count.
            steps: the number of steps of a block, at least 2.

        Raises:
            ContestantError: a contestant that is not optional failed.
        """
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(dir=self._directory)))
            for index, entry in enumerate(entries):
                (own := scratch / str(index)).mkdir()
                self._start(entry, own, stack)
                if not self._together:
                    self._wait_until_ready([entry])
            if self._together:
                self._wait_until_ready(entries)
            self._take_turns(forward=True, turn=lambda name: self._warm_up(name, steps, scratch, stack))
            for number in range(1, rounds + 1):
                self._progress(f"round {number} of {rounds}")
                self._take_turns(forward=number % 2 == 0, turn=lambda name: self._make(name, steps))
            for name, running in self._running.items():
                self._standings[name].memory = running.memory
        return list(self._standings.values())

    def _start(self, entry: RunningContestant, directory: Path, stack: ExitStack) -> None:
        self._progress(f"{entry.name}: starting")
        self._standings[entry.name] = Standing(entry=entry)
        self._running[entry.name] = stack.enter_context(Running(entry, self._task, directory))

    def _wait_until_ready(self, entries: Sequence[RunningContestant]) -> None:
        for entry in entries:
            try:
                self._running[entry.name].wait_until_ready()
            except ContestantError as error:
                self._exclude(self._running.pop(entry.name).entry, error)

    def _take_turns(self, *, forward: bool, turn: Callable[[str], None]) -> None:
        """Give each contestant a turn. Every other round goes backwards, so that each is as often first as last."""
        for name in list(self._running) if forward else list(reversed(self._running)):
            try:
                turn(name)
            except ContestantError as error:
                self._exclude(self._running.pop(name).entry, error)

    def _warm_up(self, name: str, steps: int, scratch: Path, stack: ExitStack) -> None:
        self._progress(f"{name}: warm-up")
        block = self._running[name].warm_up(steps)
        self._standings[name].losses += block.losses
        read, written = (moved // steps for moved in (block.use.bytes_read, block.use.bytes_written))
        if self._running[name].entry.probed and read + written >= LEAST_PROBED_BYTES:
            (own := scratch / f"probe-{len(self._probes)}").mkdir()
            self._probes[name] = stack.enter_context(StepProbe(own, read, written, self._threads))

    def _make(self, name: str, steps: int) -> None:
        standing, probe = self._standings[name], self._probes.get(name)
        before = probe.run() if probe else 0.0
        block = self._running[name].make(steps)
        standing.blocks.append(block)
        standing.losses += block.losses
        if probe:
            # The shorter time counts, because it is nearer to what the disk can do.
            standing.probes.append(Probe(nbytes=probe.nbytes, seconds=min(before, probe.run()), direct=probe.direct))

    def _exclude(self, entry: RunningContestant, error: ContestantError) -> None:
        if not entry.optional:
            raise error
        self._progress(f"not run: {error}")
        self._standings[entry.name] = Standing(entry=entry, not_run=str(error))
