"""`torch.autocast` around an engine gives the numbers of plain PyTorch that opens a new context for each pass, also
where one context contains the optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trainer_client
from tests.integration.support.failing import WIDTH, inputs
from tests.integration.support.ranks import run_ranks
from trainer_client.errors import ConfigError

STEPS = 3


def bf16(**options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Model(nn.Module):
    """A model with a frozen block, and with a block that computes in fp32 in an autocast context of its own."""

    def __init__(self, *, checkpointed: bool) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])
        self.blocks[1].requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for index, block in enumerate(self.blocks):
            with bf16(enabled=False) if index == 2 else nullcontext():
                operand = hidden.float() if index == 2 else hidden
                result = checkpoint(block, operand, use_reentrant=False) if self.checkpointed else block(operand)
            hidden = hidden + result
        return hidden.float().square().mean()


def train(
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], Any],
    step: Callable[[], None],
    *,
    one_context: bool,
) -> list[float]:
    """Train, evaluate after each step, and return the losses of both in that order."""
    losses = []
    with bf16() if one_context else nullcontext():
        for number in range(STEPS):
            with nullcontext() if one_context else bf16():
                loss = forward(inputs(number))
                backward(loss)
            step()
            with nullcontext() if one_context else bf16(), torch.no_grad():
                losses += [loss.item(), forward(inputs(number)).item()]
    return losses


def train_plain(*, checkpointed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train plain PyTorch with a new context for each pass, because torch would keep casts of the initial weights in
    one context around all passes."""
    model = Model(checkpointed=checkpointed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(model, torch.Tensor.backward, step, one_context=False), dict(model.state_dict())


def start(address: str, job: str, model: nn.Module, **zero: Any) -> trainer_client.Engine:
    gather = zero.pop("gather", "auto")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, **zero},
        "paramserver": {"address": address, "job": job, "gather": gather},
    }
    return trainer_client.initialize(model=model, config=config)[0]


STAGE_3: dict[str, Any] = {"stage": 3, "offload_param": {"device": "cpu"}}
WAYS: dict[str, dict[str, Any]] = {
    "mapped": STAGE_3,
    "collective": STAGE_3 | {"gather": "collective"},
    "kept": STAGE_3 | {"stage3_max_live_parameters": 1 << 20},
    "stage-1": {"stage": 1},
}


@pytest.mark.parametrize("one_context", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_context_may_contain_steps(
    model_store: str, job: str, way: str, checkpointed: bool, one_context: bool
) -> None:
    model = Model(checkpointed=checkpointed)
    with start(model_store, job, model, **WAYS[way]) as engine:
        losses = train(engine, engine.backward, engine.step, one_context=one_context)
        weights = engine.full_state_dict()

    expected, expected_weights = train_plain(checkpointed=checkpointed)
    assert losses == expected
    assert [name for name, value in expected_weights.items() if not torch.equal(weights[name], value)] == []
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("way", ["mapped", "stage-1"])
def test_a_change_by_hand_is_seen_within_the_context(model_store: str, job: str, way: str) -> None:
    model = Model(checkpointed=False)
    with start(model_store, job, model, **WAYS[way]) as engine, bf16(), torch.no_grad():
        before = engine(inputs(0)).item()
        engine.set_full("first.weight", "param", torch.ones(WIDTH, WIDTH))
        after = engine(inputs(0)).item()
        weights = engine.full_state_dict()

    plain = Model(checkpointed=False)
    plain.load_state_dict(weights)
    with bf16(), torch.no_grad():
        assert (after, after != before) == (plain(inputs(0)).item(), True)


class CountCasts(TorchDispatchMode):
    """A dispatch mode that counts casts of matrices to bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16:
            self.casts += result.shape == (WIDTH, WIDTH)
        return result


def test_no_cast_of_a_released_unit_is_kept(model_store: str, job: str) -> None:
    """A context's second forward makes as many casts as its first, one for each of the 4 matrices that compute in
    bf16."""
    model = Model(checkpointed=False)
    casts = []
    with ExitStack() as contexts:
        engine = contexts.enter_context(start(model_store, job, model, **STAGE_3))
        contexts.enter_context(bf16())
        contexts.enter_context(torch.no_grad())
        for _ in range(2):
            with CountCasts() as counter:
                engine(inputs(0))
            casts.append(counter.casts)
    assert casts == [4, 4]


def test_gradients_of_the_named_modules_are_added_up_in_autocast_s_dtype(model_store: str, job: str) -> None:
    """Without names these are the linear and convolutional layers, and an empty list rounds none."""
    run_ranks("tests.integration.support.autocast_ranks", 2, model_store, job)


def test_a_class_that_is_not_there_is_refused(model_store: str, job: str) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Liner"]},
        "paramserver": {"address": model_store, "job": job},
    }
    with pytest.raises(ConfigError, match=r"names 'torch\.nn\.Liner', which is no class"):
        trainer_client.initialize(model=Model(checkpointed=False), config=config)
