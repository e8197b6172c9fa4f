"""The config honours DeepSpeed's keys with their meaning, and refuses the others by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from trainer_client import Lion
from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import keys_without_effect
from trainer_client.config.reference import entries
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
    on_cpu = {"offload_param": {"device": "cpu", "nvme_path": "/a"}, "offload_optimizer": {"device": "none"}}
    assert load_config(zero(**on_cpu), {}).state_dir() == Path("paramserver-state")


def test_two_paths_are_accepted_where_neither_counts() -> None:
    raw = zero(offload_param={"device": "nvme", "nvme_path": "/x"})

    assert load_config(raw | {"paramserver": {"state_dir": "/other"}}, {}).state_dir() == Path("/other")
    assert load_config(raw, {"PARAMSERVER_ADDRESS": "host:1"}).store_address({}) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (config(grad_clipping=1.0), ["grad_clipping is unknown", "did you mean gradient_clipping?"]),
        (config(overlap_comm=True), ["overlap_comm is unknown", "did you mean zero_optimization.overlap_comm?"]),
        (config(offload_optimizer={}), ["did you mean zero_optimization.offload_optimizer?"]),
        (zero(frobnicate=True), ["zero_optimization.frobnicate is unknown", "remove it", "docs/config.md"]),
        (zero(stage3_prefetch_bucket=1), ["did you mean stage3_prefetch_bucket_size?"]),
        (config(paramserver={"host_buget": 1}), ["paramserver.host_buget", "did you mean host_budget"]),
        (zero(offload_param={"device": "nvme", "pin_memory": "?"}), ["zero_optimization.offload_param.pin_memory"]),
        (zero(stage=4), ["zero_optimization.stage = 4", "write 0, 1, 2 or 3"]),
        (zero(offload_param={"device": "disk"}), ["zero_optimization.offload_param.device = 'disk'", "'nvme'"]),
        (
            config(paramserver={"state_dir": "~/store"}),
            ["paramserver.state_dir = '~/store'", "only a shell replaces ~"],
        ),
        (
            zero(offload_param={"device": "nvme", "nvme_path": "~/store"}),
            ["zero_optimization.offload_param.nvme_path = '~/store'", "only a shell replaces ~"],
        ),
        (zero(offload_optimizer={"device": "cpu", "ratio": 1.5}), ["zero_optimization.offload_optimizer.ratio = 1.5"]),
        (config(paramserver={"units": "layers"}), ["paramserver.units = 'layers'", '"blocks", {"classes": [names]}']),
        (config(paramserver={"units": {"class": ["A"]}}), ["paramserver.units.class", "did you mean classes"]),
        (config(paramserver={"units": {"classes": ["A"], "max_parameters": 1}}), ["paramserver.units.max_parameters"]),
        (config(paramserver={"gather": "all"}), ["paramserver.gather = 'all'", "'collective'"]),
        (zero(stage3_max_live_parameters=-1), ["zero_optimization.stage3_max_live_parameters = -1"]),
        (config(data_types={"grad_accum_dtype": "fp8"}), ["data_types.grad_accum_dtype = 'fp8'", "'bf16'"]),
        (
            config(gradient_clipping=1.0, paramserver={"gradient_clipping_value": 0.5}),
            ["gradient_clipping = 1.0", "paramserver.gradient_clipping_value = 0.5", "choose one"],
        ),
        (
            config(gradient_clipping=1.0, paramserver={"early_updates": "final"}),
            ["gradient_clipping = 1.0", 'paramserver.early_updates = "final"', "set early_updates to true"],
        ),
        (config(paramserver={"early_updates": "late"}), ["paramserver.early_updates", "'late'"]),
        (config(paramserver={"job": "auto"}), ['paramserver.job is "auto"', "write the value itself"]),
        (config(optimizer={"type": "Lamb"}), ["optimizer.type = 'Lamb'", "not elementwise", "AdamW"]),
        (config(optimizer={"type": "RMSprop"}), ["optimizer.type = 'RMSprop'", "none of", "Adagrad"]),
        (config(optimizer={"params": {"lr": 1}}), ["optimizer.type is missing", "AdamW, Adam, SGD"]),
        (config(optimizer={"type": "OneBitAdam"}), ["compressed moments", "communication_data_type"]),
        (config(optimizer={"type": "MuAdam"}), ["optimizer.type = 'MuAdam'", "parameter groups"]),
        (config(optimizer={"type": "SGD", "params": {"momntum": 1}}), ["optimizer.params.momntum", "mean momentum"]),
        (config(optimizer={"type": "SGD", "parms": {}}), ["optimizer.parms", "did you mean params"]),
        (
            config(optimizer={"type": "fusedadam", "params": {"maximize": True}}),
            ["optimizer.params.maximize = True is refused", "negate the loss"],
        ),
        (config(optimizer={"type": "Adam", "params": {"amsgrad": True}}), ["optimizer.params.amsgrad = True"]),
        (
            config(optimizer={"type": "SGD", "params": {"max_grad_norm": 1.0}}),
            ["optimizer.params.max_grad_norm = 1.0", "write gradient_clipping"],
        ),
        (config(optimizer={"type": "AdamW", "params": {"lr": -1}}), ["optimizer.params.lr = -1"]),
        (config(bf16={"enabled": True}, fp16={"enabled": True}), ["bf16.enabled and fp16.enabled"]),
        (config(data_types={"param_dtype": "fp16"}), ["data_types.param_dtype = 'fp16'", "say fp32"]),
        (zero(offload_param={"device": "nvme", "nvme_path": "/x"}), ["'/x'", "'/data/nvme'", "same path"]),
        (config(paramserver={"durability": "snapshot:0"}), ["paramserver.durability = 'snapshot:0'"]),
        (config(paramserver={"resume": "yes"}), ["paramserver.resume = 'yes'", "'must'"]),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_full_name(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, {})

    assert [word for word in words if word not in str(caught.value)] == []


# Every refused key in use, and a word of what to write instead.
IN_USE = [
    ({"sparse_gradients": True}, "sparse=False"),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, "enable bf16"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "communication_data_type"),
    ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "communication_data_type"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "communication_data_type"),
    ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}, "communication_data_type"),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "early updates"),
    ({"nebula": {"enabled": True}}, "docs/resume.md"),
    ({"datastates_ckpt": {"host_cache_size": 1}}, "docs/resume.md"),
    ({"tensor_parallel": {"autotp_size": 4}}, "ZeRO stage 3"),
    ({"pipeline": {"stages": 2}}, "ZeRO stage 3"),
    ({"sequence_parallel_size": 2}, "torch.utils.checkpoint"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "ZeRO stage 3"),
    ({"elasticity": {"enabled": True, "max_train_batch_size": 8}}, "same train_batch_size"),
    ({"autotuning": {"enabled": True}}, "docs/performance.md"),
    ({"hybrid_engine": {"enabled": True}}, "generate()"),
    ({"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, "the model's forward"),
    ({"curriculum_learning": {"enabled": True}}, "your dataset"),
    ({"data_efficiency": {"enabled": True}}, "your dataset"),
    ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}}, "model's modules"),
    ({"quantize_training": {"enabled": True}}, "model's modules"),
    ({"weight_quantization": {"num_bits": 4}}, "quantize the model"),
    ({"eigenvalue": {"enabled": True}}, "torch.func"),
    ({"sparse_attention": {"mode": "fixed", "block": 16}}, "flex_attention"),
    ({"optimizer": {"type": "AdamW", "params": {"maximize": True}}}, "negate the loss"),
    ({"optimizer": {"type": "AdamW", "params": {"capturable": True}}}, "CUDA graphs"),
    ({"optimizer": {"type": "AdamW", "params": {"differentiable": True}}}, "remove it"),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "set it to false"),
    ({"optimizer": {"type": "Adagrad", "params": {"amsgrad": True}}}, "set it to false"),
]
# The same keys, and sections around them, with values that mean "off".
OFF = [
    {"gradient_allreduce_op": "mean", "sparse_gradients": False, "amp": {"enabled": False, "opt_level": "O1"}},
    {"tensor_parallel": {"autotp_size": 0}, "pipeline": {"stages": 1}, "sequence_parallel_size": 1},
    {"pipeline": {"stages": "auto"}, "elasticity": {"enabled": False, "max_train_batch_size": 8}},
    {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {}}}},
    {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}, "weight_quantization": None},
    {"sparse_attention": {"mode": "dense"}, "datastates_ckpt": False, "autotuning": {"enabled": False}},
    {"optimizer": {"type": "Adam", "params": {"amsgrad": False, "bias_correction": True, "max_grad_norm": 0.0}}},
    {"zero_optimization": {"zero_quantized_weights": False, "zenflow": None}, "checkpoint": {"load_universal": True}},
]


@pytest.mark.parametrize(("raw", "instead"), IN_USE)
def test_a_feature_that_is_not_built_is_refused_with_what_to_write_instead(raw: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, {})

    assert next(iter(raw)) in str(caught.value)
    assert "refused" in str(caught.value)
    assert instead in str(caught.value)


@pytest.mark.parametrize("raw", OFF)
def test_a_refused_key_that_is_off_is_accepted_silently(raw: dict[str, Any]) -> None:
    assert keys_without_effect(load_config(raw, {}), {}) == {}


def test_each_refused_key_of_the_config_is_tried() -> None:
    def paths(value: Any, prefix: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield f"{prefix}{key}"
                yield from paths(inner, f"{prefix}{key}.")

    tried = {path for raw, _ in IN_USE for path in paths(raw)}

    assert {entry.path for entry in entries() if entry.refused} - tried == set()


def test_a_mistyped_key_of_a_section_that_is_off_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"elasticity.enable is unknown.*did you mean enabled"):
        load_config({"elasticity": {"enable": True}}, {})


def test_all_refused_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config(amp={"enabled": True}, sparse_gradients=True, wanbd={}), {})

    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in sorted(lines)] == ["amp", "sparse_gradients", "wanbd"]


@pytest.mark.parametrize("address", [{}, {"address": "unix:/of-an-operator.sock"}])
def test_a_network_for_a_collector_may_be_trusted_with_any_daemon(address: dict[str, str]) -> None:
    section = {"telemetry": "http://collector.example:4317", "insecure": True, **address}

    assert load_config(config(paramserver=section), {}).paramserver.insecure


def test_comments_are_left_out() -> None:
    assert load_config(config(_comment="a", comment=["b"], **{"//": "c"}), {}) == load_config(config(), {})


@pytest.mark.parametrize("value", [math.inf, None, 10**30])
def test_nothing_is_printed_at_infinity(value: Any) -> None:
    every = load_config(config(steps_per_print=value), {}).steps_per_print

    assert every is None or every == 10**30


def test_sizes_may_be_written_as_floats() -> None:
    raw = zero(stage3_max_live_parameters=1e9, reduce_bucket_size=5e8, sub_group_size=1e12)

    assert load_config(raw, {}).zero_optimization.stage3_max_live_parameters == 1_000_000_000
    assert load_config(zero(stage3_max_live_parameters=0), {}).zero_optimization.stage3_max_live_parameters == 0


@pytest.mark.parametrize(
    ("name", "params", "torch_class", "settings"),
    [
        ("adamw", {}, AdamW, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, AdamW, {"weight_decay": 0.01}),
        ("AdamW", {"torch_adam": True, "weight_decay": 0.5, "adam_w_mode": False}, AdamW, {"weight_decay": 0.5}),
        ("Adam", {}, Adam, {"weight_decay": 0.0, "decoupled_weight_decay": True}),
        ("ADAM", {"torch_adam": True}, Adam, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
        ("FusedAdam", {"adam_w_mode": False}, Adam, {"decoupled_weight_decay": False}),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, Adam, {"weight_decay": 0.0}),
        ("DeepSpeedCPUAdam", {"fp32_optimizer_states": True}, Adam, {"decoupled_weight_decay": True}),
        ("CPUAdam", {"set_grad_none": True}, Adam, {"decoupled_weight_decay": True}),
        ("Adam", {"fused": True, "foreach": False, "bias_correction": False}, Adam, {"lr": 1e-3}),
        ("Adam", {"torch_adam": "torch_impl"}, Adam, {"weight_decay": 0.01}),
        ("sgd", {"lr": 0.5, "nesterov": True, "momentum": 0.9}, SGD, {"lr": 0.5, "nesterov": True}),
        ("DeepSpeedCPUAdagrad", {}, Adagrad, {"lr": 1e-2, "eps": 1e-10}),
        ("FusedLion", {}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999)}),
    ],
)
def test_an_optimizer_has_the_settings_that_deepspeed_gives_it(
    name: str, params: dict[str, Any], torch_class: type[Optimizer], settings: dict[str, Any]
) -> None:
    section = load_config(config(optimizer={"type": name, "params": params}), {}).optimizer
    assert section is not None
    optimizer = torch_class([torch.zeros(1)], **section.params.arguments())

    assert section.type == torch_class.__name__
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


@pytest.mark.parametrize("from_environment", [True, False])
def test_with_an_address_the_daemons_own_keys_are_refused(from_environment: bool) -> None:
    section: dict[str, Any] = {"host_budget": "1GiB"} | ({} if from_environment else {"address": "host:1"})
    environ = {"PARAMSERVER_ADDRESS": "host:1"} if from_environment else {}

    with pytest.raises(ConfigError) as caught:
        load_config(config(paramserver=section), environ)

    assert "paramserver.host_budget" in str(caught.value)
    assert "host:1" in str(caught.value)
