"""A contestant's process, as who starts it sees it: steps are ordered, times and costs come back.

Owns the process and its log. The process ends with its stdin, so that it goes with whoever started it, however.
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
from benchmarks.common.processes import MemoryWatch, ProcessTree, Use, larger
from benchmarks.training.task import TrainingTask

START_SECONDS = 300.0
STEP_SECONDS = 120.0
STOP_SECONDS = 90.0
ERROR_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant before it is started.

    Attributes:
        name: as it is called in the result.
        kind: see `step_contestants.Spec`, as `deferred` and `each_step`.
        config_in: its config, given a directory of its own for what it keeps on disk.
        python: the interpreter of its environment; None: ours.
        environment: added to ours.
        optional: that it cannot be run is a result, too.
        probed: the disk is measured with the bytes of its steps.
    """

    name: str
    kind: str
    config_in: Callable[[Path], Mapping[str, Any]] = field(default=lambda _: {})
    deferred: bool = False
    each_step: bool = False
    python: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    probed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one turn of a contestant took.

    Attributes:
        seconds, forward, backward, update: of each step.
        losses: the same.
        facts: what it says of itself, of each step or of the last one.
        settle_seconds: until nothing went on behind the last one.
        use: of all steps and the settling.
    """

    seconds: list[float]
    forward: list[float]
    backward: list[float]
    update: list[float]
    losses: list[float]
    settle_seconds: float
    facts: list[Mapping[str, Any]]
    use: Use


class ContestantError(BenchmarkError):
    """A contestant's process ended, or did not answer."""


class Running:
    """A contestant's process."""

    def __init__(self, entry: Entry, task: TrainingTask, directory: Path) -> None:
        """Raises ContestantError if it does not get ready."""
        self.entry = entry
        self._log_path = directory / "contestant.log"
        spec = {"kind": entry.kind, "task": asdict(task), "config": entry.config_in(directory)}
        self._log = self._log_path.open("w+")
        self._process = subprocess.Popen(
            [
                *(str(entry.python or sys.executable), "-m", "benchmarks.training.contestants"),
                json.dumps(spec | {"deferred": entry.deferred, "each_step": entry.each_step}),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"} | dict(entry.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self._stop(0.0)
            raise
        self._tree = ProcessTree(self._process.pid)
        self.memory = self._tree.memory()  # the largest that was seen

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(STOP_SECONDS)

    def warm_up(self, steps: int) -> Block:
        """Makes steps, in which the memory is watched. Raises ContestantError."""
        with MemoryWatch(self._tree) as watch:
            block = self.make(steps)
        self.memory = larger(self.memory, watch.peak)
        return block

    def make(self, steps: int) -> Block:
        """Makes steps. Raises ContestantError."""
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
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return ContestantError(f"{self.entry.name} {what}: " + " | ".join(lines[-ERROR_LINES:]))

    def _stop(self, patience_seconds: float) -> None:
        """It ends with its stdin, and with it its daemon."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with ExitStack() as stack:
            stack.callback(self._log.close)
            stack.callback(self._process.stdout.close)
            self._process.stdin.close()
            try:
                self._process.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
