"""The table of DeepSpeed's modules and their names, and where this library implements each name.

Scripts write `from trainer_client.ops.adam import FusedAdam`, or `from deepspeed.ops.adam import FusedAdam` after
`import trainer_client.as_deepspeed`. There are no files for these modules: finder.py makes each module from its row in
the table. Type checkers and editors cannot see such modules, so stubs are written from the same rows, when the wheel is
built and by `make lint`:

    python -P trainer_client/deepspeed/names.py DIRECTORY

This module owns the table. It must import nothing but Python's own modules, because paramserver/packaging.py runs it
where no other package is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path


class Instead(str):
    """The remedy for DeepSpeed's names that are not built: its text says what to write instead of the name."""


_COMPRESSION = Instead(
    "compression is not built; leave the call and the section compression_training out, or compress the model with "
    "torch.nn.utils.prune or torchao before initialize()"
)
_EXPERTS = Instead(
    "expert parallelism is not built; write the experts as an nn.ModuleList: each is a unit, which only the ranks that "
    "use it gather (docs/models.md)"
)
_LAMB = Instead(
    "LAMB needs the norms of whole parameters, and a store updates ranges of parameters; use FusedAdam, or Lion for "
    "large batches"
)
_PIPELINE = Instead(
    "pipeline parallelism is not built; stage 3 with offload_param trains a model that is larger than a device, so "
    "pass the model as one nn.Module"
)
_SEQUENCE = Instead(
    "sequence parallelism (Ulysses) is not built; call the attention itself, with whole sequences on each rank"
)
_TENSOR = Instead(
    "tensor parallelism is not built; stage 3 with offload_param trains a model that is larger than a device, so leave "
    "the call and the section tensor_parallel out"
)

BELOW = "."

