"""A model without an optimizer below stage 3: whole on the device, and it computes what the plain model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from trainer_client.errors import ConfigError, PhaseError
from trainer_client.inference.whole_engine import WholeEngine


def model_of(width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 1))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_model_without_an_optimizer_computes_as_the_plain_one(stage: int, half: bool) -> None:
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": half}}
    plain = model_of()
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if half else torch.float32)
    inputs = torch.randn(4, 8)
    mine: Any = model_of()
    returned: Any = trainer_client.initialize(model=mine, model_parameters=mine.parameters(), config=config)
    engine, *others = returned
    assert isinstance(engine, WholeEngine) and others == [None, None, None]
    with engine:
        expected = plain(inputs.bfloat16() if half else inputs)
        found = engine(inputs)
        assert torch.equal(found, expected) and found.dtype == expected.dtype
        # Its parameters stay as they were, so a caller may ask for gradients.
        torch.autograd.backward(found.sum())
        torch.autograd.backward(expected.sum())
        for one, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
        for name in ("backward", "step", "save_checkpoint"):
            with pytest.raises(PhaseError, match=f"{name}.. of an engine without an optimizer"):
                getattr(engine, name)()
        assert list(engine.module.state_dict()) == list(plain.state_dict())
        assert engine.train_micro_batch_size_per_gpu() == 4 and engine.bfloat16_enabled() is half


def test_a_model_without_an_optimizer_has_no_use_for_data() -> None:
    with pytest.raises(ConfigError, match=r"initialize\(training_data=...\) needs an optimizer"):
        trainer_client.initialize(model=model_of(), config={"train_batch_size": 4}, training_data=[1, 2])  # type: ignore[arg-type]
