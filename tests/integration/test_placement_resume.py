"""A job goes on under another stage and placement. States that live on the device are in the store when the durability
class promises it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.training import (
    MICRO_BATCH,
    Run,
    assert_bit_equal,
    build_model,
    launch,
    make_optimizer,
    micro_batches,
    train_with_masters,
)
from trainer_client import ConfigError, NonFiniteGradientError

STEPS = 6
RUN = Run(with_masters=True, steps=STEPS, clipping=0.5)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state_dir = tmp_path_factory.mktemp("daemon") / "state"
    with Daemon(state_dir, {"host_budget": "64MiB", "nvme_budget": "1GiB"}) as daemon:
        yield daemon.address


def config(
    address: str, job: str, stage: int, placement: dict[str, Any] | None = None, **section: Any
) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": stage},
        "paramserver": {"address": address, "job": job, "placement": placement or {}, **section},
    }


def start(config: dict[str, Any]) -> trainer_client.Engine:
    model = build_model(RUN)
    optimizer, _ = make_optimizer(model, RUN)
    engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=config | {"gradient_clipping": 0.5})
    return engine


def train(engine: trainer_client.Engine, until: int) -> None:
    for batch in list(micro_batches(STEPS))[engine.global_steps : until]:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()


def test_each_leg_of_a_run_may_have_another_stage_and_placement(address: str, tmp_path: Path) -> None:
    legs: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (3, {"parameters": "nvme", "optimizer": "host"}),
        (2, {"optimizer": {"device": 0.5, "nvme": 0.5}}),
        (3, {"parameters": {"device": 0.5, "host": 0.5}}),
        (1, {"optimizer": "nvme"}),
        (0, {}),
    ]
    resumed = [
        replace(RUN, steps=step, config=config(address, "legs", stage, placement))
        for step, (stage, placement) in enumerate(legs, start=1)
    ]

    *parts, last, whole = launch(
        [*resumed, replace(RUN, config=config(address, "whole", 3, {"parameters": "nvme", "optimizer": "nvme"}))],
        2,
        tmp_path,
    )

    assert [part.resumed_step for part in (*parts, last)] == list(range(STEPS))
    losses = [loss for part in (*parts, last) for loss in part.losses]
    norms = [norm for part in (*parts, last) for norm in part.norms]
    assert_bit_equal(replace(last, losses=losses, norms=norms), whole)


@pytest.mark.parametrize(
    ("durability", "closed", "resumed"),
    [("step", False, 5), ("snapshot:2", False, 4), ("snapshot:2", True, 5), ("none", True, 0)],
)
def test_a_job_on_the_device_goes_on_from_the_last_commit_that_its_durability_class_promises(
    address: str, durability: str, closed: bool, resumed: int
) -> None:
    job = f"{durability} {closed}"
    expected = train_with_masters(RUN)

    def interrupted() -> None:
        with start(config(address, job, 2, durability=durability)) as engine:
            train(engine, 5)
            if not closed:
                raise KeyboardInterrupt

    if closed:
        interrupted()
    else:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    # The loop resumes twice, because after the first resume the numbers of commits and steps may differ.
    for _ in range(2):
        with start(config(address, job, 0, durability=durability)) as engine:
            assert engine.resumed_step == resumed
            train(engine, resumed + 1)
            resumed = 0 if durability == "none" else engine.global_steps
            if engine.global_steps == STEPS:
                weights = engine.full_state_dict()
                assert [n for n, w in weights.items() if not torch.equal(w, expected.weights[n])] == []


def test_micro_batches_after_the_last_step_are_not_part_of_the_commit_at_the_end(address: str) -> None:
    settings = config(address, "half a step", 2, durability="snapshot:9") | {"gradient_accumulation_steps": 2}
    with start(settings) as engine:
        for batch in micro_batches(3):
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 3)

    with start(settings) as engine:
        assert (engine.global_steps, engine.micro_steps) == (1, 2)


def test_resident_parameters_are_there_between_steps_and_sharded_ones_are_refused(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's own state dict has names and no values for sharded parameters, as with DeepSpeed."""
    with start(config(address, "resident", 2, {"optimizer": "nvme"})) as engine:
        train(engine, 2)
        plain = engine.module.state_dict()
        full = engine.full_state_dict()
        assert plain.keys() == full.keys()
        assert [name for name in full if not torch.equal(plain[name], full[name])] == []
        assert engine.placement()["parameters"].keys() == {"device"}
        assert engine.placement()["optimizer"].keys() == {"nvme"}
    with start(config(address, "sharded", 3)) as engine:
        with pytest.raises(RuntimeError, match=r"engine\.full_state_dict"):
            engine.module.state_dict()
        with engine.gathered(engine.module):
            whole = engine.state_dict()
        assert [name for name in plain if whole[f"module.{name}"].shape != plain[name].shape] == []
        names = engine.state_dict()
        assert (names.keys(), "full_state_dict" in caplog.text) == (whole.keys(), True)
        weights = {f"module.{name}" for name, _ in engine.module.named_parameters(remove_duplicate=False)}
        assert {name for name, value in names.items() if not value.numel()} == weights
        assert [name for name in weights if names[name].dtype is not whole[name].dtype] == []
        with pytest.raises(ConfigError):
            engine.load_state_dict(names)