# The table has a row for each of DeepSpeed's modules, whose key is the module's name without `deepspeed.`. A row maps
# places to the names that the module takes from that place. A place is one of:
# - a module of this library, without `trainer_client.`. An entry "A=B" means: what DeepSpeed calls A is called B in
#   that module. "*": DeepSpeed's module and that module are the same object;
# - BELOW: the submodules that `from MODULE import *` imports. Other submodules can be imported by name;
# - Instead(...): the names are not built. They can be imported, for scripts that test for them, but to use them is an
#   error. Names with a capital are classes, and the others are functions.
TABLE: dict[str, dict[str, str]] = {
    "checkpoint": {BELOW: "ds_to_universal utils", "deepspeed.ds_to_universal": "UNIVERSAL_CHECKPOINT_INFO"},
    "checkpoint.ds_to_universal": {"deepspeed.ds_to_universal": "*"},
    "checkpoint.utils": {"deepspeed.helpers": "clone_tensors_for_torch_save"},
    "compression": {BELOW: "compress helper"},
    "compression.compress": {_COMPRESSION: "init_compression redundancy_clean"},
    "compression.helper": {"deepspeed.helpers": "recursive_getattr recursive_setattr"},
    "launcher": {BELOW: "runner"},
    "launcher.runner": {"deepspeed.helpers": "DEEPSPEED_ENVIRONMENT_NAME"},
    "moe": {BELOW: "layer utils"},
    "moe.layer": {_EXPERTS: "MoE"},
    "moe.utils": {
        "deepspeed.parameters": "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"
    },
    "ops": {BELOW: "adagrad adam aio lamb lion op_builder", "deepspeed.op_builder": "__compatible_ops__"},
    "ops.adagrad": {"deepspeed.optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"deepspeed.optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.aio": {"deepspeed.op_builder": "AsyncIOBuilder"},
    "ops.lamb": {_LAMB: "FusedLamb"},
    "ops.lion": {"deepspeed.optimizers": "DeepSpeedCPULion FusedLion"},
    "ops.op_builder": {"deepspeed.op_builder": "*"},
    "pipe": {_PIPELINE: "LayerSpec PipelineModule TiedLayerSpec"},
    "runtime": {
        BELOW: "activation_checkpointing base_optimizer config dataloader engine lr_schedules sequence_parallel "
        "tensor_parallel utils zero"
    },
    "runtime.activation_checkpointing": {BELOW: "checkpointing"},
    "runtime.activation_checkpointing.checkpointing": {"deepspeed.checkpointing": "*"},
    "runtime.base_optimizer": {"training.store_optimizer": "DeepSpeedOptimizer=StoreOptimizer"},
    "runtime.config": {"deepspeed.config": "DeepSpeedConfig", "errors": "DeepSpeedConfigError=ConfigError"},
    "runtime.dataloader": {"deepspeed.helpers": "RepeatingLoader"},
    "runtime.engine": {"engine.engine": "DeepSpeedEngine=Engine"},
    "runtime.lr_schedules": {
        "schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
        "deepspeed.lr_schedules": "LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
        "VALID_LR_SCHEDULES LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
        "LR_RANGE_TEST_STAIRCASE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_FIRST_STEP_SIZE "
        "CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_MOM "
        "CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE "
        "WARMUP_LINEAR_RATE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS",
    },
    "runtime.precision_config": {
        "config.precision": "DeepSpeedBF16Config=Bf16Section DeepSpeedFP16Config=Fp16Section",
        "deepspeed.config": "get_bfloat16_config get_float16_config",
    },
    "runtime.sequence_parallel": {BELOW: "ulysses_sp"},
    "runtime.sequence_parallel.ulysses_sp": {"deepspeed.ulysses_sp": "*"},
    "runtime.tensor_parallel": {_TENSOR: "tp_model_init"},
    "runtime.utils": {
        "deepspeed.helpers": "empty_cache ensure_directory_exists move_to_device see_memory_usage set_random_seed"
    },
    "runtime.zero": {
        "zero": "GatheredParameters Init MiCS_Init TiledLinear ZeroParamStatus register_external_parameter "
        "unregister_external_parameter unwrap_model_for_generation"
    },
    "runtime.zero.config": {
        "config.zero": "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerSection "
        "DeepSpeedZeroOffloadParamConfig=OffloadParamSection",
        "deepspeed.config": "DeepSpeedZeroConfig ZeroStageEnum",
    },
    "runtime.zero.offload_config": {
        "deepspeed.config": "OffloadDeviceEnum",
        "training.run.state_offload": "OffloadStateTypeEnum=DeviceState",
    },
    "runtime.zero.offload_states": {"deepspeed.parameters": "get_state_devices"},
    "runtime.zero.parameter_offload": {"training.model.parameter_offload": "DeepSpeedZeRoOffload=ParameterOffload"},
    "runtime.zero.partition_parameters": {
        "accelerator": "get_accelerator",
        "deepspeed.parameters": "_orig_torch_arange zero_wrapper_for_fp_tensor_constructor",
        "zero": "GatheredParameters Init ZeroParamStatus register_external_parameter unregister_external_parameter",
    },
    "runtime.zero.utils": {"deepspeed.parameters": "is_zero_param"},
    "sequence": {BELOW: "layer"},
    "sequence.layer": {_SEQUENCE: "DistributedAttention"},
    "utils": {
        BELOW: "groups",
        "comm": "is_initialized",
        "deepspeed.helpers": "OnDevice RepeatingLoader",
        "deepspeed.logging": "log_dist log_dist_once logger set_log_level_from_string",
        "deepspeed.tensor_fragment": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param "
        "safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
        "safe_set_local_optimizer_state safe_update_full_grad_vectorized",
        "deepspeed.z3_leaf_module": "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules "
        "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
    },
    "utils.groups": {"deepspeed.groups": "*"},
    "utils.init_on_device": {"deepspeed.helpers": "OnDevice"},
    "utils.logging": {"deepspeed.logging": "*"},
    "utils.tensor_fragment": {"deepspeed.tensor_fragment": "*"},
    "utils.timer": {"training.report.throughput": "ThroughputTimer"},
    "utils.torch": {"deepspeed.helpers": "required_torch_version"},
    "utils.z3_leaf_module": {"deepspeed.z3_leaf_module": "*"},
    "utils.zero_to_fp32": {"deepspeed.zero_to_fp32": "*"},
}


def whole_module(path: str) -> str | None:
    """Return the module of this library that DeepSpeed's module `path` is an alias of; None if it is no alias."""
    return next((place for place, names in TABLE[path].items() if names == "*"), None)


def modules_below(path: str) -> list[str]:
    """Return the names of the direct submodules of DeepSpeed's module `path`, as "adam" for `path` "ops"."""
    return [name for parent, _, name in (other.rpartition(".") for other in TABLE) if parent == path]


def names_of(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the names of DeepSpeed's module `path`, each with where its object is from.

    Each item is (name, place, name there): DeepSpeed's name, the module of this library (or the remedy) that the table
    gives for the name, and the name that the object has in that module.
    """
    for place, names in TABLE[path].items():
        for entry in names.split():
            name, _, there = entry.partition("=")
            yield name, place, there or name


def public_names(path: str) -> list[str]:
    """Return the names that `from MODULE import *` imports from DeepSpeed's module `path`."""
    return sorted(name for name, _, _ in names_of(path) if name.startswith("__") or not name.startswith("_"))


def write_stubs(directory: Path) -> None:
    """Write a stub for each module of the table below `directory`/trainer_client.

    Raises:
        OSError: a file cannot be written.
    """
    for path in TABLE:
        below = modules_below(path)
        file = directory.joinpath("trainer_client", *path.split("."), *(["__init__"] if below else []))
        file.parent.mkdir(parents=True, exist_ok=True)
        own = [row for row in names_of(path) if row[1] != BELOW]
        modules = set(below) - {name for name, _, _ in own}
        lines = ["from typing import Any, NoReturn", "from trainer_client.base.not_built import NotBuilt"]
        if whole_module(path) is None:
            lines.append(f"__all__ = {public_names(path)}")
        lines += [f"from trainer_client.{path} import {name} as {name}" for name in sorted(modules)]
        for name, place, there in own:
            if name == "*":
                lines.append(f"from trainer_client.{place} import *")
            elif not isinstance(place, Instead):
                lines.append(f"from trainer_client.{place} import {there} as {name}")
            elif name[0].isupper():
                lines.append(f"class {name}(NotBuilt): ...")
            else:
                lines.append(f"def {name}(*_: Any, **__: Any) -> NoReturn: ...")
        file.with_suffix(".pyi").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_stubs(Path(sys.argv[1]))
