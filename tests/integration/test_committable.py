"""What a commit cannot carry is refused before the step is made, and the run goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.integration.support.model_runs import config_of, start
from trainer_client.errors import ClientStateError

INPUTS = torch.linspace(-1, 1, 32).view(4, 8)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def losses_of(model: nn.Module, optimizer: Any, rates: list[Any]) -> list[float]:
    losses = []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        loss = model(INPUTS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("number", [np.array, np.float64, torch.tensor])
def test_rates_of_any_class_of_numbers_are_committed(model_store: str, job: str, number: Any) -> None:
    rates = [0.01, 0.02, 0.005]
    plain = small()
    expected = losses_of(plain, torch.optim.AdamW(plain.parameters(), fused=True), rates)
    config = config_of(model_store, job)

    losses = []
    for part in (rates[:2], rates[2:]):
        with start(small(), config) as engine:
            losses += losses_of(engine, engine.optimizer, [number(rate) for rate in part])
            engine.wait_for_commit()

    assert losses == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({3, 4}, r"engine\.client_state\.it is a set: .* write sorted"),
        (Path("data"), r"engine\.client_state\.it is a PosixPath: .* write str"),
        (torch.empty(2, device="meta"), r"engine\.client_state\.it is a tensor that cannot be committed"),
        (torch.zeros(3 << 20, dtype=torch.uint8), r"would have \d+ bytes, of which engine\.client_state, "),
    ],
    ids=["set", "path", "meta", "large"],
)
def test_a_value_that_cannot_be_committed_is_refused_before_the_step(
    model_store: str, job: str, value: Any, message: str
) -> None:
    plain = small()
    expected = losses_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), [1e-2] * 3)

    losses = []
    with start(small(), config_of(model_store, job)) as engine:
        for step in range(3):
            loss = engine(INPUTS).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            if step == 1:
                engine.client_state["it"] = value
                with pytest.raises(ClientStateError, match=message):
                    engine.step()
                assert engine.global_steps == 1
                del engine.client_state["it"]
            engine.step()

    assert losses == expected


def test_a_setting_of_a_group_that_cannot_be_committed_is_refused_before_the_step(model_store: str, job: str) -> None:
    with start(small(), config_of(model_store, job)) as engine:
        engine.backward(engine(INPUTS).square().mean())
        engine.optimizer.param_groups[0]["names"] = {"a"}
        with pytest.raises(ClientStateError, match=r"^optimizer\.param_groups\[0\]\.names is a set"):
            engine.step()
        engine.optimizer.param_groups[0]["names"] = ["a"]
        engine.step()
        assert engine.global_steps == 1
