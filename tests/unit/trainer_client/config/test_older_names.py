"""Older names and forms of DeepSpeed's keys mean what they mean in DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.config.loading import load_config
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.errors import ConfigError

CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
        ({"fp32_allreduce": True}, {"communication_data_type": "fp32"}),
        ({"fp32_allreduce": False}, {}),
        ({"zero_optimization": True}, {"zero_optimization": {"stage": 1}}),
        ({"zero_optimization": False}, {"zero_optimization": {"stage": 0}}),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": False}}, {"zero_optimization": {"stage": 2}}),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            {"zero_optimization": {"stage": 3, "offload_param": CPU}},
        ),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 7}},
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7}},
        ),
    ],
)
def test_an_older_form_is_read_as_the_one_of_today(older: dict[str, Any], today: dict[str, Any]) -> None:
    assert load_config(older, {}) == load_config(today, {})


def test_two_names_of_one_key_must_not_contradict_each_other() -> None:
    assert load_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}}, {}).bf16.enabled
    with pytest.raises(ConfigError, match=r"zero_optimization.cpu_offload is .* write zero_optimization.offload_opt"):
        load_config({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}}, {})


@pytest.mark.parametrize("older", OLDER_NAMES, ids=lambda older: older.path)
def test_the_key_of_today_exists(older: Any) -> None:
    model = load_config({}, {})
    section = model.value_at(older.section) if older.section else model

    assert older.instead in type(section).model_fields
    assert older.name not in type(section).model_fields


def test_a_mistyped_older_name_is_an_error_with_that_name() -> None:
    with pytest.raises(ConfigError, match="did you mean cpu_offload"):
        load_config({"zero_optimization": {"cpu_ofload": True}}, {})
