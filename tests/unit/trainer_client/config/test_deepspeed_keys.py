"""A key of DeepSpeed's that has no meaning here is a row of a file, and a key of its section as any other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainer_client.config.deepspeed_keys import _REASONS, row_paths
from trainer_client.config.keys import all_paths
from trainer_client.config.reference import entries
from trainer_client.config.training_config import TrainingConfig


def test_each_row_is_a_key_of_the_config() -> None:
    marked = {entry.path for entry in entries() if entry.without_effect or entry.refused}
    rows = list(row_paths())

    assert set(rows) - marked == set()
    assert set(rows) <= set(all_paths(TrainingConfig))
    assert {path.split(".")[0] for path in marked - set(rows)} == {"optimizer"}


def test_each_reason_is_one_of_the_file_or_a_text() -> None:
    marks = [entry.without_effect or entry.refused for entry in entries()]
    reasons = [mark.why for mark in marks if mark is not None]

    assert [why for why in reasons if " " not in why] == []
    assert [name for name, why in _REASONS.items() if reasons.count(why) < 2] == []


@pytest.mark.parametrize(
    ("raw", "path", "value"),
    [
        ({}, "aio.block_size", 1048576),
        ({}, "comms_logger.prof_ops", ()),
        ({}, "checkpoint.writer", None),
        ({"checkpoint": {"writer": {"type": "python"}}}, "checkpoint.writer.io_multiplier", 1),
        ({"zero_optimization": {"sub_group_size": 1e12}}, "zero_optimization.sub_group_size", 10**12),
        ({"timers": {"throughput": {"enabled": False}}}, "timers.throughput.synchronized", True),
        ({"expert_parallel": {"top_k": "any"}}, "expert_parallel.top_k", "any"),
        ({"seq_parallel_communication_data_type": None}, "seq_parallel_communication_data_type", None),
    ],
)
def test_a_row_gives_a_key_its_type_and_default(raw: dict[str, Any], path: str, value: Any) -> None:
    assert TrainingConfig.model_validate(raw).value_at(path) == value


@pytest.mark.parametrize(
    "raw",
    [
        {"aio": {"block_size": "large"}},
        {"aio": {"block_sise": 1}},
        {"aio": {"block_size": None}},
        {"compile": {"kwargs": None}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sparse_attention": {"block": 16}},
    ],
)
def test_a_value_that_a_row_does_not_allow_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig.model_validate(raw)


def test_a_secret_is_not_printed() -> None:
    config = TrainingConfig.model_validate({"comet": {"api_key": "secret", "workspace": "shown"}})

    assert "shown" in repr(config)
    assert "secret" not in repr(config)
