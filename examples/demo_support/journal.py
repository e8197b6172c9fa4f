"""The journal of a launch, read while its ranks write it.

This module owns no process. The files are those that `train_gpt2.py --journal` writes: one for each rank, one JSON
object a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The record of a rank whose engine is ready."""

    pid: int
    resumed_step: int
    parameters: int
    byte_entropy: float
    device: str
    data_plane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The record of a rank that has computed the loss of a step, which is not committed at this time.

    Attributes:
        exact: the loss as `float.hex` writes it.
        tokens: the number of tokens of all ranks in this step.
        at: when the loss was computed, in seconds since the epoch.
    """

    step: int
    loss: float
    exact: str
    tokens: int
    at: float


class Journal:
    """The records of all ranks of one launch.

    Attributes:
        starts: the start records by rank.
        losses: the loss records by step, then by rank.
        digests: the digests of the model's fp32 weights, by the step after which they were taken.
        text: the text that the trained model wrote; None before that.
    """

    def __init__(self, directory: Path, ranks: int) -> None:
        self.ranks = ranks
        self.starts: dict[int, Start] = {}
        self.losses: dict[int, dict[int, Loss]] = {}
        self.digests: dict[int, str] = {}
        self.text: str | None = None
        self._paths = [directory / f"rank-{rank}.jsonl" for rank in range(ranks)]
        self._read_bytes = [0] * ranks

    def refresh(self) -> None:
        """Read the new lines that are complete."""
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[rank])
                new = file.read()
            # A rank that is killed while it writes leaves part of a line.
            complete = new[: new.rfind(b"\n") + 1]
            self._read_bytes[rank] += len(complete)
            for line in complete.splitlines():
                self._take(rank, json.loads(line))

    @property
    def started(self) -> bool:
        """Whether every rank has its engine."""
        return len(self.starts) == self.ranks

    @property
    def newest_step(self) -> int:
        """The newest step whose loss every rank has computed; 0 if there is none."""
        return max((step for step, by_rank in self.losses.items() if len(by_rank) == self.ranks), default=0)

    def mean_loss(self, step: int) -> float:
        """Return the mean of a step's losses over the ranks."""
        by_rank = self.losses[step].values()
        return sum(loss.loss for loss in by_rank) / len(by_rank)

    def tokens_and_seconds(self, last: int | None = None) -> tuple[int, float]:
        """Return the number of tokens trained on and the seconds that took, by rank 0's clock.

        They are those of all steps, or of the `last` ones.
        """
        losses = [by_rank[0] for by_rank in self.losses.values() if 0 in by_rank]
        losses = losses if last is None else losses[-last - 1 :]
        if len(losses) < 2:
            return 0, 0.0
        return sum(loss.tokens for loss in losses[1:]), losses[-1].at - losses[0].at

    def _take(self, rank: int, record: dict[str, Any]) -> None:
        event = record.pop("event")
        if event == "start":
            self.starts[rank] = Start(**record)
        elif event == "loss":
            self.losses.setdefault(record["step"], {})[rank] = Loss(**record)
        elif event == "weights":
            self.digests[record["step"]] = record["sha256"]
        elif event == "end":
            self.text = record["text"]
