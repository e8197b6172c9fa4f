"""Trains a model on the simulated device whose boundaries fill the store: it has room for one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainer_client
from tests.device.training_on_lanes import registered_arena
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of

WIDTH = 64
# A boundary of so many rows has 4 MiB.
ROWS = 16 * 1024


class Tower(nn.Module):
    """Blocks that are checkpointed; the boundary of each has WIDTH fp32 values for each row of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in range(9)]
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.first(tokens)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()


def tight_store(directory: Path) -> Daemon:
    """Start a store with room for the model and one boundary."""
    return Daemon(directory / "state", {"host_budget": "9MiB", "nvme_budget": "1GiB"})


def train_tower(address: str, job: str, *, offload: bool) -> dict[str, torch.Tensor]:
    """Train for two steps, with boundaries in the store if `offload`, and return the weights."""
    # Gradients on the device take no room between the boundaries.
    section: dict[str, Any] = {
        "activations": {"offload": offload, "recompute": False},
        "placement": {"gradients": "device"},
    }
    raw = config_of(address, job, "nvme", **section) | {"optimizer": {"type": "AdamW"}}
    torch.manual_seed(5)
    with registered_arena():
        engine, *_ = trainer_client.initialize(model=Tower().to("lag"), config=raw)
        with engine:
            for _ in range(2):
                engine.backward(engine(torch.randn(ROWS, WIDTH).to("lag")))
                engine.step()
            return {name: value.clone() for name, value in engine.full_state_dict().items()}
