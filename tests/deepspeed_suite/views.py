"""Private names of DeepSpeed that its tests read, as views of what this library has.

This module owns the views. Each returns a value that this library has under another name, or has a function called
where it does what DeepSpeed's function of that name does. This module must never change what the library does, nor
answer for something that it does not do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from trainer_client import comm
from trainer_client.config.batch_sizes import BatchKeys, resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.config.training_config import TrainingConfig
from trainer_client.deepspeed.config import DeepSpeedConfig
from trainer_client.engine.engine import Engine
from trainer_client.training.model.leaves import is_leaf
from trainer_client.training.model.reduction_dtypes import MARK, marked_dtype
from trainer_client.training.run.checkpoint_files import MANIFEST
from trainer_client.training.run.checkpoints import Checkpoints
from trainer_client.training.run.state_offload import DeviceState
from trainer_client.training.step.phases import Phase
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import StoreOptimizer

_hand_over = Checkpoints.hand_over
_load_checkpoint = Engine.load_checkpoint
# The engines whose `load_checkpoint` runs, with the directory and the tag that it was given.
_loading: list[tuple[Any, Any, Any]] = []
# The moments of Adam.
_MOMENTS = ("exp_avg", "exp_avg_sq")
# The parameters of each group whose original has partitions in their place at the moment, by the group's tensor.
_hidden: dict[torch.Tensor, list[torch.Tensor]] = {}


class _OfStages(type):
    """The class of a class of which the optimizer of an engine at some stages is an instance."""

    stages: tuple[int, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether the object is such an optimizer."""
        engine = instance._engine() if isinstance(instance, StoreOptimizer) and instance._engine is not None else None
        return isinstance(engine, Engine) and engine.zero_optimization_stage() in cls.stages


class ZeROOptimizer(metaclass=_OfStages):
    """DeepSpeed's base class of all optimizers of ZeRO."""

    stages = (1, 2, 3)


class Bf16Optimizer(metaclass=_OfStages):
    """DeepSpeed's class of the optimizer of stage 1 in bf16 that keeps gradients in fp32."""

    stages = (1,)


class Stage3Optimizer(metaclass=_OfStages):
    """DeepSpeed's class of the optimizer of stage 3."""

    stages = (3,)