def test_the_run_stops_after_as_many_skipped_steps_in_a_row_as_the_config_allows(address: str) -> None:
    (batch,) = micro_batches(1)

    def step(engine: trainer_client.Engine, factor: float) -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss * factor)
        engine.step()

    with start(config(address, "skips", 3, max_consecutive_skipped_steps=2)) as engine:
        step(engine, 1.0)
        weights = engine.full_state_dict()
        for factor in (torch.nan, 1.0, torch.inf):
            step(engine, factor)
        kept = engine.full_state_dict()
        with pytest.raises(NonFiniteGradientError, match=r"2 steps in a row, up to step 5.*max_consecutive_skipped"):
            step(engine, torch.nan)
        assert (engine.global_steps, engine.skipped_steps) == (5, 3)
        after = engine.full_state_dict()
    assert any(not torch.equal(weights[name], kept[name]) for name in weights)
    assert [name for name in kept if not torch.equal(after[name], kept[name])] == []

    # The skipped steps of the former run count in the one that goes on from it.
    with start(config(address, "skips", 3, max_consecutive_skipped_steps=2)) as engine:
        for skipped in (3, 4):
            with pytest.raises(NonFiniteGradientError, match=f"the gradients of {skipped} steps in a row"):
                step(engine, torch.nan)
        step(engine, 1.0)
        step(engine, torch.nan)
        assert (engine.global_steps, engine.skipped_steps) == (9, 6)


def test_a_sum_of_micro_batches_that_leaves_the_range_of_fp16_is_skipped(address: str) -> None:
    for placement in ({}, {"optimizer": "host"}):
        model = torch.nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        settings = config(address, f"overflow {placement}", 3, placement)
        settings |= {"fp16": {"enabled": True, "loss_scale": 1.0}, "gradient_accumulation_steps": 2}
        engine, *_ = trainer_client.initialize(model=model, optimizer=optimizer, config=settings)
        with engine:
            before = engine.full_state_dict()["weight"]
            for rows, skipped in ((40_000.0, 1), (20_000.0, 1)):
                for _ in range(2):
                    inputs = torch.full((1, 4), rows)
                    # The factor 2 cancels the division by 2 accumulation steps, so each micro-batch adds `rows` to
                    # every element of the gradient.
                    engine.backward(engine(inputs).float().sum() * 2.0)
                    engine.step()
                assert engine.skipped_steps == skipped
            after = engine.full_state_dict()["weight"]
        assert torch.allclose(after, before - 1e-5 * 40_000.0)


def test_several_backward_passes_of_one_graph_add_up(address: str) -> None:
    reference = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    inputs = torch.randn(3, 4)
    for stage, placement in ((2, {}), (3, {"parameters": "host", "optimizer": "host"})):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        model.load_state_dict(reference.state_dict())
        expected = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        expected.load_state_dict(reference.state_dict())
        optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
        engine, *_ = trainer_client.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
            config=config(address, f"backwards {stage}", stage, placement),
        )
        with engine:
            for _ in range(2):
                output = engine(inputs)
                engine.backward(output.mean(), retain_graph=True)
                engine.backward(output.square().mean())
                engine.step()
            weights = engine.full_state_dict()
        for _ in range(2):
            output = expected(inputs)
            output.mean().backward(retain_graph=True)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, weight in expected.state_dict().items():
            assert torch.equal(weights[name], weight), name
