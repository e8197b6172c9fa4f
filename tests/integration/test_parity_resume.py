"""A run that is interrupted after a step and started again ends with the same bits as a run without interruption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trainer_client
from tests.integration.support.training import (
    Result,
    Run,
    assert_bit_equal,
    build_model,
    make_optimizer,
    micro_batches,
    store_config,
    train_through_store,
)
from trainer_client import JobConflictError, StoreError

STEPS = 10
RUN = Run(steps=STEPS, dropout=0.1, clipping=0.5, schedule=True, two_groups=True)


def train_in_parts(run: Run, ends: Sequence[int]) -> Result:
    """Train to each step of `ends` with a new engine each time. Only the job in the store says where to go on."""
    losses: list[float] = []
    norms: list[float] = []
    batches = list(micro_batches(run.steps))
    for end in ends:
        model = build_model(run)
        optimizer, scheduler = make_optimizer(model, run)
        engine, *_ = trainer_client.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=run.config | {"gradient_clipping": 0.5}
        )
        with engine:
            assert engine.resumed_step == engine.client_state.get("cursor", 0)
            if engine.resumed_step == 0:
                torch.manual_seed(3)
            for batch in batches[engine.resumed_step : end]:
                losses.append(engine.backward(engine(input_ids=batch, labels=batch).loss).item())
                engine.client_state["cursor"] = engine.global_steps + 1
                engine.step()
                norms.append(engine.get_global_grad_norm() or 0.0)
            weights = engine.full_state_dict()
    return Result(losses=losses, norms=norms, weights=weights)


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, device: str) -> None:
    whole = train_through_store(replace(RUN, config=store_config(tmp_path / "whole", device)))

    parts = train_in_parts(replace(RUN, config=store_config(tmp_path / "parts", device)), ends=[1, 6, STEPS])

    assert_bit_equal(parts, whole)


def test_resume_policies_are_kept(tmp_path: Path) -> None:
    def config(resume: str) -> Run:
        return replace(RUN, config=store_config(tmp_path, resume=resume))

    with pytest.raises(StoreError, match="must"):
        train_in_parts(config("must"), ends=[1])
    train_in_parts(config("never"), ends=[1])
    with pytest.raises(JobConflictError, match="never"):
        train_in_parts(config("never"), ends=[2])
    train_in_parts(config("must"), ends=[2])


def test_another_model_under_the_same_job_is_refused(tmp_path: Path) -> None:
    run = replace(RUN, config=store_config(tmp_path))
    train_in_parts(run, ends=[1])

    with pytest.raises(JobConflictError):
        train_through_store(Run(model="conditional", config=store_config(tmp_path)))
