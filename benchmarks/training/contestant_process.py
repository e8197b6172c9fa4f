"""The benchmark's end of a contestant's process: it orders steps, and receives their times and costs.

This module owns the process and its log. The process ends when its stdin does, so also when the benchmark is killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common.machine import ROOT
from benchmarks.common.measure import BenchmarkError
from benchmarks.common.memory_limit import MemoryLimit
from benchmarks.common.processes import MemoryWatch, ProcessTree, Use, larger
from benchmarks.training.task import TrainingTask

START_SECONDS = 300.0
STEP_SECONDS = 600.0
STOP_SECONDS = 90.0
ERROR_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningContestant:
    """A contestant before it is started.

    Attributes:
        name: the contestant's name in the result.
        kind, device, deferred: see `contestants.Spec`.
        config_in: returns the contestant's config, given a directory for the files that it keeps on disk.
        python: the interpreter of the contestant's environment; None: the benchmark's own.
        environment: variables that are added to the benchmark's environment.
        optional: the heat goes on without the contestant if it cannot be run; otherwise the heat fails.
        probed: whether the disk alone is measured with the bytes of the contestant's steps.
        memory_limit: the bytes that all processes of the contestant may have together; None: there is no limit.
    """

    name: str
    kind: str
    config_in: Callable[[Path], Mapping[str, Any]] = field(default=lambda _: {})
    device: str = "cpu"
    deferred: bool = False
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    probed: bool = False
    memory_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The steps of one turn of a contestant, and what they cost.

    Attributes:
        seconds, forward, backward, update: the seconds of each step, and of its three calls.
        losses: the loss of each step.
        settle_seconds: the time from the end of the last step until the background work was done.
        facts: what the contestant reports of itself (`Contestant.facts`) after the last step.
        use: the CPU time and disk traffic of all steps and of the settling.
    """

    seconds: list[float]
    forward: list[float]
    backward: list[float]
    update: list[float]
    losses: list[float]
    settle_seconds: float
    facts: Mapping[str, Any]
    use: Use


class ContestantError(BenchmarkError):
    """A contestant's process ended, or did not answer."""


class Running:
    """A contestant's process."""

    def __init__(self, entry: RunningContestant, task: TrainingTask, directory: Path) -> None:
        """Start the process, which begins to build its model."""
        self.entry = entry
        self._log_path = directory / "contestant.log"
        spec = {"kind": entry.kind, "task": asdict(task), "config": entry.config_in(directory)}
        self._limit: MemoryLimit | None = None
        with ExitStack() as begun:
            if entry.memory_limit is not None:
                self._limit = begun.enter_context(MemoryLimit(entry.memory_limit))
            self._log = begun.enter_context(self._log_path.open("w+"))
            self._process = self._start(spec)
            self._resources = begun.pop_all()
        self._tree = ProcessTree(self._process.pid)
        # The largest memory that was seen so far.
        self.memory = self._tree.memory()

    def _start(self, spec: dict[str, Any]) -> subprocess.Popen[bytes]:
        entry = self.entry
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [
            *(str(entry.python or sys.executable), "-m", "benchmarks.training.contestants"),
            json.dumps(spec | {"device": entry.device, "deferred": entry.deferred}),
        ]
        return subprocess.Popen(
            command if self._limit is None else self._limit.command(command),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"} | dict(entry.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        return self

    def wait_until_ready(self) -> None:
        """Wait until the model is ready. Raise ContestantError if it cannot be built, or if that takes too long."""
        self._answer(START_SECONDS)
        self.memory = self._tree.memory()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(STOP_SECONDS)

    def warm_up(self, steps: int) -> Block:
        """Have the contestant make steps while its memory is sampled, and return their figures.

        Raises:
            ContestantError: the contestant failed, or took too long.
        """
        with MemoryWatch(self._tree) as watch:
            block = self.make(steps)
        self.memory = larger(self.memory, watch.peak)
        return block

    def make(self, steps: int) -> Block:
        """Have the contestant make steps, and return their figures.

        Raises:
            ContestantError: the contestant failed, or took too long.
        """
        before = self._tree.use()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        taken = self._answer(START_SECONDS + steps * STEP_SECONDS)
        block = Block(**taken, use=self._tree.use().since(before))
        self.memory = larger(self.memory, self._tree.memory())
        if self._limit is not None and self._limit.kills:
            raise self._failure("is not whole any more")
        return block

    def _answer(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        if not ready:
            raise self._failure(f"did not answer within {timeout_seconds:g} s")
        if not (line := self._process.stdout.readline()):
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> ContestantError:
        if self._limit is not None and (kills := self._limit.kills):
            return ContestantError(
                f"{self.entry.name} {what}: processes that the kernel has killed at the limit of {self._limit.nbytes} "
                f"bytes: {kills}"
            )
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return ContestantError(f"{self.entry.name} {what}: " + " | ".join(lines[-ERROR_LINES:]))

    def _stop(self, patience_seconds: float) -> None:
        """Close the process's stdin, at which it ends together with its daemon; kill it if that takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._resources as stack:
            stack.callback(self._process.stdout.close)
            self._process.stdin.close()
            try:
                self._process.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
