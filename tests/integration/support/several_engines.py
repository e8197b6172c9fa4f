"""Several engines on each of several ranks, which start and share one daemon: their `main` gets its directory."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def config_of(state_dir: str, stage: int = 2, **section: Any) -> dict[str, Any]:
    """Return the config of an engine that starts a daemon, or shares that of another engine of the process."""
    offload = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, **offload},
        "paramserver": {"state_dir": state_dir, "host_budget": "64MiB", "nvme_budget": "256MiB", **section},
    }


TRAINED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def step(engine: Any) -> None:
    """Train one step."""
    inputs = torch.ones(4, 8)
    engine.backward(engine(inputs).square().mean())
    engine.step()


def main() -> None:
    """Train two engines, and close first the one that was made first, which has joined the process group."""
    state_dir = sys.argv[1]
    first, second = (
        trainer_client.initialize(model=build(), config=config_of(state_dir, job=job) | TRAINED)[0]
        for job in ("first", "second")
    )
    for engine in (first, second):
        step(engine)
    first.close()
    assert dist.is_initialized(), "the second engine has no process group any more"
    step(second)
    assert second.global_steps == 2
    second.close()
    assert not dist.is_initialized()


if __name__ == "__main__":
    main()
