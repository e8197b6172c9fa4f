"""A rank that changes a buffer and its client state after each step, waits for the commit or not, and is killed.

`python -m tests.integration.support.amending_ranks PLAN.json DIRECTORY`, with torchrun's environment variables. Each
rank writes what it has resumed with to DIRECTORY/resumed-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.integration.support.model_runs import config_of, start
from tests.integration.support.ranks import Launch

END_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the ranks do.

    Attributes:
        job: the name of the job.
        addresses: the address of each rank's daemon.
        waiting: the ranks that wait for the commit after their changes.
        steps: the number of steps, after which all ranks end without a word.
        changes: whether the ranks change anything after a step.
        elements: the number of elements of the buffer, of which the ranks change the first two.
    """

    job: str
    addresses: tuple[str, ...]
    waiting: tuple[int, ...]
    steps: int = 1
    changes: bool = True
    elements: int = 2


class Model(nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("bias", torch.zeros(elements))
        self.bias: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).square().mean() + self.bias.sum()


def train(plan: Plan, directory: Path, rank: int) -> None:
    torch.manual_seed(0)
    model = Model(plan.elements)
    engine = start(model, config_of(plan.addresses[rank], plan.job))
    resumed = [engine.resumed_step, model.bias[:2].tolist(), engine.client_state]
    (directory / f"resumed-{rank}.json").write_text(json.dumps(resumed))
    for _ in range(plan.steps):
        engine.backward(engine(torch.ones(4, 8)))
        engine.step()
        if plan.changes:
            model.bias[:2] += torch.tensor([1.0, rank])
        if plan.changes and rank == 0:
            engine.client_state["seen"] = engine.global_steps
        if rank in plan.waiting:
            engine.wait_for_commit()
        dist.barrier()


def play(plan: Plan, directory: Path) -> tuple[list[Any], str]:
    """Run the ranks to the moment at which they are gone; return what each has resumed with, and their output."""
    directory.mkdir()
    path = directory / "plan.json"
    path.write_text(json.dumps(asdict(plan)))
    ranks = range(len(plan.addresses))
    with Launch("tests.integration.support.amending_ranks", len(ranks), (path, directory), directory) as launch:
        assert launch.wait(END_SECONDS) == [0 for _ in ranks], launch.output()
        output = launch.output()
    return [json.loads((directory / f"resumed-{rank}.json").read_text()) for rank in ranks], output


def main() -> None:
    plan_path, directory = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    train(Plan(**json.loads(plan_path.read_text())), directory, dist.get_rank())
    # The rank is gone at once, so no end of a run commits anything.
    os._exit(0)


if __name__ == "__main__":
    main()
