"""The training config that follows from the Trainer of Lightning and from the strategy's own config."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.errors import ConfigError
from trainer_client.lightning.options import check_precision, read_config, training_config


def joined(config: dict[str, Any], precision: str = "32-true", **arguments: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"accumulation": 4, "world_size": 2, "batch_size": 8, "job": "lightning-1", **arguments}
    return training_config(read_config(config), precision=precision, **given)


def test_the_trainer_gives_what_the_config_does_not_say() -> None:
    assert joined({}) == {
        "zero_optimization": {"stage": 2},
        "paramserver": {"job": "lightning-1"},
        "train_micro_batch_size_per_gpu": 8,
        "managed_gradient_accumulation": False,
    }


def test_a_named_job_counts() -> None:
    assert joined({"paramserver": {"job": "mine"}})["paramserver"] == {"job": "mine"}


def test_the_whole_batch_gives_the_micro_batch() -> None:
    assert joined({"train_batch_size": 48})["train_micro_batch_size_per_gpu"] == 6


@pytest.mark.parametrize(
    ("precision", "section"),
    [
        ("bf16-true", {"bf16": {"enabled": True}}),
        (
            "bf16-mixed",
            {"torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": []}},
        ),
        ("16-mixed", {"torch_autocast": {"enabled": True, "dtype": "fp16", "lower_precision_safe_modules": []}}),
    ],
)
def test_the_precision_of_the_trainer_becomes_a_section(precision: str, section: dict[str, Any]) -> None:
    assert joined({}, precision).items() >= section.items()


def test_auto_follows_the_trainer() -> None:
    assert joined({"bf16": {"enabled": "auto"}}, "bf16-true")["bf16"] == {"enabled": True}
    assert joined({"bf16": {"enabled": "auto"}})["bf16"] == {"enabled": False}


def test_contradictions_are_errors() -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 2 in the config"):
        joined({"gradient_accumulation_steps": 2})
    with pytest.raises(ConfigError, match="train_batch_size = 20 is not"):
        joined({"train_batch_size": 20})
    with pytest.raises(ConfigError, match="the config enables bf16"):
        joined({"bf16": {"enabled": True}}, "16-mixed")
    with pytest.raises(ConfigError, match="'64-true'"):
        check_precision("64-true")
