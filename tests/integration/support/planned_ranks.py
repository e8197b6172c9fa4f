"""One of two ranks whose steps move the bytes that a plan says.

test_plan.py runs `python -m tests.integration.support.planned_ranks JOBS ADDRESS`, where JOBS is a file with a list of
jobs: the name of a model, and a training config with a daemon of its own. That is what is planned. The ranks train the
jobs one after the other at the daemon of ADDRESS, which has the same budgets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainer_client
from paramserver.store_need import find_need
from trainer_client.config.loading import load_config
from trainer_client.plan.layout import World, lay_out
from trainer_client.plan.memory import plan_memory
from trainer_client.plan.rehearsal import Rehearsal
from trainer_client.plan.step_time import find_traffic

RANKS = 2
WIDTH = 64
# The first step learns the order of the units.
STEPS = 3
OF_THE_DAEMON = {"state_dir", "host_budget", "nvme_budget"}


class Adapted(nn.Module):
    """A block of frozen weights with an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.frozen(hidden) + self.up(self.down(hidden))


class Headed(nn.Module):
    """Frozen blocks, and a head behind them that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.blocks.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


class Tower(nn.Module):
    """A frozen root, two frozen blocks, and three blocks whose adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.requires_grad_(False)
        self.blocks = nn.ModuleList([Adapted() for _ in range(5)])
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class Tied(nn.Module):
    """Blocks between an embedding and a head, which have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(hidden.argmax(-1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


MODELS: dict[str, type[nn.Module]] = {"Tower": Tower, "Headed": Headed, "Tied": Tied}


def main() -> None:
    for index, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        check(MODELS[job["model"]], job["config"], {"address": sys.argv[2], "job": f"planned-{index}"})


def check(build: type[nn.Module], raw: dict[str, Any], at: dict[str, str]) -> None:
    """Compare the bytes of a step of a model with those of its plan. The job is trained at another daemon's `at`."""
    micro_batches = raw["gradient_accumulation_steps"]
    config = load_config(raw, {})
    with torch.device("meta"):
        layout = lay_out(build(), config, World(ranks=RANKS))
    memory = plan_memory("cpu", layout, config, Rehearsal(operations={}, flops=0, events=()), find_need)
    planned = find_traffic(layout, memory, config, micro_batches, is_cpu=True)
    section = {key: value for key, value in raw["paramserver"].items() if key not in OF_THE_DAEMON}
    engine, *_ = trainer_client.initialize(model=build(), config={**raw, "paramserver": section | at})
    with engine:
        for _ in range(STEPS * micro_batches):
            engine.backward(engine(torch.randn(4, WIDTH)))
            engine.step()
        engine.wait_for_commit()
        report = engine.step_report()
    assert report is not None
    found = {name: report.bytes[name] for name in ("collectives", "store_to_trainer", "trainer_to_store")}
    assert found == {
        "collectives": planned.collectives,
        "store_to_trainer": planned.to_rank,
        "trainer_to_store": planned.from_rank,
    }, (build, raw)


if __name__ == "__main__":
    main()
