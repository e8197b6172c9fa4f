"""What scripts for DeepSpeed ask of an engine and its optimizer beside the loop."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.checkpoint_ranks import SAVED_AT, STEPS, Net, config_of, start, steps
from trainer_client import Engine, utils
from trainer_client.errors import ConfigError


def test_an_optimizer_shows_its_loss_scale_and_whether_a_step_was_skipped(model_store: str, job: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    original = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    config = {
        "train_batch_size": 2,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1},
        "paramserver": {"address": model_store, "job": job},
    }
    engine, optimizer, _, _ = trainer_client.initialize(model=model, optimizer=original, config=config)
    shown = []
    with engine:
        assert optimizer.optimizer is original and optimizer.needs_scaler() and optimizer.dynamic_loss_scale
        for factor in (1.0, float("inf"), 1.0, 1.0, 1.0):
            engine.backward(engine(torch.ones(2, 4)).float().mean() * factor)
            engine.step()
            scale = optimizer.loss_scaler
            assert (optimizer.loss_scale, optimizer.cur_scale) == (scale.cur_scale, scale.cur_scale)
            shown.append((scale.cur_scale, scale.cur_iter, optimizer.overflow))
        weights = engine.full_state_dict()
    # The scale halves at the overflow, and doubles after two good steps, of which the first one does not count.
    assert shown == [(16.0, 1, False), (8.0, 2, True), (8.0, 3, False), (8.0, 4, False), (16.0, 5, False)]
    # Each of the four good steps has the gradient 1 for each weight.
    assert torch.allclose(weights["weight"], plain.weight.detach() - 0.4, atol=1e-3)


def test_a_skipped_step_does_not_count_for_the_norm_and_the_log_names_deepspeed(
    model_store: str, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs log and add up the norm, in which infinities of a scale that is too large would stay."""
    config = {
        "train_batch_size": 2,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "paramserver": {"address": model_store, "job": job},
    }
    with caplog.at_level(logging.INFO, "DeepSpeed"):
        engine = trainer_client.initialize(model=nn.Linear(4, 1, bias=False), config=config)[0]
    norms = [engine.get_global_grad_norm()]
    with engine:
        for factor in (float("inf"), 1.0, float("inf"), 2.0):
            engine.backward(engine(torch.ones(2, 4)).float().mean() * factor)
            engine.step()
            norms.append(engine.get_global_grad_norm())
    assert norms == [None, 0.0, 2.0, 2.0, 4.0]
    version = trainer_client.__version__
    named = [record.getMessage() for record in caplog.records if record.name == "DeepSpeed"]
    assert named == [f"DeepSpeed info: version={version}, git-hash=[none], git-branch=[none]"]


def test_gathered_memory_is_released_between_steps_and_not_within_one(model_store: str, job: str) -> None:
    config = config_of(model_store, job) | {"gradient_accumulation_steps": 2}
    losses = []
    for empties in (False, True):
        with start(config | {"paramserver": {"address": model_store, "job": f"{job}-{empties}"}}) as engine:
            assert engine.sparse_tensor_module_names == set()
            found = []
            for _ in range(4):
                loss = engine(torch.ones(4, 24))
                engine.backward(loss)
                if empties:
                    engine.empty_partition_cache()
                engine.step()
                if empties:
                    engine.empty_partition_cache()
                found.append(loss.item())
            losses.append(found)
    assert losses[0] == losses[1]


def test_a_frozen_parameter_has_no_state_to_be_read(model_store: str, job: str) -> None:
    with start(config_of(model_store, job)) as engine:
        engine.backward(engine(torch.ones(4, 24)))
        module: Any = engine.module
        frozen, trained = module.frozen.weight, module.first.weight
        for get in (utils.safe_get_full_fp32_param, utils.safe_get_local_fp32_param, utils.safe_get_full_grad):
            assert get(frozen) is None
            assert get(trained) is not None
        assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
        values = engine.get_full(frozen, "param")
        assert values is not None and torch.equal(values, engine.full_state_dict()["frozen.weight"])


