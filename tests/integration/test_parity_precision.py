"""Low precision follows its rule: bf16 or fp16 compute and gradients, fp32 weights and moments, and a single
rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run, build_model, make_optimizer, micro_batches
from trainer_client.engine.engine import Engine

STEPS = 12
CLIPPING = 0.5
LEARNING_RATE = 1e-2


def reference(dtype: torch.dtype) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Yield the loss and the fp32 weights after each step of a hand-written loop. In it torch's AdamW updates fp32
    weights with gradients that were computed in `dtype` from the rounded weights."""
    model = build_model(Run())
    masters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE, fused=True)
    model.to(dtype)
    for batch in micro_batches(STEPS):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), CLIPPING)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        yield loss.item(), masters


def start(config: dict[str, Any], **precision: Any) -> Engine:
    model = build_model(Run())
    optimizer, _ = make_optimizer(model, Run())
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=optimizer, config=config | precision | {"gradient_clipping": CLIPPING}
    )
    return engine


def test_bf16_equals_a_hand_written_loop_bit_for_bit(model_store: str, job: str) -> None:
    losses = []
    with start(config_of(model_store, job, "nvme"), bf16={"enabled": True}) as engine:
        for batch in micro_batches(STEPS):
            losses.append(engine.backward(engine(input_ids=batch, labels=batch).loss).item())
            engine.step()
        weights = engine.full_state_dict()

    expected = list(reference(torch.bfloat16))
    assert losses == [loss for loss, _ in expected]
    masters = expected[-1][1]
    assert [name for name in masters if not torch.equal(weights[name], masters[name])] == []


def test_fp16_skips_steps_until_the_loss_scale_fits_and_then_learns(model_store: str, job: str) -> None:
    losses = []
    with start(
        config_of(model_store, job, "nvme"), fp16={"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
    ) as engine:
        initial = engine.full_state_dict()
        skipped_weights = None
        for batch in micro_batches(40):
            losses.append(engine.backward(engine(input_ids=batch, labels=batch).loss).item())
            engine.step()
            if engine.skipped_steps == engine.global_steps:
                skipped_weights = engine.full_state_dict()
        skipped, steps = engine.skipped_steps, engine.global_steps

    assert skipped_weights is not None, "the first scale is beyond fp16: its gradient cannot be finite"
    assert all(torch.equal(initial[name], skipped_weights[name]) for name in initial)
    assert 0 < skipped < 30
    assert steps == 40
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_with_a_gradient_that_is_not_finite_is_as_if_it_was_not_made(
    model_store: str, job: str, precision: str
) -> None:
    enabled = {"bf16": {"enabled": precision == "bf16"}}

    def train(name: str, *, poisoned: bool) -> tuple[dict[str, torch.Tensor], Engine]:
        with start(config_of(model_store, f"{job}-{name}", "nvme"), **enabled) as engine:
            for index, batch in enumerate(micro_batches(6)):
                if poisoned and index == 3:
                    engine.backward(engine(input_ids=batch, labels=batch).loss * torch.nan)
                    engine.step()
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
            return engine.full_state_dict(), engine

    clean, _ = train("clean", poisoned=False)
    poisoned, engine = train("poisoned", poisoned=True)

    assert (engine.global_steps, engine.skipped_steps) == (7, 1)
    assert [name for name in clean if not torch.equal(clean[name], poisoned[name])] == []
