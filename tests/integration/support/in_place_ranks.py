"""One of two ranks that change parameters in place; run by test_in_place.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import trainer_client
from tests.integration.support.model_runs import config_of
from trainer_client.errors import ConfigError

STEPS = 4


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, fused=True)


def batch(step: int) -> torch.Tensor:
    """Return the same samples on all ranks, so that the mean over them is that of one rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.08, 0.08)


def check_alike(config: dict[str, Any]) -> None:
    """Check that the same change on all ranks counts, also for a run that goes on after the end of this one."""
    plain = small()
    optimizer = optimizer_of(plain)
    expected = []
    for step in range(STEPS):
        loss = (plain(batch(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clamp(plain)
        expected.append(loss.item())
    losses = []
    for steps in (range(2), range(2, STEPS)):
        model = small()
        with trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config)[0] as engine:
            for step in steps:
                loss = (engine(batch(step)) - 1).square().mean()
                engine.backward(loss)
                engine.step()
                clamp(model)
                losses.append(loss.item())
            weights = engine.full_state_dict()
    assert losses == expected, (losses, expected)
    for name, value in plain.state_dict().items():
        assert torch.equal(weights[name], value), name


def check_unlike(config: dict[str, Any]) -> None:
    """Check that a change on one rank only is an error on both ranks, before anything is changed."""
    model = small()
    engine = trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
    engine.backward((engine(batch(0)) - 1).square().mean())
    engine.step()
    if dist.get_rank() == 1:
        model[2].bias.data.zero_()
    engine.backward((engine(batch(1)) - 1).square().mean())
    try:
        engine.step()
    except ConfigError as error:
        assert "parameter 2.bias was changed in place, and has not the same values on all ranks" in str(error), error
    else:
        raise AssertionError("the ranks have trained on with different parameters")


def main() -> None:
    address = sys.argv[1]
    dist.init_process_group("gloo")
    for stage in (0, 1, 2):
        for offload in ("none", "cpu") if stage else ("none",):
            zero = {"stage": stage, "offload_optimizer": {"device": offload}} if stage else {"stage": 0}
            config = config_of(address, f"in-place-{stage}-{offload}") | {"zero_optimization": zero}
            check_alike(config)
    check_unlike(config_of(address, "in-place-unlike") | {"zero_optimization": {"stage": 1}})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
