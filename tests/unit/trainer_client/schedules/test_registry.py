"""Each schedule can be had from the config, with the names and defaults of its class, and errors say what to write."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from trainer_client import schedules
from trainer_client.base.section import Agreement
from trainer_client.config.loading import load_config
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from trainer_client.schedules.registry import SCHEDULES, make_schedule

PAGE = Path(__file__).parents[4] / "docs" / "schedules.md"
NAMES = [name for name in SCHEDULES if name in schedules.__all__]


def config(scheduler: dict[str, Any]) -> TrainingConfig:
    return load_config({"train_batch_size": 1, "scheduler": scheduler}, {})


def make_optimizer(groups: int = 1) -> Optimizer:
    return AdamW([{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(groups)], lr=0.5)


def made(scheduler: dict[str, Any], groups: int = 1) -> Any:
    section = config(scheduler).scheduler
    assert section is not None
    return make_schedule(section, make_optimizer(groups))


def test_every_public_schedule_has_a_record() -> None:
    assert sorted(NAMES) == sorted(schedules.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_the_section_has_the_names_and_defaults_of_the_class(name: str) -> None:
    record = SCHEDULES[name]
    signature = inspect.signature(record.schedule_class.__init__)
    arguments = {
        key: argument.default for key, argument in signature.parameters.items() if key not in ("self", "optimizer")
    }
    params: Any = record.section.model_fields["params"].annotation

    assert set(params.model_fields) == set(arguments)
    required = {key for key, field in params.model_fields.items() if field.is_required()}
    assert required == {key for key, default in arguments.items() if default is inspect.Parameter.empty}
    for key, field in params.model_fields.items():
        assert key in required or field.default == arguments[key], key
        assert field.description, key


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "WarmupLR"}, WarmupLR),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}, WarmupDecayLR),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "last_batch_iteration": -1}}, WarmupCosineLR),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": [0.1]}}, OneCycle),
        ({"type": "LRRangeTest", "params": {}}, LRRangeTest),
        ({"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}, StepLR),
        ({"type": "CosineAnnealingLR", "params": {"T_max": 7}}, CosineAnnealingLR),
    ],
)
def test_the_config_names_classes_of_deepspeed_and_of_torch(section: dict[str, Any], expected: type) -> None:
    assert type(made(section)) is expected


def test_the_config_that_the_page_shows_is_valid() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)

    loaded = load_config(json.loads(example), {}).scheduler
    assert loaded is not None
    assert type(make_schedule(loaded, make_optimizer())) is WarmupDecayLR


def test_auto_is_what_accelerate_and_transformers_write() -> None:
    """They write 0 and the optimizer's rate."""
    auto = {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}
    for section in (
        {"type": "WarmupLR", "params": auto},
        {"type": "WarmupDecayLR", "params": auto | {"total_num_steps": 2000}},
    ):
        schedule = made(section)
        assert (schedule.min_lrs, schedule.max_lrs) == ([0.0], [0.5])


def test_all_ranks_must_have_the_same_schedule() -> None:
    ours = config({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": [0.2, 0.3]}})
    of_torch = config({"type": "StepLR", "params": {"step_size": 2}})

    values = dict(ours.values(Agreement.RUN))
    assert values["scheduler.type"] == '"OneCycle"'
    assert values["scheduler.params.cycle_max_lr"] == "[0.2, 0.3]"
    assert dict(of_torch.values(Agreement.RUN))["scheduler.params"] == '{"step_size": 2}'


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "WarmupLr"}, ["scheduler.type = 'WarmupLr' is refused", "did you mean WarmupLR?"]),
        ({"type": "Nothing of this kind"}, ["scheduler.type", "write one of WarmupLR, WarmupDecayLR"]),
        ({"params": {}}, ["scheduler.type is missing", "WarmupLR", "CosineAnnealingLR"]),
        ({"type": "LambdaLR", "params": {}}, ["made of functions", "initialize(lr_scheduler=...)"]),
        ({"type": "SequentialLR", "params": {}}, ["made of other schedulers"]),
        ({"type": "ReduceLROnPlateau"}, ["steps on a metric", "call step(metric)"]),
        ({"type": "WarmupDecayLR"}, ["scheduler.params is missing"]),
        ({"type": "WarmupDecayLR", "params": {}}, ["scheduler.params.total_num_steps is missing"]),
        (
            {"type": "WarmupLR", "params": {"warmup_num_step": 1}},
            ["scheduler.params.warmup_num_step", "warmup_num_steps?"],
        ),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, ["scheduler.params.warmup_num_steps = -1"]),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 0}}, ["scheduler.params.total_num_steps = 0"]),
        (
            {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
            ["scheduler.params.warmup_type", "'log' or 'linear'"],
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, -1]}},
            ["scheduler.params.warmup_max_lr", "not negative"],
        ),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "high"}}, ["scheduler.params.warmup_max_lr = 'high'"]),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}, ["warmup_num_steps = 1.5", "a positive number"]),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 1e999}}, ["warmup_num_steps = inf", "a positive number"]),
    ],
)
def test_a_section_that_cannot_be_honoured_is_refused_by_its_keys(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(section)

    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "StepLR", "params": {"step": 2}}, "scheduler.params is refused by StepLR"),
        ({"type": "StepLR"}, "step_size"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2, 0.3]}}, "warmup_max_lr has 3 values"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
            r'warmup_num_steps, scheduler.params.total_num_steps is "auto": write the number',
        ),
        ({"type": "StepLR", "params": {"step_size": "auto"}}, 'scheduler.params.step_size is "auto"'),
    ],
)
def test_parameters_that_the_class_refuses_are_a_config_error(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(section, groups=2)
