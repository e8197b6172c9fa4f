"""A model of three blocks, its inputs, and engines that train such a model with SGD at different stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import trainer_client

WIDTH = 16
RATE = 0.125
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-store": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


class ThreeBlocks(nn.Module):
    """A model of three blocks, each of which is a unit.

    Args:
        block: makes a block of inputs and outputs [..., WIDTH]; None: two linear layers with tanh between them.
    """

    def __init__(self, block: Callable[[], nn.Module] | None = None) -> None:
        torch.manual_seed(1)
        super().__init__()
        make = block or (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        self.blocks = nn.ModuleList([make() for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last block, [..., WIDTH]."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def inputs(number: int = 0) -> torch.Tensor:
    """Return the inputs of a micro-batch, [2, WIDTH]."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))


def start(address: str, job: str, model: nn.Module, zero: dict[str, Any], **keys: Any) -> trainer_client.Engine:
    """Return an engine that trains a model by SGD with the learning rate RATE.

    Args:
        address: the address of the daemon.
        job: the name of the job.
        model: the model, of which a micro-batch has two samples.
        zero: the section `zero_optimization`.
        keys: further keys of the config.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": zero,
        "paramserver": {"address": address, "job": job},
        **keys,
    }
    return trainer_client.initialize(model=model, config=config)[0]
