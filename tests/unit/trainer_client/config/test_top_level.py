"""Keys at the top of a config: dotted ones are those of a section, and unknown ones are named in the log or refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import keys_without_effect
from trainer_client.errors import ConfigError


def load(raw: dict[str, Any]) -> Any:
    return load_config({"train_micro_batch_size_per_gpu": 1, **raw}, {})


def test_a_dotted_key_is_a_key_of_its_section() -> None:
    """TRL writes the first three, for a model whose hidden size is 8, beside the section."""
    section = {"stage": 3}
    config = load(
        {
            "zero_optimization": section,
            "zero_optimization.reduce_bucket_size": 64,
            "zero_optimization.stage3_param_persistence_threshold": 80,
            "zero_optimization.stage3_prefetch_bucket_size": 57.6,
            "zero_optimization.offload_param.device": "cpu",
            "optimizer.type": "SGD",
            "optimizer.params.lr": 0.5,
            "bfloat16.enabled": True,
        }
    )

    zero = config.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (3, 64, 57.6)
    assert zero.offload_param.device == "cpu"
    assert (config.optimizer.type, config.optimizer.params.lr, config.bf16.enabled) == ("SGD", 0.5, True)
    assert config.ignored == {}
    assert section == {"stage": 3}


def test_a_dotted_key_without_its_section_makes_the_section() -> None:
    assert load({"zero_optimization.stage": 2}).zero_optimization.stage == 2


def test_the_section_counts_before_a_dotted_key_and_the_log_says_so() -> None:
    config = load(
        {"zero_optimization": {"stage": 3}, "zero_optimization.stage": 2, "zero_optimization.reduce_scatter": True}
    )

    assert config.zero_optimization.stage == 3
    assert config.ignored == {"zero_optimization.stage": "the section itself says 3"}


def test_an_unknown_key_at_the_top_has_no_effect_and_the_log_says_so() -> None:
    config = load({"logging": {"level": "info"}, "inference_batch_size": 4, "seed": 3, "tracker.project": "x"})

    unknown = keys_without_effect(config, {})
    assert {key: unknown[key] for key in config.ignored} == dict.fromkeys(
        ("logging", "inference_batch_size", "seed", "tracker.project"), "unknown to DeepSpeed and to this library"
    )


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is unknown .*; did you mean zero_optimization?"),
        ({"stage": 3}, "stage is unknown .*; did you mean zero_optimization.stage?"),
        ({"max_grad_norm": 1.0}, "max_grad_norm is unknown .*; did you mean gradient_clipping?"),
        ({"bfloat_16": {}}, "bfloat_16 is unknown .*; did you mean bfloat16?"),
        (
            {"zero_optimization.reduce_bucket_sise": 1},
            "zero_optimization.reduce_bucket_sise is unknown .*; did you mean reduce_bucket_size?",
        ),
        ({"zero_optimization.stage": 7}, "zero_optimization.stage = 7 is refused"),
        (
            {"zero_optimization": True, "zero_optimization.stage": 2},
            "zero_optimization.stage = 2 is refused: zero_optimization = True is no section; write",
        ),
    ],
)
def test_a_key_that_is_nearly_a_known_one_is_refused(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(raw)
