"""A run that is interrupted after a step and started again ends with the same bits as a run without interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import (
    Result,
    Run,
    assert_bit_equal,
    build_model,
    make_optimizer,
    micro_batches,
    train_through_store,
)
from trainer_client import JobConflictError, StoreError, schedules

STEPS = 10
RUN = Run(steps=STEPS, dropout=0.1, clipping=0.5, schedule=True, two_groups=True)


def train_in_parts(
    run: Run, ends: Sequence[int], daemon: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Result:
    """Train to each step of `ends` with a new engine each time. Only the job in the store says where to go on.

    If `daemon` is given, each part has a daemon of its own, which is killed after it.
    """
    losses: list[float] = []
    norms: list[float] = []
    batches = list(micro_batches(run.steps))
    for end in ends:
        with daemon():
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
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    model_store: str, job: str, tmp_path: Path, device: str
) -> None:
    whole = train_through_store(replace(RUN, config=config_of(model_store, job, device)))

    daemon = partial(Daemon, tmp_path / "state", {"host_budget": "64MiB", "nvme_budget": "256MiB"})
    config = config_of(f"unix:{tmp_path}/state/paramserver.sock", job, device)
    parts = train_in_parts(replace(RUN, config=config), ends=[1, 6, STEPS], daemon=daemon)

    assert_bit_equal(parts, whole)


# The first has a warm-up that ends after the stop, and a decay that does not; the second cycles the betas, too.
SCHEDULES: dict[str, Any] = {
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_max_lr": [0.01, 0.003]},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_second_step_size": 2},
}


def rates_in_parts(config: dict[str, Any], ends: Sequence[int]) -> list[tuple[Any, Any]]:
    """Train to each step of `ends` with a new engine each time. Return the rates and betas of all steps."""
    seen: list[tuple[Any, Any]] = []
    for end in ends:
        model = build_model(RUN)
        optimizer, _ = make_optimizer(model, replace(RUN, schedule=False))
        engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config)
        with engine:
            for batch in list(micro_batches(end))[engine.resumed_step :]:
                seen.append((engine.get_lr(), engine.get_mom()))
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_of_a_resumed_run_are_those_of_an_uninterrupted_one(model_store: str, job: str, name: str) -> None:
    section = {"scheduler": {"type": name, "params": SCHEDULES[name]}}
    optimizer, _ = make_optimizer(build_model(RUN), replace(RUN, schedule=False))
    schedule = getattr(schedules, name)(optimizer, **SCHEDULES[name])
    expected = []
    for _ in range(7):
        expected.append(tuple([group[key] for group in optimizer.param_groups] for key in ("lr", "betas")))
        optimizer.step()
        schedule.step()

    assert rates_in_parts(config_of(model_store, f"{job}-whole", "nvme") | section, ends=[7]) == expected
    assert rates_in_parts(config_of(model_store, f"{job}-parts", "nvme") | section, ends=[2, 7]) == expected


def test_resume_policies_are_kept(model_store: str, job: str) -> None:
    def config(resume: str) -> Run:
        return replace(RUN, config=config_of(model_store, job, "nvme", resume=resume))

    with pytest.raises(StoreError, match="must"):
        train_in_parts(config("must"), ends=[1])
    train_in_parts(config("never"), ends=[1])
    with pytest.raises(JobConflictError, match="never"):
        train_in_parts(config("never"), ends=[2])
    train_in_parts(config("must"), ends=[2])


def test_another_model_under_the_same_job_is_refused(model_store: str, job: str) -> None:
    run = replace(RUN, config=config_of(model_store, job, "nvme"))
    train_in_parts(run, ends=[1])

    with pytest.raises(JobConflictError):
        train_through_store(Run(model="conditional", config=run.config))


def buffers_in_parts(config: dict[str, Any], ends: Sequence[int]) -> dict[str, torch.Tensor]:
    """Train a model with running means to each step of `ends`, with a new engine each time. Return its state."""
    batches = torch.randn(STEPS, 6, 4, generator=torch.Generator().manual_seed(2))
    for end in ends:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config)
        with engine:
            for batch in batches[engine.resumed_step : end]:
                engine.backward(engine(batch).square().mean())
                engine.step()
            state = engine.full_state_dict()
    return state


def test_buffers_go_on_where_the_job_goes_on(model_store: str, job: str) -> None:
    whole = buffers_in_parts(config_of(model_store, f"{job}-whole", "nvme"), ends=[STEPS])
    parts = buffers_in_parts(config_of(model_store, f"{job}-parts", "nvme"), ends=[4, STEPS])

    assert whole["1.num_batches_tracked"] == STEPS
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
