"""DeepSpeed's names of the sections of number formats are the sections that a config is read into."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from trainer_client.config.training_config import TrainingConfig
from trainer_client.runtime.precision_config import DeepSpeedFP16Config, get_bfloat16_config, get_float16_config


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "abc", [], None])
def test_a_loss_scale_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be a number|greater than or equal to 0"):
        DeepSpeedFP16Config(loss_scale=value)


@pytest.mark.parametrize(("key", "value"), [("loss_scale_window", 0), ("min_loss_scale", -1), ("min_loss_scale", True)])
def test_what_a_dynamic_scale_cannot_use_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{key}|must be a number"):
        DeepSpeedFP16Config(enabled=True, **{key: value})


def test_a_static_scale_takes_any_window_as_with_deepspeed() -> None:
    section = {"enabled": True, "loss_scale": 128, "loss_scale_window": 0, "min_loss_scale": -1}

    assert TrainingConfig(fp16=section).fp16.loss_scale == 128  # type: ignore[arg-type]


def test_the_sections_of_a_config_are_read_by_both_names_of_bf16() -> None:
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert get_bfloat16_config({"bf16": {"enabled": True}}).enabled
    assert not get_bfloat16_config({}).enabled
    assert get_float16_config({"fp16": {"loss_scale": "3"}}).loss_scale == 3.0