def _value_of(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from a config to the value of one of its keys."""
    return lambda config: getattr(load_config(config, {}), name)


def _default_of(name: str) -> Any:
    return TrainingConfig.model_fields[name].default


# Names that modules of DeepSpeed have and this library has not, by module. Those of runtime.torch_autocast are about
# the dtype in which a parameter's gradient is reduced.
NAMES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed.runtime.base_optimizer": {"ZeROOptimizer": ZeROOptimizer},
    "deepspeed.runtime.config": {
        name: _value_of(name.removeprefix("get_")) for name in ("get_gradient_clipping", "get_log_level")
    },
    "deepspeed.runtime.constants": {
        "GRADIENT_CLIPPING_DEFAULT": _default_of("gradient_clipping"),
        "LOG_LEVEL_DEFAULT": _default_of("log_level"),
    },
    # torch's linear function keeps no second copy of a weight.
    "deepspeed.runtime.zero.linear": {
        "zero3_linear_wrap": linear,
        "LinearFunctionForZeroStage3": SimpleNamespace(apply=linear),
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": Bf16Optimizer},
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": Stage3Optimizer},
    "deepspeed.runtime.zero.partition_parameters": {
        "_contradicting_single_rank_pg_error": lambda dp_world_size, explicit_process_group, env: (
            None if explicit_process_group is not None else comm.contradiction(dp_world_size, env)
        ),
    },
    "deepspeed.runtime.torch_autocast": {
        "PARAM_COMM_DTYPE_ATTR_NAME": MARK,
        "has_comm_dtype": lambda parameter: marked_dtype(parameter) is not None,
        "get_comm_dtype": lambda parameter: marked_dtype(parameter) or parameter.dtype,
    },
}


def _config(engine: Engine) -> SimpleNamespace:
    """Return the dtypes that the section `data_types` of the config gives; None for one that it does not give."""
    policy = PrecisionPolicy.of(engine._settings)
    return SimpleNamespace(
        param_dtype=engine._settings.value_at("data_types.param_dtype"), buffer_dtype=policy.buffer_dtype
    )


def _settings_of(engine: Any) -> TrainingConfig:
    """Return the checked config of an object that answers as an engine does about its number formats."""
    names = ("param_dtype", "buffer_dtype")
    types = {name: value for name in names if (value := getattr(engine._config, name)) is not None}
    formats = {"bf16": {"enabled": engine.bfloat16_enabled()}, "fp16": {"enabled": engine.fp16_enabled()}}
    return load_config({**formats, "data_types": types}, {})


def _mixed_precision_dtypes(engine: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of the parameters and of the buffers; None if each keeps its own."""
    policy = PrecisionPolicy.of(_settings_of(engine))
    return policy.compute_dtype, policy.buffer_dtype


def _set_batch_sizes(config: DeepSpeedConfig) -> None:
    """Set the three batch sizes of a config from those that are not None. It can raise ConfigError."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = resolve_batch_sizes(BatchKeys(**{name: getattr(config, name) for name in names}), comm.get_world_size())
    for name, size in zip(names, (sizes.train, sizes.micro, sizes.accumulation), strict=True):
        setattr(config, name, size)


def _optimizer_file(engine: Engine, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
    """Return the file of a checkpoint that has the optimizer's states: the manifest, which names them in the store."""
    return str(Path(checkpoints_path) / str(tag) / MANIFEST)


def _load(engine: Engine, load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
    """Load a checkpoint as the library does, so that `_note_states` finds the engine."""
    _loading.append((engine, load_dir, tag))
    try:
        return _load_checkpoint(engine, load_dir, tag, *arguments, **options)
    finally:
        _loading.pop()


def _note_states(checkpoints: Checkpoints, loaded: Any, step: int, *, with_states: bool) -> None:
    """Hand values over as the library does, and ask for the file of the optimizer's states where they are loaded.

    DeepSpeed asks there, too, and its tests watch the function to find out whether states are loaded.
    """
    if with_states and _loading:
        engine, load_dir, tag = _loading[-1]
        engine._get_optimizer_ckpt_name(load_dir, tag)
    _hand_over(checkpoints, loaded, step, with_states=with_states)


def _show_partitions(optimizer: StoreOptimizer) -> None:
    """Put the states of this rank into the original optimizer, cut and joined as at DeepSpeed's stage 3.

    All ranks must call this. Each parameter group has one tensor then, with the master weights. DeepSpeed's checkpoints
    have such states.
    """
    engine: Any = optimizer._driver()
    counts = engine._passes._step.update_counts
    for group in optimizer.param_groups:
        parts = {kind: torch.cat([_part(engine, p, kind) for p in group["params"]]) for kind in ("master", *_MOMENTS)}
        weights = nn.Parameter(parts.pop("master"))
        states = {"step": counts[optimizer._index_of[id(group["params"][0])]], **parts}
        # The library refuses to change these states, because a script would expect an effect.
        dict.__setitem__(optimizer.optimizer.state, weights, states)
        _hidden[weights] = group["params"]
        group["params"] = [weights]


def _hide_partitions(optimizer: StoreOptimizer) -> None:
    """Undo `_show_partitions`."""
    for group in optimizer.param_groups:
        (weights,) = group["params"]
        dict.__delitem__(optimizer.optimizer.state, weights)
        group["params"] = _hidden.pop(weights)


def _part(engine: Any, parameter: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a rank's part of a state as DeepSpeed cuts it: equal parts of the parameter, the last one with zeros."""
    whole = engine.get_full(parameter, kind).flatten()
    size = -(-whole.numel() // engine.world_size)
    part: torch.Tensor = pad(whole, (0, size * engine.world_size - whole.numel())).split(size)[engine.global_rank]
    return part


def _gradients(optimizer: StoreOptimizer) -> dict[int, list[torch.Tensor]]:
    """Return this rank's parts of the gradients as DeepSpeed cuts them, by group. All ranks must call this."""
    engine = optimizer._driver()
    groups = enumerate(optimizer.param_groups)
    return {number: [_part(engine, p, "grad") for p in group["params"]] for number, group in groups}


def _whole_gradients(optimizer: StoreOptimizer) -> list[torch.Tensor]:
    """Return the gradients of each parameter group, flattened and joined. All ranks must call this."""
    engine: Any = optimizer._driver()
    groups = optimizer.param_groups
    return [torch.cat([engine.get_full(p, "grad").flatten() for p in group["params"]]) for group in groups]


def _joined_parts(optimizer: StoreOptimizer, kind: str) -> list[torch.Tensor]:
    """Return this rank's parts of one kind of state, joined, for each parameter group."""
    engine: Any = optimizer._driver()
    return [torch.cat([engine.get_local(p, kind) for p in group["params"]]) for group in optimizer.param_groups]


def _masters(optimizer: StoreOptimizer) -> list[torch.Tensor]:
    """Return this rank's master weights for each parameter group, and while they are offloaded only their devices."""
    engine: Any = optimizer._driver()
    if engine._hooks.phase is Phase.OFFLOADED:
        return [torch.empty(0, device=device) for device in engine.state_devices(DeviceState.hp_params)]
    return _joined_parts(optimizer, "master")


def _leaf_parameters(optimizer: StoreOptimizer) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the parameters of each module that is marked as a leaf."""
    engine: Any = optimizer._driver()
    return {module: list(module.parameters()) for module in engine.module.modules() if is_leaf(module)}


def _trained_shapes(engine: Engine) -> list[OrderedDict[str, torch.Size]]:
    """Return the shapes of the parameters of each parameter group, by name."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return [OrderedDict((names[p], p.shape) for p in group["params"]) for group in engine.optimizer.param_groups]


def install() -> None:
    """Give the engine, its optimizer and its config these names. Idempotent."""
    optimizer: Any = StoreOptimizer
    optimizer._set_fp32_optimizer_param_groups = _show_partitions
    optimizer._clear_fp32_optimizer_param_groups = _hide_partitions
    optimizer.averaged_gradients = property(_gradients)
    optimizer.fp32_groups_gradients_flat = property(_whole_gradients)
    optimizer.single_partition_of_fp32_groups = optimizer.fp32_partitioned_groups_flat = property(_masters)
    optimizer.leaf_parameters = property(_leaf_parameters)
    optimizer._get_norm_groups = lambda self: [part.norm() for part in _joined_parts(self, "grad")]
    optimizer._global_grad_norm = property(lambda self: self._driver().get_global_grad_norm())
    engine: Any = Engine
    engine._get_zero_param_shapes = _trained_shapes
    engine._mixed_precision_dtypes = _mixed_precision_dtypes
    engine._assert_valid_mixed_precision_config = _settings_of
    config: Any = DeepSpeedConfig
    config._configure_train_batch_size = _set_batch_sizes
    engine._config = property(_config)
    engine._get_optimizer_ckpt_name = _optimizer_file
    engine.load_checkpoint = _load
    checkpoints: Any = Checkpoints
    checkpoints.hand_over = _note_states
