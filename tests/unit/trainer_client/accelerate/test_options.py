"""The arguments of `Accelerator` and a config in DeepSpeed's format join to one training config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import AutocastKwargs, DeepSpeedPlugin, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler

from trainer_client.accelerate.options import Options, without_launchers_choice
from trainer_client.accelerate.placeholders import check_places, fill
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError


def options(config: Any = None, environ: dict[str, str] | None = None, **keywords: Any) -> Options:
    return Options.of((), keywords, config, {} if environ is None else environ)


def resolved(made: Options, *, accumulation: int = 1, batch_size: int | None = None) -> dict[str, Any]:
    config = made.training_config(accumulation=accumulation, world_size=2, batch_size=batch_size, job="new")
    # The library's own reader accepts what the options make.
    load_config({**config, "optimizer": {"type": "AdamW"}}, {})
    return config


def test_without_a_config_the_stage_is_two_and_the_job_is_new() -> None:
    assert resolved(options(), batch_size=8) == {
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 8,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0,
        "paramserver": {"job": "new"},
    }


def test_the_stage_is_two_where_the_section_does_not_say() -> None:
    section = {"offload_optimizer": {"device": "cpu"}}

    assert resolved(options({"zero_optimization": section}))["zero_optimization"] == {"stage": 2, **section}
    assert resolved(options({"zero_optimization": {"stage": 0}}))["zero_optimization"] == {"stage": 0}


def test_a_file_and_a_dict_mean_the_same(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 8, "paramserver": {"job": "mine"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    from_file, from_dict = resolved(options(str(path))), resolved(options(config))

    assert from_file == from_dict
    assert from_dict["train_micro_batch_size_per_gpu"] == 4
    assert from_dict["paramserver"] == {"job": "mine"}
    assert config["train_batch_size"] == 8


def test_a_config_that_says_whether_to_go_on_names_its_job() -> None:
    assert "job" not in resolved(options({"paramserver": {"resume": "auto"}}))["paramserver"]


@pytest.mark.parametrize(
    ("config", "precision", "expected"),
    [
        ({}, None, ("no", False, False)),
        ({}, "bf16", ("bf16", True, True)),
        ({}, "fp16", ("fp16", True, True)),
        ({"bf16": {"enabled": True}}, None, ("bf16", False, False)),
        ({"bf16": {"enabled": "auto"}}, "bf16", ("bf16", False, False)),
        ({"bf16": {"enabled": "auto"}}, "no", ("no", False, False)),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, None, ("fp16", True, False)),
    ],
)
def test_the_config_and_mixed_precision_join(
    config: dict[str, Any], precision: str | None, expected: tuple[str, bool, bool]
) -> None:
    made = options(config, mixed_precision=precision)

    assert (made.arguments["mixed_precision"], made.autocasts, made.converts_outputs) == expected
    read = load_config({**resolved(made), "optimizer": {"type": "AdamW"}}, {})
    chosen = [read.bf16.enabled, read.fp16.enabled, read.torch_autocast.enabled]
    assert sum(chosen) == (expected[0] != "no")


def test_the_environment_of_the_launcher_counts_where_the_script_says_nothing() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "bf16"}

    assert options(environ=environ).arguments["mixed_precision"] == "bf16"
    assert options({"fp16": {"enabled": True}}, environ).arguments["mixed_precision"] == "fp16"
    assert options(environ=environ, mixed_precision="no").arguments["mixed_precision"] == "no"


def test_the_variable_of_the_launcher_does_not_replace_the_accumulation_of_the_config() -> None:
    config = {"gradient_accumulation_steps": 4}

    for environ in ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": steps} for steps in ("1", "auto")):
        made = options(config, environ, gradient_accumulation_steps=4)
        assert "gradient_accumulation_steps" not in made.arguments
        assert made.arguments["gradient_accumulation_plugin"].num_steps == 4


def test_autocast_that_its_handler_switches_off_stays_off() -> None:
    made = options(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])

    assert "torch_autocast" not in made.config


def test_the_plug_in_is_a_config_and_accelerate_does_not_see_it() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=4, offload_optimizer_device="cpu")

    made = options(deepspeed_plugin=plugin, mixed_precision="bf16")

    assert "deepspeed_plugin" not in made.arguments
    assert made.arguments["gradient_accumulation_plugin"].num_steps == 4
    config = resolved(made, accumulation=4, batch_size=2)
    assert config["zero_optimization"]["stage"] == 3
    assert config["bf16"] == {"enabled": True}


def test_the_plug_in_of_the_launcher_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}

    assert options(environ=environ).config["zero_optimization"]["stage"] == 1
    with without_launchers_choice(environ):
        assert environ == {}
    assert environ == {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "fsdp_plugin.*zero_optimization"),
        ({"environ": {"ACCELERATE_USE_FSDP": "true"}}, "ACCELERATE_USE_FSDP"),
        ({"mixed_precision": "fp8"}, "'fp8'"),
        ({"mixed_precision": "fp16", "config": {"bf16": {"enabled": True}}}, "the config chooses bf16"),
        ({"kwargs_handlers": [AutocastKwargs(cache_enabled=False)]}, "cache_enabled"),
        ({"config": {}, "deepspeed_plugin": DeepSpeedPlugin()}, "pass one"),
        ({"deepspeed_plugins": {"a": DeepSpeedPlugin(), "b": DeepSpeedPlugin()}}, "2 plug-ins"),
        ({"config": {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps": 2}, "4 in the config and 2"),
        (
            {
                "config": {"gradient_accumulation_steps": 4},
                "environ": {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"},
            },
            r"4 in the config and 2 in \$ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ),
        (
            {
                "config": {"gradient_accumulation_steps": 4},
                "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2),
            },
            "4 in the config and 2",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(**keywords)


@pytest.mark.parametrize(
    "config", [{"train_batch_size": 9}, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}]
)
def test_batch_sizes_that_contradict_each_other_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        resolved(options(config))


def test_placeholders_fill_in_what_is_automatic() -> None:
    optimizer = DummyOptim([], lr=0.25, weight_decay=0.5)
    scheduler = DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=3)
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    check_places(config, optimizer, scheduler)
    fill(config, optimizer, scheduler, 2)

    assert config["optimizer"]["params"] == {"lr": 0.25, "weight_decay": 0.1}
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.25,
        "warmup_num_steps": 3,
        "total_num_steps": 5,
    }


@pytest.mark.parametrize(
    ("config", "optimizer", "scheduler", "words"),
    [
        ({"optimizer": {}}, object(), None, "DummyOptim"),
        ({"scheduler": {}}, object(), object(), "DummyScheduler"),
        ({"scheduler": {}}, object(), None, "DummyScheduler"),
        ({}, DummyOptim([]), None, "section 'optimizer'"),
        ({}, object(), DummyScheduler(None), "section 'scheduler'"),
    ],
)
def test_an_object_and_a_section_for_the_same_are_refused(
    config: dict[str, Any], optimizer: Any, scheduler: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_places(config, optimizer, scheduler)
