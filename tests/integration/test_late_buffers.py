"""Buffers that a loop changes after engine.step() belong to that step, as the bias of experts that are balanced."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.support.model_runs import config_of, start
from trainer_client import Engine
from trainer_client.errors import ClientStateError

STEPS = 6


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(inputs)) + self.bias).square().mean()


def build() -> Any:
    torch.manual_seed(0)
    return Balanced()


def train(model: Any, call: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = call(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.bias.add_(0.1 * (step + 1))
        losses.append(loss.item())
    return losses


def expected() -> list[float]:
    model = build()
    return train(model, model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), range(STEPS))


def run(address: str, job: str) -> tuple[Any, Engine]:
    model = build()
    return model, start(model, config_of(address, job))


def test_a_run_goes_on_with_what_came_after_the_last_step(model_store: str, job: str) -> None:
    losses = []
    for steps in (range(3), range(3, STEPS)):
        model, engine = run(model_store, job)
        with engine:
            assert engine.client_state == ({"seen": 3} if steps.start else {})
            losses += train(model, engine, engine.optimizer, steps)
            engine.client_state["seen"] = steps.stop
    assert losses == expected()


def test_a_run_that_was_ended_in_between_says_which_buffers_go_on_without_it(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, engine = run(model_store, job)
    train(model, engine, engine.optimizer, range(3))
    engine.close_without_commit()
    with caplog.at_level(logging.WARNING), run(model_store, job)[1] as engine:
        assert engine.global_steps == 3
    assert "changed buffers after its steps (bias), and the run was ended before a commit had" in caplog.text
    caplog.clear()
    # The second run has ended well.
    with caplog.at_level(logging.WARNING), run(model_store, job)[1]:
        assert "changed buffers" in caplog.text


def test_buffers_that_only_forwards_change_cost_no_commit(model_store: str, job: str) -> None:
    _, engine = run(model_store, job)
    with engine:
        for step in range(3):
            engine.backward(engine(torch.full((4, 8), float(step))))
            engine.step()
        engine.commit_last_step()
        assert engine._commits.newest == 3


def test_what_was_changed_before_the_wait_for_a_commit_is_that_of_the_resume(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    for steps in (range(3), range(3, STEPS)):
        model, engine = run(model_store, job)
        assert engine.client_state == ({"seen": 3} if steps.start else {})
        losses += train(model, engine, engine.optimizer, steps)
        engine.client_state["seen"] = steps.stop
        engine.wait_for_commit()
        newest = engine._commits.newest
        assert newest == steps.stop
        # As with a kill, no end of the run commits anything.
        engine.close_without_commit()
    assert losses == expected()
    assert "changed buffers" not in caplog.text


def test_a_change_that_is_too_large_for_the_commit_is_refused_by_name(model_store: str, job: str) -> None:
    _, engine = run(model_store, job)
    engine.backward(engine(torch.ones(4, 8)))
    engine.step()
    engine.client_state["large"] = "x" * (2 << 20)
    with pytest.raises(ClientStateError, match=r"engine\.commit_last_step\(\) on all ranks"):
        engine.wait_for_commit()
    engine.close_without_commit()
