"""One of the ranks that share a store's memory.

test_mapped_parameters.py runs `python -m tests.integration.support.mapped_ranks ADDRESS DIRECTORY`. Each rank writes
the counts of its gathers to DIRECTORY/RANK.json.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trainer_client
from tests.integration.support.gathers import count_gathers
from trainer_client.training.model.slot_table import PAGED_PARTITION

WIDTH = 1024
HOMES = ("cpu", "nvme")


class Wide(nn.Module):
    """A model with units so large that one rank's half is mapped in whole pages."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        assert self.blocks[0].weight.numel() >= 2 * PAGED_PARTITION

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden.square().mean()


def main() -> None:
    address, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    counted = {}
    for home in HOMES:
        offload = {"device": home}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "paramserver": {"address": address, "job": f"ranks-{home}", "durability": "none"},
        }
        engine, *_ = trainer_client.initialize(model=Wide(), config=config)
        with engine:
            counters = count_gathers(engine)
            for step in range(2):
                torch.manual_seed(step)
                engine.backward(engine(torch.randn(2, 8)))
                engine.step()
            counted[home] = {fqn: asdict(counts) for fqn, counts in counters.snapshot().by_unit.items()}
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(counted))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
