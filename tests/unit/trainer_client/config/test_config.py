"""The config honours DeepSpeed's keys with their meaning, and refuses everything else by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_client.config.training_config import load_config, resolve_batch_sizes
from trainer_client.errors import ConfigError

NVME = {"device": "nvme", "nvme_path": "/data/nvme"}


def config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME},
        **changes,
    }


def zero(**changes: Any) -> dict[str, Any]:
    return config(zero_optimization={**config()["zero_optimization"], **changes})


def test_a_json_file_gives_the_same_config_as_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))

    assert load_config(path, {}) == load_config(config(), {})


def test_units_are_blocks_unless_said_otherwise() -> None:
    assert load_config(config(paramserver={"units": "blocks"}), {}) == load_config(config(), {})
    assert load_config(config(paramserver={"units": {"classes": ["Layer"]}}), {}).paramserver.units.classes == (
        "Layer",
    )


def test_sizes_are_bytes_or_text_with_a_unit() -> None:
    section = load_config(config(paramserver={"host_budget": "512MiB", "nvme_budget": 1000}), {}).paramserver

    assert (section.host_budget, section.nvme_budget) == (512 << 20, 1000)


def test_the_state_lives_under_the_nvme_path_unless_state_dir_says_otherwise() -> None:
    assert load_config(config(), {}).state_dir() == Path("/data/nvme")
    assert load_config(config(paramserver={"state_dir": "/other"}), {}).state_dir() == Path("/other")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (config(grad_clipping=1.0), ["grad_clipping is not honoured", "gradient_clipping"]),
        (zero(overlap_comm=True), ["zero_optimization.overlap_comm is not honoured", "remove it"]),
        (config(paramserver={"host_buget": 1}), ["paramserver.host_buget", "did you mean host_budget"]),
        (zero(offload_param={"device": "nvme", "pin_memory": True}), ["zero_optimization.offload_param.pin_memory"]),
        (zero(stage=4), ["zero_optimization.stage is 4", "write 0, 1, 2 or 3"]),
        (zero(offload_param={"device": "disk"}), ["zero_optimization.offload_param.device = 'disk'", "'nvme'"]),
        (zero(offload_optimizer={"device": "cpu", "ratio": 1.5}), ["zero_optimization.offload_optimizer.ratio = 1.5"]),
        (config(paramserver={"units": "layers"}), ["paramserver.units = 'layers'", '"blocks", {"classes": [names]}']),
        (config(paramserver={"units": {"class": ["A"]}}), ["paramserver.units.class", "did you mean classes"]),
        (config(paramserver={"units": {"classes": ["A"], "max_parameters": 1}}), ["paramserver.units.max_parameters"]),
        (config(paramserver={"gather": "all"}), ["paramserver.gather = 'all'", "'collective'"]),
        (zero(stage3_max_live_parameters=0), ["zero_optimization.stage3_max_live_parameters = 0"]),
        (config(data_types={"grad_accum_dtype": "fp8"}), ["data_types.grad_accum_dtype = 'fp8'", "'bf16'"]),
        (
            config(gradient_clipping=1.0, paramserver={"gradient_clipping_value": 0.5}),
            ["gradient_clipping = 1.0", "paramserver.gradient_clipping_value = 0.5", "choose one"],
        ),
        (config(train_batch_size="auto"), ['train_batch_size is "auto"']),
        (config(optimizer={"type": "Lamb"}), ["optimizer.type = 'Lamb'", "not elementwise", "AdamW"]),
        (config(optimizer={"type": "RMSprop"}), ["optimizer.type = 'RMSprop'", "none of", "Adagrad"]),
        (config(optimizer={"params": {"lr": 1}}), ["optimizer.type is missing", "AdamW, Adam, SGD"]),
        (config(optimizer={"type": "Lion", "params": {"lr": 1}}), ["optimizer.params.betas is missing"]),
        (config(optimizer={"type": "SGD", "params": {"momntum": 1}}), ["optimizer.params.momntum", "mean momentum"]),
        (config(optimizer={"type": "SGD", "parms": {}}), ["optimizer.parms", "did you mean params"]),
        (config(optimizer={"type": "Adam", "params": {"torch_adam": False}}), ["optimizer.params.torch_adam = False"]),
        (config(optimizer={"type": "Adam", "params": {"amsgrad": True}}), ["optimizer.params.amsgrad is not honoured"]),
        (config(optimizer={"type": "AdamW", "params": {"lr": -1}}), ["optimizer.params.lr = -1"]),
        (config(bf16={"enabled": True}, fp16={"enabled": True}), ["bf16.enabled and fp16.enabled"]),
        (zero(offload_param={"device": "nvme", "nvme_path": "/x"}), ["'/x'", "'/data/nvme'", "same path"]),
        (config(paramserver={"durability": "snapshot:0"}), ["paramserver.durability = 'snapshot:0'"]),
        (config(paramserver={"resume": "yes"}), ["paramserver.resume = 'yes'", "'must'"]),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_full_name(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, {})

    assert [word for word in words if word not in str(caught.value)] == []


def test_all_refused_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config(amp={}, wandb={}), {})

    assert "amp" in str(caught.value)
    assert "wandb" in str(caught.value)


@pytest.mark.parametrize("from_environment", [True, False])
def test_with_an_address_the_daemons_own_keys_are_refused(from_environment: bool) -> None:
    section = {"host_budget": "1GiB"} | ({} if from_environment else {"address": "host:1"})
    environ = {"PARAMSERVER_ADDRESS": "host:1"} if from_environment else {}

    with pytest.raises(ConfigError) as caught:
        load_config(config(paramserver=section), environ)

    assert "zero_optimization.offload_param.nvme_path" in str(caught.value)
    assert "paramserver.host_budget" in str(caught.value)
    assert "host:1" in str(caught.value)


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "expected"),
    [
        (None, 4, None, (8, 4, 1)),
        (None, 4, 3, (24, 4, 3)),
        (16, None, None, (16, 8, 1)),
        (16, None, 2, (16, 4, 2)),
        (16, 4, None, (16, 4, 2)),
        (16, 4, 2, (16, 4, 2)),
    ],
)
def test_batch_sizes_complete_each_other(
    train: int | None, micro: int | None, accumulation: int | None, expected: tuple[int, int, int]
) -> None:
    loaded = load_config(
        config(train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation),
        {},
    )

    sizes = resolve_batch_sizes(loaded, world_size=2)

    assert (sizes.train, sizes.micro, sizes.accumulation) == expected


@pytest.mark.parametrize(
    ("train", "micro", "accumulation"), [(16, 4, 3), (15, 4, None), (None, None, 2), (1, None, None)]
)
def test_batch_sizes_that_do_not_agree_are_refused(
    train: int | None, micro: int | None, accumulation: int | None
) -> None:
    loaded = load_config(
        config(train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation),
        {},
    )

    with pytest.raises(ConfigError, match="train_batch_size"):
        resolve_batch_sizes(loaded, world_size=2)
