"""The lines of the log about a config: keys without effect, a missing `gradient_clipping`, and what "auto" became.

This module owns the words of these lines. It must never change a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_client.base.device import CPU, kind_of
from trainer_client.base.section import Section, mark_of
from trainer_client.base.standing import WithoutEffect
from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.training_config import TrainingConfig

# For each offload section of the config, the lowest stage of ZeRO at which it has an effect. At lower stages, each rank
# keeps all parameters (`offload_param`) or all optimizer states (`offload_optimizer`) on its device.
_OFFLOAD_STAGES = {"zero_optimization.offload_param": 3, "zero_optimization.offload_optimizer": 1}

_NOT_MOVED = "no boundaries are moved, because activation_checkpointing.cpu_checkpointing is false"


def keys_without_effect(config: TrainingConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the keys that are set to another value than their default and have no effect, with the reason of each."""
    return dict(config.ignored) | dict(_marked(config)) | dict(_by_circumstance(config, environ))


def describe_without_effect(config: TrainingConfig, environ: Mapping[str, str]) -> str | None:
    """Return the line for the log that lists the keys without effect, grouped by reason; None if there are none."""
    by_reason: dict[str, list[str]] = {}
    for key, why in keys_without_effect(config, environ).items():
        by_reason.setdefault(why, []).append(key)
    if not by_reason:
        return None
    listed = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in by_reason.items())
    return f"keys of the config without effect here: {listed}"


def describe_clipping(config: TrainingConfig) -> str | None:
    """Return the line for the log about a config that does not say whether gradients are clipped; None if it does.

    Later versions of DeepSpeed clip if the config says nothing, and earlier ones do not. So the config is ambiguous.
    """
    if "gradient_clipping" in config.model_fields_set or config.paramserver.gradient_clipping_value is not None:
        return None
    return (
        "gradient_clipping is not in the config, so gradients are NOT clipped, and DeepSpeed clips them at a norm of "
        "1.0 from version 0.19 on: write gradient_clipping, 1.0 to clip as it does, or 0 not to clip"
    )


def describe_automatic(config: TrainingConfig, batch: BatchSizes) -> str | None:
    """Return the line for the log that says which value each "auto" became; None if there was none."""
    sizes = {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    values = {path: sizes.get(path, config.value_at(path)) for path in config.automatic}
    if not values:
        return None
    listed = ", ".join(f"{path} = {json.dumps(value, default=str)}" for path, value in values.items())
    return f'"auto" in the config became: {listed}'


def _marked(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys with a mark `WithoutEffect` that are set to another value than their default.

    Each key is yielded as its dotted name and the mark's reason.
    """
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if mark := mark_of(field, WithoutEffect):
            if value != field.default and not _is_switched_off(value):
                yield f"{prefix}{name}", mark.why
        elif isinstance(value, Section):
            yield from _marked(value, f"{prefix}{name}.")


def _is_switched_off(value: Any) -> bool:
    return isinstance(value, Section) and getattr(value, "enabled", True) is False


def _by_circumstance(config: TrainingConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the keys that have no effect because of other keys of this config, or of the device of the ranks.

    Each key is yielded as its dotted name and the reason.
    """
    stage = config.zero_optimization.stage
    if config.paramserver.gpu_budget:
        if stage < 3:
            yield "paramserver.gpu_budget", f"at stage {stage} the whole parameters are on the device anyway"
        elif kind_of(config.paramserver.device) == CPU:
            yield "paramserver.gpu_budget", "the ranks compute on the CPU, which maps the store's memory"
    if not config.offloads_activations:
        yield from _about_boundaries(config)
    for name, section in config.offloads().items():
        if section.device != "none" and stage < _OFFLOAD_STAGES[name]:
            yield name, f"at stage {stage} every rank keeps this state on its device"
        if section.nvme_path is None:
            continue
        if section.device != "nvme":
            yield f"{name}.nvme_path", f"the device is {section.device}"
        elif config.store_address(environ) is not None:
            yield f"{name}.nvme_path", "the daemon at paramserver.address has its own directory"
        elif config.paramserver.state_dir is not None:
            yield f"{name}.nvme_path", "paramserver.state_dir is the daemon's directory"


def _about_boundaries(config: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the set keys about boundaries of activation checkpoints in the store, if this config moves none there.

    Each key is yielded as its dotted name and this reason.
    """
    for name in ("synchronize_checkpoint_boundary", "profile"):
        if getattr(config.activation_checkpointing, name):
            yield f"activation_checkpointing.{name}", _NOT_MOVED
    for name in ("kept", "smallest", "recompute"):
        if name in config.paramserver.activations.model_fields_set:
            yield f"paramserver.activations.{name}", _NOT_MOVED
