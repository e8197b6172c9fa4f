"""Keys of DeepSpeed's config do what its documentation says: sums of gradients, unused parameters, the log's level."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.ranks import run_ranks
from trainer_client import Engine
from trainer_client.errors import ConfigError, UnusedParameterError


class Net(nn.Module):
    """A net with a layer that its forward does not use."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs).square().mean()


def start(address: str, job: str, model: nn.Module, zero: dict[str, Any], **keys: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        "paramserver": {"address": address, "job": job},
        **keys,
    }
    engine: Engine = trainer_client.initialize(model=model, config=config)[0]
    return engine


def step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()


def test_a_sum_of_gradients_is_not_divided_by_the_ranks(model_store: str, job: str) -> None:
    run_ranks("tests.integration.support.summing_ranks", 2, model_store, job)


def test_a_sum_of_gradients_is_refused_at_stage_3(model_store: str, job: str) -> None:
    with pytest.raises(ConfigError, match="not supported with ZeRO stage 3, as in DeepSpeed: multiply the loss"):
        start(model_store, job, Net(), {"stage": 3}, gradient_allreduce_op="SUM")


def test_a_parameter_without_a_gradient_is_an_error_if_the_config_says_so(model_store: str, job: str) -> None:
    named = r"no gradient came for unused\.weight, unused\.bias in this step.*ignore_unused_parameters is false"
    with (
        pytest.raises(UnusedParameterError, match=named),
        start(model_store, job, Net(), {"stage": 2, "ignore_unused_parameters": False}) as engine,
    ):
        step(engine)
    assert issubclass(UnusedParameterError, AssertionError)
    # Nothing of the step is there.
    with start(model_store, job, Net(), {"stage": 2}) as engine:
        assert engine.global_steps == 0
        step(engine)


def test_frozen_parameters_need_no_gradient_and_other_stages_do_not_ask(model_store: str, job: str) -> None:
    model = Net()
    model.unused.requires_grad_(False)
    for number, (zero, net) in enumerate((({"stage": 2}, model), ({"stage": 1}, Net()), ({"stage": 3}, Net()))):
        zero["ignore_unused_parameters"] = False
        with start(model_store, f"{job} {number}", net, zero) as engine:
            step(engine)
            assert engine.global_steps == 1


class Shift(Net):
    """A net with a buffer, as rotary embeddings have one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((4,), 1.0 + 2**-20))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs + self.shift)


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_have_the_dtype_of_the_config(model_store: str, job: str, stage: int) -> None:
    keys: dict[str, Any] = {"bf16": {"enabled": True}}
    with start(model_store, job, Shift(), {"stage": stage}, **keys) as engine:
        assert engine.module.shift.dtype == torch.float32
    keys["data_types"] = {"buffer_dtype": "bf16"}
    # The job goes on with the dtype that its config has now, and so do engines without an optimizer.
    with start(model_store, job, Shift(), {"stage": stage}, **keys) as engine:
        assert torch.equal(engine.module.get_buffer("shift"), torch.ones(4, dtype=torch.bfloat16))
        step(engine)
    section = {"address": model_store, "job": job} if stage == 3 else {}
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "paramserver": section, **keys}
    with trainer_client.initialize(model=Shift(), config=config)[0] as reader:
        assert torch.equal(reader.module.get_buffer("shift"), torch.ones(4, dtype=torch.bfloat16))


@pytest.fixture
def levels() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("trainer_client", "DeepSpeed")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_the_log_has_the_level_of_the_config(
    model_store: str, job: str, levels: None, caplog: pytest.LogCaptureFixture
) -> None:
    with start(model_store, job, Net(), {"stage": 1}) as engine:
        assert engine.log_level() is None
    assert "gradient_clipping is not in the config" in caplog.text
    caplog.clear()
    with start(model_store, f"{job} silent", Net(), {"stage": 1}, log_level="ERROR") as engine:
        assert engine.log_level() == "ERROR"
        assert trainer_client.logger.getEffectiveLevel() == logging.ERROR
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"log_level = 'loud'.*write one of debug, info, warning, error, critical"):
        start(model_store, job, Net(), {"stage": 1}, log_level="loud")


@pytest.mark.parametrize("stage", [1, 3])
def test_master_weights_begin_exact_or_rounded_as_those_of_deepspeed(model_store: str, job: str, stage: int) -> None:
    exact = Net().state_dict()
    rounded = Net().bfloat16().float().state_dict()
    for initial, expected in (("exact", exact), ("rounded", rounded)):
        section = {"address": model_store, "job": f"{job} {initial}", "initial_weights": initial}
        with start("", "", Net(), {"stage": stage}, bf16={"enabled": True}, paramserver=section) as engine:
            found = engine.full_state_dict()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert not torch.equal(exact["used.weight"], rounded["used.weight"])


def test_a_config_that_asks_for_states_in_bf16_gets_them_in_fp32(model_store: str, job: str) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    with start(model_store, job, Net(), {"stage": 2}, bf16=bf16) as engine:
        step(engine)
        kept = [engine.get_full("used.weight", kind) for kind in ("master", "exp_avg", "exp_avg_sq")]
    assert [value.dtype for value in kept if value is not None] == [torch.float32] * 3
