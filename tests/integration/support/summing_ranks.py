"""One of two ranks that add their gradients up without a division; run by test_deepspeed_keys.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client

STEPS, LEARNING_RATE = 3, 0.1


def build() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(5, 3)


def batch(step: int) -> torch.Tensor:
    """Return this rank's inputs of a step, [2, 5]."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train_plain() -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch, with gradients that are added up over the ranks."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train_stored(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine, *_ = trainer_client.initialize(model=build(), config=config)
    with engine:
        for step in range(STEPS):
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
        return engine.full_state_dict()


def main() -> None:
    address, job = sys.argv[1:]
    dist.init_process_group("gloo")
    expected = train_plain()
    for stage in (0, 1, 2):
        found = train_stored(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_allreduce_op": "sum",
                "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
                "zero_optimization": {"stage": stage},
                "paramserver": {"address": address, "job": f"{job} {stage}"},
            }
        )
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], stage
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
