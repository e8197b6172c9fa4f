"""A trainer reads and changes parameters, gradients and optimizer states by name, wherever they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import trainer_client
from tests.integration.support.access_ranks import check_gradients_that_are_given
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import Run, build_model, micro_batches
from trainer_client import zero
from trainer_client.errors import ReleasedParameterError

WEIGHT = "transformer.h.1.mlp.c_fc.weight"
BIAS = "transformer.h.1.mlp.c_fc.bias"
EMBEDDING = "transformer.wte.weight"

STAGE_1: dict[str, Any] = {"zero_optimization": {"stage": 1}}


def start(config: dict[str, Any]) -> trainer_client.Engine:
    model = build_model(Run())
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    return trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0]


def backward(engine: trainer_client.Engine, batch: torch.Tensor) -> None:
    engine.backward(engine(input_ids=batch, labels=batch).loss)


def value_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def is_released(parameter: torch.Tensor) -> bool:
    try:
        parameter.sum()
    except ReleasedParameterError:
        return True
    return False


@pytest.mark.parametrize("placement", [{}, STAGE_1], ids=["nvme", "stage-1"])
def test_what_is_read_and_set_is_what_plain_pytorch_has(tmp_path: Path, placement: dict[str, Any]) -> None:
    batches = list(micro_batches(3))
    plain = build_model(Run())
    adamw = AdamW(plain.parameters(), lr=1e-2, fused=True)

    def step(batch: torch.Tensor, change_gradient: bool = False) -> None:
        plain(input_ids=batch, labels=batch).loss.backward()
        if change_gradient:
            gradient = plain.get_parameter(BIAS).grad
            assert gradient is not None
            assert torch.equal(value_of(engine.get_full(BIAS, "grad")), gradient)
            engine.set_full(BIAS, "grad", gradient * 3)
            gradient *= 3
        adamw.step()
        adamw.zero_grad()

    config = config_of(f"unix:{tmp_path}/state/paramserver.sock", "access", "nvme") | placement
    with Daemon(tmp_path / "state"), start(config) as engine:
        backward(engine, batches[0])
        step(batches[0])
        engine.step()

        weight = plain.get_parameter(WEIGHT)
        state = adamw.state[weight]
        for kind, expected in (("master", weight), ("param", weight), ("exp_avg", state["exp_avg"])):
            assert torch.equal(value_of(engine.get_full(WEIGHT, kind)), expected)
        local = value_of(engine.get_local(engine.module.get_parameter(WEIGHT), "exp_avg_sq"))
        assert torch.equal(local.view_as(weight), state["exp_avg_sq"])
        assert engine.get_full(WEIGHT, "grad") is None

        with torch.no_grad():
            weight[3] = 0.5
            state["exp_avg"].zero_()
            plain.get_parameter(BIAS).add_(1)
        engine.set_full(WEIGHT, "master", weight)
        engine.set_many({(WEIGHT, "exp_avg"): state["exp_avg"], (BIAS, "param"): plain.get_parameter(BIAS).detach()})
        backward(engine, batches[1])
        step(batches[1], change_gradient=True)
        engine.step()
        engine.set_local(BIAS, "exp_avg_sq", torch.full_like(plain.get_parameter(BIAS), 0.25))
        adamw.state[plain.get_parameter(BIAS)]["exp_avg_sq"].fill_(0.25)

    # The commit contains the values that were set, so a resumed run makes the same next step as plain PyTorch.
    with Daemon(tmp_path / "state"), start(config) as engine:
        assert engine.global_steps == 2
        backward(engine, batches[2])
        step(batches[2])
        engine.step()
        weights = engine.full_state_dict()
        moments = {
            (name, kind): value_of(engine.get_full(name, kind))
            for name, _ in plain.named_parameters()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        shards = engine.sharded_state_dict("exp_avg")
    assert [name for name, tensor in plain.state_dict().items() if not torch.equal(weights[name], tensor)] == []
    for (name, kind), moment in moments.items():
        assert torch.equal(moment, adamw.state[plain.get_parameter(name)][kind]), (name, kind)
    assert shards.keys() == {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    assert torch.equal(shards["lm_head.weight"].values, moments[EMBEDDING, "exp_avg"].flatten())


def test_gathered_parameters_are_whole_and_change_what_was_changed_only(model_store: str, job: str) -> None:
    config = config_of(model_store, job, "nvme") | {"bf16": {"enabled": True}}
    (batch,) = micro_batches(1)
    with start(config) as engine:
        backward(engine, batch)
        engine.step()
        before = engine.full_state_dict()
        block = engine.module.get_submodule("transformer.h.1")
        weight = engine.module.get_parameter(WEIGHT)
        assert is_released(weight)
        with zero.GatheredParameters(block.parameters()):
            assert torch.equal(weight, before[WEIGHT].bfloat16())
            # The forward gathers the other parameters and releases them afterwards, but not the ones that `gathered`
            # holds.
            with torch.no_grad():
                engine(input_ids=batch)
            assert torch.equal(weight, before[WEIGHT].bfloat16())
            with pytest.raises(RuntimeError, match="within gathered"):
                engine.step()
        assert is_released(weight)
        with zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight[5].fill_(2.0)
        with zero.GatheredParameters(weight, enabled=False):
            assert is_released(weight)
        with pytest.raises(ArithmeticError), engine.gathered(block, modifier_rank=0):
            nn.init.zeros_(weight)
            raise ArithmeticError
        after = engine.full_state_dict()
        assert is_released(weight)
    expected = before[WEIGHT].clone()
    expected[5] = 2.0
    assert torch.equal(after[WEIGHT], expected)
    assert not torch.equal(expected, expected.bfloat16().float())
    assert [name for name in before if name != WEIGHT and not torch.equal(before[name], after[name])] == []


def test_a_run_that_ends_after_a_change_within_a_step_begins_the_step_anew(model_store: str, job: str) -> None:
    first, second = micro_batches(2)
    config = config_of(model_store, job, "nvme") | {"gradient_accumulation_steps": 2}
    changed = torch.full((256,), 0.5)
    plain = build_model(Run())
    with torch.no_grad():
        plain.get_parameter(BIAS).copy_(changed)
    adamw = AdamW(plain.parameters(), lr=1e-2, fused=True)
    for batch in (first, second):
        (plain(input_ids=batch, labels=batch).loss / 2).backward()
    adamw.step()

    with start(config) as engine:
        backward(engine, first)
        engine.step()
        backward(engine, second)
        engine.client_state["of"] = "the step that is not made"
        with engine.gathered([engine.module.get_parameter(BIAS)], modifier_rank=0), torch.no_grad():
            engine.module.get_parameter(BIAS).copy_(changed)
    with start(config) as engine:
        assert (engine.global_steps, engine.micro_steps, engine.client_state) == (0, 0, {})
        for batch in (first, second):
            backward(engine, batch)
            engine.step()
        weights = engine.full_state_dict()
    assert [name for name, tensor in plain.state_dict().items() if not torch.equal(weights[name], tensor)] == []


@pytest.mark.parametrize("placement", [{}, STAGE_1], ids=["nvme", "stage-1"])
def test_a_gathered_model_has_a_state_dict_and_can_load_one(
    model_store: str, job: str, placement: dict[str, Any]
) -> None:
    (batch,) = micro_batches(1)
    other = build_model(Run())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.25)
    with start(config_of(model_store, job, "nvme") | placement) as engine:
        backward(engine, batch)
        engine.step()
        weights = engine.full_state_dict()
        with zero.GatheredParameters(engine.module.parameters()):
            found = engine.module.state_dict()
        # The values stay when the parameters are released.
        assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
        with zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            engine.module.load_state_dict(other.state_dict())
        changed = engine.full_state_dict()
        assert [name for name, value in other.state_dict().items() if not torch.equal(changed[name], value)] == []
        some = [engine.module.get_parameter(BIAS)]
        for context in (zero.GatheredParameters(some, modifier_rank=0), zero.GatheredParameters(some)):
            with context, pytest.raises(RuntimeError, match=r"call engine\.load_state_dict\(\) instead"):
                engine.module.load_state_dict(other.state_dict())


def test_misuse_is_refused_with_what_to_do(model_store: str, job: str) -> None:
    (batch,) = micro_batches(1)
    with start(config_of(model_store, job, "nvme")) as engine:
        with pytest.raises(trainer_client.ConfigError, match=r"no state 'momentum_buffer'.*exp_avg"):
            engine.get_full(WEIGHT, "momentum_buffer")
        with pytest.raises(trainer_client.ConfigError, match="no parameter 'nobody'"):
            engine.get_full("nobody", "master")
        with pytest.raises(trainer_client.ConfigError, match=r"\[3\]: it is \[64, 256\]"):
            engine.set_full(WEIGHT, "master", torch.zeros(3))
        with pytest.raises(RuntimeError, match="no gradient"):
            engine.set_full(BIAS, "grad", torch.zeros(256))
        loss = engine(input_ids=batch, labels=batch).loss
        with pytest.raises(RuntimeError, match="no forward waits for its backward"):
            engine.set_full(BIAS, "master", torch.zeros(256))
        with (
            pytest.raises(RuntimeError, match="no forward waits for its backward"),
            engine.gathered(engine.module, modifier_rank=0),
        ):
            pass
        engine.backward(loss)
        with pytest.raises(RuntimeError, match="between two steps"):
            engine.load_state_dict({})
        # None of the refused calls prevents the next step.
        engine.step()
    with pytest.raises(trainer_client.ConfigError, match="has no engine"):
        trainer_client.utils.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("placement", [{}, STAGE_1], ids=["nvme", "stage-1"])
def test_a_parameter_that_no_backward_pass_reaches_can_be_given_a_gradient(
    model_store: str, job: str, placement: dict[str, Any]
) -> None:
    check_gradients_that_are_given(config_of(model_store, job, "nvme") | placement)


def test_two_ranks_see_and_change_one_state(model_store: str) -> None:
    run_ranks("tests.integration.support.access_ranks", 2, model_store)
