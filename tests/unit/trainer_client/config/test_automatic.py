""" "auto" becomes what the library knows, else what Accelerate would write, and the log says so."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from trainer_client.config.batch_sizes import BatchSizes, resolve_batch_sizes
from trainer_client.config.keys import leaves
from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import describe_automatic
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("auto", "auto", "auto"), (2, 1, 1)),
        (("auto", "auto", 4), (8, 1, 4)),
        (("auto", 3, "auto"), (6, 3, 1)),
        ((16, "auto", "auto"), (16, 8, 1)),
        ((16, "auto", 4), (16, 2, 4)),
        ((16, 2, "auto"), (16, 2, 4)),
        (("auto", None, 2), (4, 1, 2)),
    ],
)
def test_batch_sizes_follow_from_each_other(sizes: tuple[Any, ...], expected: tuple[int, int, int]) -> None:
    raw = {key: size for key, size in zip(SIZES, sizes, strict=True) if size is not None}

    batch = resolve_batch_sizes(load_config(raw, {}), world_size=2)

    assert (batch.train, batch.micro, batch.accumulation) == expected


@pytest.mark.parametrize(
    ("dtypes", "formats", "expected"),
    [
        ({torch.bfloat16}, {"bf16": "auto", "fp16": "auto"}, (True, False)),
        ({torch.float16}, {"bf16": "auto", "fp16": "auto"}, (False, True)),
        ({torch.float32}, {"bf16": "auto", "fp16": "auto"}, (False, False)),
        ({torch.bfloat16, torch.float32}, {"bf16": "auto"}, (False, False)),
        ({torch.bfloat16}, {"bf16": "auto", "fp16": True}, (False, True)),
        ((), {"bf16": "auto"}, (False, False)),
    ],
)
def test_the_number_format_is_that_of_the_model(
    dtypes: set[torch.dtype], formats: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    raw = {name: {"enabled": enabled} for name, enabled in formats.items()}

    config = load_config(raw, {}, dtypes)

    assert (config.bf16.enabled, config.fp16.enabled) == expected


def test_the_rest_is_as_in_accelerate_or_a_default() -> None:
    raw = {
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "optimizer": {"type": "adamw", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "offload_param": {"device": "auto", "buffer_size": "auto"},
        },
        "paramserver": {"gather": "auto"},
    }
    config = load_config(raw, {})

    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage == 2
    assert config.optimizer is not None
    assert config.optimizer.params.arguments() == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert config.zero_optimization.offload_param is not None
    assert config.zero_optimization.offload_param.device == "none"


def test_clipping_by_value_takes_the_place_of_clipping_by_norm() -> None:
    raw = {"gradient_clipping": "auto", "paramserver": {"gradient_clipping_value": 0.5}}

    assert load_config(raw, {}).gradient_clipping == 0.0


def test_the_log_says_what_each_became_but_for_keys_without_effect() -> None:
    raw = {
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        "zero_optimization": {"reduce_bucket_size": "auto"},
        "tensorboard": {"output_path": "auto"},
    }
    line = describe_automatic(load_config(raw, {}), BatchSizes(train=8, micro=2, accumulation=4))

    assert line is not None
    assert line.partition(": ")[2].split(", ") == [
        "train_batch_size = 8",
        "bf16.enabled = false",
        "optimizer.params.lr = 0.001",
        "train_micro_batch_size_per_gpu = 2",
    ]
    assert describe_automatic(load_config({}, {}), BatchSizes(train=1, micro=1, accumulation=1)) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"paramserver": {"host_budget": "auto"}}, 'paramserver.host_budget is "auto": write the value itself'),
        ({"optimizer": {"type": "auto"}}, 'optimizer.type is "auto": write the value itself'),
        ({"train_batchsize": "auto"}, "train_batchsize is unknown .* did you mean train_batch_size"),
        ({"optimizer": {"type": "Adam", "params": {"momentum": "auto"}}}, "optimizer.params.momentum is unknown"),
    ],
)
def test_a_value_that_the_library_cannot_know_must_be_written(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(raw, {})


def has_auto(annotation: Any) -> bool:
    """Return whether "auto" is one of the values that a type allows by name."""
    return annotation == "auto" or any(map(has_auto, get_args(annotation)))


def test_auto_stays_where_it_is_one_of_the_values_of_the_key() -> None:
    fields = {path: way[-1] for path, way in leaves(TrainingConfig)}
    words = [path for path, field in fields.items() if field.default == "auto" or has_auto(field.annotation)]

    assert {"paramserver.device", "paramserver.pin_arena", "paramserver.tiling.largest_tile"} <= set(words)
    for path in words:
        raw: Any = "auto"
        for key in reversed(path.split(".")):
            raw = {key: raw}
        assert load_config(raw, {}).value_at(path) == "auto", path
    assert load_config({"paramserver": {"tiling": "auto"}}, {}).paramserver.tiling.largest_tile == "auto"
