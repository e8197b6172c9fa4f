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

from tests.integration.support.three_blocks import RATE, STAGES, WIDTH, ThreeBlocks, inputs, start
from trainer_client import TiledParameterError


class Net(ThreeBlocks):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square().sum(-1)


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
        super().__init__(Borrower)
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
    batch = inputs(2)
    with start(model_store, job, model, STAGES[stage], gradient_accumulation_steps=2) as engine:
        for name, transform in TRANSFORMS.items():
            for micro_batch in range(2):
                expected, found = transform(plain, batch), transform(engine, batch)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name}, micro-batch {micro_batch}")
                engine.backward(engine(batch).mean())
                (plain(batch).mean() / 2).backward()
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
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    with start(model_store, job, model, STAGES[stage]) as engine:
        for number in range(3):
            leaf = inputs(number).requires_grad_()
            expected, found = (torch.autograd.grad(each(leaf).sum(), leaf)[0] for each in (plain, engine))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            plain(leaf).mean().backward()
            of_plain, leaf.grad = leaf.grad, None
            engine.backward(engine(leaf).mean())
            torch.testing.assert_close(leaf.grad, of_plain, rtol=0, atol=0)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict()
    torch.testing.assert_close(weights, dict(plain.state_dict()))


def test_a_transform_of_a_model_with_external_parameters_is_that_of_the_plain_model(model_store: str, job: str) -> None:
    model = Borrowing()
    plain = deepcopy(model)
    batch = inputs(2)
    with start(model_store, job, model, STAGES["3"]) as engine:
        for _ in range(2):
            torch.testing.assert_close(vmap(grad(engine))(batch), vmap(grad(plain))(batch), rtol=0, atol=0)


def test_a_transform_of_a_layer_in_tiles_is_refused_unless_it_is_frozen(model_store: str, job: str) -> None:
    wide = 128
    refusal = r"blocks\.0\.0\.weight was given to a transform of torch\.func.*tiling\.exclude"

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH))

    model = Net(block)
    plain = deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    batch = inputs(2)
    # Each of the weights has 8 KiB.
    section = {"address": model_store, "job": job, "tiling": "4KiB"}
    with start(model_store, job, model, STAGES["3"], paramserver=section) as engine:
        for name, transform in TRANSFORMS.items():
            for parameter in model.parameters():
                parameter.requires_grad_(True)
            with pytest.raises(TiledParameterError, match=refusal):
                transform(engine, batch)
            engine.backward(engine(batch).mean())
            plain(batch).mean().backward()
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            torch.testing.assert_close(transform(engine, batch), transform(plain, batch), msg=name)
