"""One line of the log names the keys that have no effect, with the reasons, and no other key."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.base.section import Agreement, Section
from trainer_client.config.keys import leaves
from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import describe_clipping, describe_without_effect, keys_without_effect
from trainer_client.config.reference import entries
from trainer_client.config.training_config import TrainingConfig

# Every key without effect, with a value that is not DeepSpeed's default.
SET: dict[str, Any] = {
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "seq_parallel_communication_data_type": "bf16",
    "disable_allgather": True,
    "bf16": {
        "immediate_grad_update": True,
        "check_grad_overflow": False,
        "loss_scale": 1.0,
        "initial_scale_power": 10,
        "loss_scale_window": 10,
        "hysteresis": 1,
        "min_loss_scale": 2,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    },
    "fp16": {"auto_cast": True, "opt_level": "O2", "fp16_master_weights_and_grads": True},
    "gradient_clipping": 1.0,
    "data_types": {"param_dtype": "fp32"},
    "optimizer": {
        "type": "AdamW",
        "legacy_fusion": True,
        "torch_adam": True,
        "params": {
            "set_grad_none": False,
            "fp32_optimizer_states": False,
            "fused": True,
            "foreach": True,
            "adam_w_mode": False,
            "max_grad_norm": 1.0,
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "cpu",
            "pin_memory": False,
            "buffer_count": 1,
            "buffer_size": 1e6,
            "max_in_cpu": 1,
        },
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": False,
            "buffer_count": 1,
            "buffer_size": 1e6,
            "max_in_cpu": 1,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": True,
            "super_offload": True,
            "cpuadam_cores_perc": 0.5,
        },
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 1,
        "use_multi_rank_bucket_allreduce": False,
        "allgather_partitions": False,
        "allgather_bucket_size": 1,
        "stage3_allgather_sequential": True,
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_module_granularity_threshold": 1,
        "round_robin_gradients": True,
        "sub_group_size": 1,
        "stage3_prefetch_bucket_size": 1,
        "stage3_max_reuse_distance": 1,
        "load_from_fp32_weights": False,
        "elastic_checkpoint": True,
        "pipeline_loading_checkpoint": True,
        "find_unused_parameters": True,
        "cpu_offload_use_pin_memory": True,
        "legacy_stage1": True,
        "grad_hooks": False,
        "zero_hpz_partition_size": 8,
        "mics_shard_size": 8,
        "mics_hierarchical_params_gather": True,
        "memory_efficient_linear": False,
        "override_module_apply": False,
        "log_trace_cache_warnings": True,
        "save_muon_momentum_buffer_in_memory": True,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "allgather_size": 1,
    "aio": {"block_size": 262144},
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "timers": {"throughput": {"enabled": False}},
    "flops_profiler": {"enabled": True},
    "comms_logger": {"enabled": True},
    "vocabulary_size": 7,
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True},
    "comet": {"enabled": True, "api_key": "secret"},
    "csv_monitor": {"enabled": True},
    "activation_checkpointing": {
        "partition_activations": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
    },
    "compile": {"deepcompile": True},
    "graph_harvesting": True,
    "checkpoint": {
        "use_node_local_storage": True,
        "parallel_write": {"pipeline_stage": True},
        "checkpoint_serialization": False,
        "writer": {"type": "python"},
    },
    "data_parallel_size": 2,
    "use_data_before_expert_parallelism": True,
}


def test_each_key_without_effect_is_named_with_its_reason() -> None:
    expected = {entry.path: entry.without_effect.why for entry in entries() if entry.without_effect is not None}

    assert keys_without_effect(load_config(SET, {}), {}) == expected


def test_the_line_has_each_reason_once_and_no_secret() -> None:
    line = describe_without_effect(load_config(SET, {}), {})

    assert line is not None
    assert "wandb" in line
    assert "secret" not in line
    assert line.count("the library writes to no tracker") == 1
    assert "\n" not in line


def test_defaults_and_sections_that_are_off_are_not_named() -> None:
    raw = {
        "zero_optimization": {"reduce_bucket_size": 5e8, "contiguous_gradients": True},
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": False, "output_path": "logs"},
        "activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": False},
    }
    assert describe_without_effect(load_config(raw, {}), {}) is None


@pytest.mark.parametrize(
    ("zero", "paramserver", "named"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, {}, "zero_optimization.offload_param"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, {}, "zero_optimization.offload_optimizer"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, None),
        ({"stage": 0, "offload_optimizer": {"device": "none"}}, {}, None),
        (
            {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/n"}},
            {},
            "zero_optimization.offload_param.nvme_path",
        ),
        ({"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}}, {}, None),
        (
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}},
            {"address": "host:1"},
            "zero_optimization.offload_param.nvme_path",
        ),
        (
            {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/n"}},
            {"state_dir": "/s"},
            "zero_optimization.offload_param.nvme_path",
        ),
    ],
)
def test_keys_that_have_no_effect_beside_others_are_named(
    zero: dict[str, Any], paramserver: dict[str, Any], named: str | None
) -> None:
    config = load_config({"zero_optimization": zero, "paramserver": paramserver}, {})

    assert list(keys_without_effect(config, {})) == ([] if named is None else [named])


@pytest.mark.parametrize(
    "raw", [{"gradient_clipping": 0}, {"gradient_clipping": 1.0}, {"paramserver": {"gradient_clipping_value": 0.5}}]
)
def test_a_config_that_does_not_say_whether_gradients_are_clipped_is_named(raw: dict[str, Any]) -> None:
    assert describe_clipping(load_config(raw, {})) is None
    line = describe_clipping(load_config({"train_batch_size": 1}, {}))
    assert line is not None and line.startswith("gradient_clipping is not in the config, so gradients are NOT clipped")


def test_ranks_need_not_agree_on_keys_without_effect() -> None:
    with_them = dict(load_config(SET, {}).values(Agreement.RUN))
    honoured = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    }

    assert with_them == dict(load_config(honoured, {}).values(Agreement.RUN))


def test_every_key_is_described() -> None:
    def sections(config: type[Section]) -> list[str]:
        return [path for path, fields in leaves(config) if not fields[-1].description]

    assert sections(TrainingConfig) == []
