"""Models that a simple gathering of units would break train through the store as they do without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import (
    Run,
    assert_bit_equal,
    build_model,
    launch,
    make_optimizer,
    micro_batches,
    train_plain,
    train_through_store,
)

CONDITIONAL = Run(model="conditional", steps=12, clipping=0.5, accumulation=2)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_skipped_reused_frozen_and_partly_used_units_equal_plain_pytorch(
    model_store: str, job: str, checkpointing: Any
) -> None:
    run = replace(CONDITIONAL, checkpointing=checkpointing, config=config_of(model_store, job, "nvme"))

    assert_bit_equal(train_through_store(run), train_plain(run))


def test_ranks_that_use_different_experts_equal_ddp_to_rounding(model_store: str, job: str, tmp_path: Path) -> None:
    run = replace(CONDITIONAL, config=config_of(model_store, job, "nvme"))

    ours, ddp = launch([run, replace(run, through_store=False)], 2, tmp_path)

    torch.testing.assert_close(ours.losses, ddp.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.norms, ddp.norms, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.weights, ddp.weights, rtol=1e-3, atol=2e-3)


def test_inference_between_and_within_steps_changes_nothing(model_store: str, job: str) -> None:
    run = Run(steps=4, config=config_of(model_store, job, "nvme"))
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)
    losses = []
    with engine:
        for batch in micro_batches(run.steps):
            with torch.no_grad():
                before = engine(input_ids=batch, labels=batch).loss
            loss = engine(input_ids=batch, labels=batch).loss
            with torch.inference_mode():
                within = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            assert before.item() == within.item() == loss.item()
        prompt = next(micro_batches(1))[:1, :4]
        generated = engine.module.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        weights = engine.full_state_dict()

    plain = build_model(run)
    plain.load_state_dict(weights, strict=True)
    assert losses == train_plain(run).losses
    assert generated.tolist() == plain.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()


def test_misuse_is_refused_with_what_to_call(model_store: str, job: str) -> None:
    run = Run(config=config_of(model_store, job, "nvme"))
    model = build_model(run)
    optimizer, _ = make_optimizer(model, run)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)
    with engine:
        batch = next(micro_batches(1))
        with pytest.raises(RuntimeError, match=r"step\(\) without backward"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"engine\.full_state_dict"):
            model.state_dict()
        with pytest.raises(ValueError, match="pass a scalar"):
            engine.backward(engine(input_ids=batch, labels=batch).logits)
        # None of the refused calls prevents the next backward pass.
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    with pytest.raises(RuntimeError, match="closed"):
        engine(input_ids=batch)


def test_a_failed_backward_loses_its_step_and_no_other(model_store: str, job: str) -> None:
    run = Run(steps=3, config=config_of(model_store, job, "nvme"))
    batches = list(micro_batches(run.steps))

    def start() -> trainer_client.Engine:
        model = build_model(run)
        optimizer, _ = make_optimizer(model, run)
        return trainer_client.initialize(model=model, optimizer=optimizer, config=run.config)[0]

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    with start() as engine:
        engine.backward(engine(input_ids=batches[0], labels=batches[0]).loss)
        engine.step()
        output = engine(input_ids=batches[1], labels=batches[1], output_hidden_states=True)
        output.hidden_states[1].register_hook(fail)
        with pytest.raises(ArithmeticError):
            engine.backward(output.loss)
        with pytest.raises(RuntimeError, match="restart the job"):
            engine.step()
    with start() as engine:
        assert engine.resumed_step == 1
        for batch in batches[1:]:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        weights = engine.full_state_dict()

    expected = train_plain(run).weights
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