def test_a_frozen_parameter_of_a_group_has_a_state_to_be_read_once_it_was_trained(model_store: str, job: str) -> None:
    model: Any = Net()
    # DeepSpeed's documentation passes all parameters, and the frozen ones among them get states here.
    engine = trainer_client.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(model_store, job)
    )[0]
    with engine:
        frozen = model.frozen.weight
        engine.backward(engine(torch.ones(4, 24)))
        assert utils.safe_get_full_fp32_param(frozen) is None
        assert utils.safe_get_full_grad(frozen) is None
        engine.step()
        assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
        frozen.requires_grad_(True)
        engine.backward(engine(torch.ones(4, 24)))
        assert utils.safe_get_full_grad(frozen) is not None
        engine.step()
        frozen.requires_grad_(False)
        moment = utils.safe_get_full_optimizer_state(frozen, "exp_avg")
        assert moment is not None and moment.any()


@pytest.mark.parametrize(("stage", "half"), [(1, False), (3, False), (3, True)])
def test_a_model_of_an_open_engine_is_taken_over_with_its_weights(
    model_store: str, job: str, stage: int, half: bool
) -> None:
    """Scripts of two phases, and a cell of a notebook that is run again, pass the model of an engine once more."""

    def begin(name: str, model: nn.Module) -> Engine:
        config = config_of(model_store, f"{job}-{name}", half=half) | {"zero_optimization": {"stage": stage}}
        torch.manual_seed(2)
        return start(config, model)

    first = begin("first", Net())
    list(steps(first, SAVED_AT))
    first.module.seen.zero_()
    weights = first.full_state_dict()
    again = begin("again", first.module)
    with pytest.raises(RuntimeError, match=r"a later initialize\(\) has taken it over"):
        first(torch.ones(4, 24))
    assert first.is_closed
    with again:
        losses = list(steps(again, STEPS))
        trained = again.full_state_dict()

    plain = Net()
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16() if half else parameter.data
    plain.load_state_dict(weights)
    with begin("plain", plain) as engine:
        assert list(steps(engine, STEPS)) == losses
        assert all(torch.equal(value, trained[name]) for name, value in engine.full_state_dict().items())
    assert not any(torch.equal(trained[name], weights[name]) for name in trained if "frozen" not in name)


def test_a_model_of_a_closed_engine_is_refused(model_store: str, job: str) -> None:
    model = Net()
    start(config_of(model_store, job), model).close()
    for config in (config_of(model_store, f"{job}-new"), {"train_batch_size": 1}):
        with pytest.raises(ConfigError, match=r"first.weight .* was closed or deleted.*build the model anew"):
            trainer_client.initialize(model=model, config=config)


class LateError(torch.autograd.Function):
    """The identity, whose backward raises an error, as one that has too little memory does."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for this batch")


@pytest.mark.parametrize(("stage", "fails"), [(0, False), (1, True), (2, False)])
def test_a_model_of_a_closed_engine_keeps_its_weights_below_stage_3(
    model_store: str, job: str, stage: int, fails: bool
) -> None:
    """The Trainer of transformers closes its engine before it trains a model once more, also after a failed pass."""

    def config(name: str) -> dict[str, Any]:
        return config_of(model_store, f"{job}-{name}") | {"zero_optimization": {"stage": stage}}

    engine = start(config("first"))
    list(steps(engine, 1))
    weights = engine.full_state_dict()
    if fails:
        with pytest.raises(torch.OutOfMemoryError):
            engine.backward(LateError.apply(engine(torch.ones(4, 24))))  # type: ignore[no-untyped-call]
    engine.destroy()
    model = engine.module
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    # The model is a plain one, which can be called, converted and loaded.
    model.double()(torch.ones(4, 24, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    model.float().zero_grad()
    model.load_state_dict(weights)
    with start(config("again"), model) as again:
        assert all(torch.equal(value, weights[name]) for name, value in again.full_state_dict().items())
        list(steps(again, 1))
        assert not torch.equal(again.full_state_dict()["first.weight"], weights["first.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_trained_model_is_passed_without_an_optimizer(model_store: str, job: str, stage: int) -> None:
    """A script trains a model, and goes on with an engine for inference."""
    engine = start(config_of(model_store, job))
    list(steps(engine, 1))
    plain = Net()
    plain.load_state_dict(engine.full_state_dict())
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": stage},
        "paramserver": {"address": model_store, "job": f"{job}-inference"} if stage else {},
    }
    answers = trainer_client.initialize(model=engine.module, config=config)[0]
    with torch.no_grad():
        assert torch.equal(answers.eval()(torch.ones(4, 24)), plain.eval()(torch.ones(4, 24)))
    assert engine.is_closed
    answers.destroy()
