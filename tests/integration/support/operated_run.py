"""A training run under a daemon that an operator works on: it trains as far as a file allows, and notes every loss.

Run as a program: `python -m tests.integration.support.operated_run PLAN.json`, with the environment of torchrun. The
training loop is an ordinary one, without code for restarts.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer_client
from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches, moments_of

# More steps than a run makes.
NO_LIMIT = 1 << 30
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run, the same for every rank.

    Attributes:
        directory: the directory of the run's files.
        config: the training config. The daemon's address and the credentials come from the environment.
        dropout: the dropout of the model. With it, losses depend on the ranks' random states.
        pause_seconds: a pause before each step, so that the run lasts as long as the operator works.
    """

    directory: str
    config: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.1
    pause_seconds: float = 0.0

    @property
    def limit_file(self) -> Path:
        """Return the file with the last step that the run may make, and the word `end` if it is to end there."""
        return Path(self.directory) / "limit"

    def losses_file(self, rank: int) -> Path:
        """Return the file with a line for each step: its number, and the loss in hexadecimal."""
        return Path(self.directory) / f"losses-{rank}"

    def results_file(self, rank: int) -> Path:
        return Path(self.directory) / f"results-{rank}.pt"


def _may_make(plan: Plan, step: int) -> bool:
    """Wait until the run may make a step; return False if it is to end before it."""
    while True:
        number, _, end = plan.limit_file.read_text().partition(" ")
        if number and step <= int(number):
            time.sleep(plan.pause_seconds)
            return True
        if end:
            return False
        time.sleep(_LOOK_SECONDS)


def run_rank(plan: Plan) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = Run(dropout=plan.dropout)
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=plan.config)
    with engine, plan.losses_file(rank).open("a", buffering=1) as losses:
        if engine.global_steps == 0:
            torch.manual_seed(3 + rank)
        for step, batch in enumerate(micro_batches(NO_LIMIT, rank, world_size), start=1):
            if step <= engine.global_steps:
                continue
            if not _may_make(plan, step):
                break
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.write(f"{step} {loss.item().hex()}\n")
        weights, moments = engine.full_state_dict(), moments_of(engine)
    result = {
        "weights": weights,
        "moments": moments,
        "resumed_step": engine.resumed_step,
        "restarts": len(engine.daemon_restarts),
        "data_plane": engine.data_plane,
    }
    torch.save(result, plan.results_file(rank))


def main() -> None:
    dist.init_process_group("gloo")
    try:
        run_rank(Plan(**json.loads(Path(sys.argv[1]).read_text())))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
