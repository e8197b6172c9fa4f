"""torch.func's transforms of an engine compute what they compute of the plain model, and training goes on as without
them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad, grad_and_value, jacrev, vjp, vmap

import trainer_client

WIDTH = 16
RATE = 0.125
STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-store": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().sum(-1)


class Borrower(nn.Module):
    """A block that uses the weight of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        # This is a plain list, so that the module in it is no child of the block.
        self.others: list[nn.Linear] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.own(hidden))
        for other in self.others:
            hidden = hidden + nn.functional.linear(hidden, other.weight)
        return hidden


class Borrowing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Borrower() for _ in range(3)])
        self.blocks[0].others.append(self.blocks[2].own)
        self.blocks[2].others.append(self.blocks[1].own)


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda model, x: grad(model)(x[0]),
    "grad_and_value": lambda model, x: grad_and_value(model)(x[0]),
    "jacrev": lambda model, x: jacrev(model)(x),
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(x.shape[0])),
    "vmap": lambda model, x: vmap(grad(model))(x),
    "vmap without gradients": lambda model, x: vmap(model)(x),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_transform_of_an_engine_is_that_of_the_plain_model(model_store: str, job: str, stage: str) -> None:
    model = Net()
    plain = deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": STAGES[stage],
        "paramserver": {"address": model_store, "job": job},
    }
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
    with trainer_client.initialize(model=model, config=config)[0] as engine:
        for name, transform in TRANSFORMS.items():
            for micro_batch in range(2):
                expected, found = transform(plain, inputs), transform(engine, inputs)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name}, micro-batch {micro_batch}")
                engine.backward(engine(inputs).mean())
                (plain(inputs).mean() / 2).backward()
                engine.step()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict()
    torch.testing.assert_close(weights, dict(plain.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_the_input_of_the_first_block_are_asked_for_alone(model_store: str, job: str, stage: str) -> None:
    """The input is a leaf that goes into a unit as it is, of which torch's hook on several gradients knows nothing."""
    model = Net()
    plain = deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": STAGES[stage],
        "paramserver": {"address": model_store, "job": job},
    }
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    with trainer_client.initialize(model=model, config=config)[0] as engine:
        for number in range(3):
            inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
            expected, found = (torch.autograd.grad(each(inputs).sum(), inputs)[0] for each in (plain, engine))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            plain(inputs).mean().backward()
            of_plain, inputs.grad = inputs.grad, None
            engine.backward(engine(inputs).mean())
            torch.testing.assert_close(inputs.grad, of_plain, rtol=0, atol=0)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict()
    torch.testing.assert_close(weights, dict(plain.state_dict()))


def test_a_transform_of_a_model_with_external_parameters_is_that_of_the_plain_model(model_store: str, job: str) -> None:
    model = Borrowing()
    plain = deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": STAGES["3"],
        "paramserver": {"address": model_store, "job": job},
    }
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
    with trainer_client.initialize(model=model, config=config)[0] as engine:
        for _ in range(2):
            torch.testing.assert_close(vmap(grad(engine))(inputs), vmap(grad(plain))(inputs), rtol=0, atol=0)
