"""A model with dropout and a buffer, its training with checkpoints, and one rank of a launch that does it.

As a program: `python -m tests.integration.support.checkpoint_ranks ADDRESSES JOB SAVE_DIR RESULTS.pt [LOAD_TAG]`. The
addresses have commas between them; the ranks take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client
from trainer_client import Engine

WIDTH, BATCH = 24, 4
STEPS, SAVED_AT = 6, 3


class Net(nn.Module):
    """A small net whose loss depends on random numbers and on a buffer that each forward changes."""

    seen: torch.Tensor

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen += hidden.float().abs().mean()
        hidden = self.frozen(self.first(hidden))
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return (hidden.float().square().mean() * (1 + self.seen / 100)).float()


def config_of(address: str, job: str, *, half: bool = False, **section: Any) -> dict[str, Any]:
    """Return a config with a schedule, whose state a checkpoint has, too."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_num_steps": 5}},
        "bf16": {"enabled": half},
        "paramserver": {"address": address, "job": job, **section},
    }


def start(config: dict[str, Any], model: nn.Module | None = None) -> Engine:
    """Return an engine of the net."""
    model = Net() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    engine: Engine = trainer_client.initialize(model=model, model_parameters=trained, config=config)[0]
    return engine


def batch(step: int, rank: int = 0) -> torch.Tensor:
    """Return a rank's inputs of a step, [BATCH, WIDTH]."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def steps(engine: Engine, until: int) -> Iterator[float]:
    """Train up to the global step `until`, and yield the loss of each step."""
    rank = engine.global_rank
    while engine.global_steps < until:
        inputs = batch(engine.global_steps, rank)
        loss = engine(inputs.bfloat16() if engine.bfloat16_enabled() else inputs)
        engine.backward(loss)
        engine.client_state["cursor"] = engine.global_steps + 1
        engine.step()
        yield loss.item()


def micro_steps(engine: Engine, until: int) -> Iterator[float]:
    """Train micro-batch by micro-batch up to the global step `until`, and yield the loss of each micro-batch."""
    while engine.global_steps < until:
        loss = engine(batch(engine.micro_steps, engine.global_rank))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def main() -> None:
    addresses, job, save_dir, results, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    address = addresses.split(",")[rank % len(addresses.split(","))]
    with start(config_of(address, job)) as engine:
        state: dict[str, Any] | None = None
        if rest:
            _, state = engine.load_checkpoint(save_dir, rest[0])
        else:
            torch.manual_seed(3 + rank)
            list(steps(engine, SAVED_AT))
            engine.save_checkpoint(save_dir, client_state={"rank": rank})
        at_save = engine.full_state_dict()
        torch.save(
            {
                "at_save": at_save,
                "state": state,
                "losses": list(steps(engine, STEPS)),
                "weights": engine.full_state_dict(),
            },
            Path(f"{results}.{rank}"),
        )


if __name__ == "__main__":
    main()
