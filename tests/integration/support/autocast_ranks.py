"""One of two ranks that add gradients up in autocast's dtype where the config says so; run by test_autocast.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainer_client

STEPS, LEARNING_RATE = 3, 0.1
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def batch(step: int) -> torch.Tensor:
    """Return this rank's inputs of a step, [2, 5]."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train_plain(lowered: type[nn.Module] | None) -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch, which adds up the gradients of modules of one class in bf16."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step)).float().square().mean()
        loss.backward()
        for module in model.children():
            dtype = torch.bfloat16 if type(module) is lowered else torch.float32
            for parameter in module.parameters():
                assert parameter.grad is not None
                gradient = parameter.grad.to(dtype) / dist.get_world_size()
                dist.all_reduce(gradient)
                parameter.grad = gradient.float()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def train_stored(address: str, job: str, stage: str, lowered: list[str] | None) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": lowered},
        "zero_optimization": STAGES[stage],
        "paramserver": {"address": address, "job": job},
    }
    engine, *_ = trainer_client.initialize(model=build(), config=config)
    with engine:
        marked = {name: getattr(p, "comm_dtype", None) for name, p in engine.module.named_parameters()}
        lowers = lowered != []
        assert marked == {name: torch.bfloat16 if lowers and not name.startswith("1.") else None for name in marked}, (
            marked
        )
        for step in range(engine.global_steps, STEPS):
            engine.backward(engine(batch(step)).float().square().mean())
            engine.step()
        return engine.full_state_dict()


def main() -> None:
    address, job = sys.argv[1:]
    dist.init_process_group("gloo")
    expected = {lowered: train_plain(lowered) for lowered in (None, nn.Linear)}
    assert not torch.equal(expected[None]["0.weight"], expected[nn.Linear]["0.weight"])
    for stage in STAGES:
        for lowered, names in ((None, []), (nn.Linear, ["torch.nn.Linear"]), (nn.Linear, None)):
            found = train_stored(address, f"{job} {stage} {names}", stage, names)
            differs = [name for name, value in expected[lowered].items() if not torch.equal(found[name], value)]
            assert differs == [], (stage, names)
        # A job goes on with the list that its config has now, in a layout of its own.
        again = train_stored(address, f"{job} {stage} []", stage, ["torch.nn.modules.linear.Linear"])
        assert all(torch.equal(again[name], value) for name, value in expected[None].items()), stage
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
