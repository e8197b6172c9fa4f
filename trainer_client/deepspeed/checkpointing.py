"""DeepSpeed's `deepspeed.checkpointing`: activations are computed again in backward, by torch's own checkpoints.

This module decides what the arguments of `configure` mean here. The settings that split activations over the ranks of a
model-parallel group have no effect, because there is no such group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

from trainer_client.base.not_built import refuse
from trainer_client.errors import ConfigError
from trainer_client.training.data_parallel import check_mpu

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

log = logging.getLogger(__name__)

R = TypeVar("R")

_is_configured = False


def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run `function` without keeping its activations, and return its result. Backward runs the function once more.

    This is torch's checkpoint with `use_reentrant=False`. Tensors may also be passed as keyword arguments.
    """
    result: R = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept DeepSpeed's settings of activation checkpoints.

    Args:
        mpu_: an object that describes the groups of ranks; accepted if the ranks share out nothing but the data.
        deepspeed_config: has no effect.
        partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile: have no effect; a line
            in the log says so.
        checkpoint_in_cpu: refused if it is true.

    Raises:
        ConfigError: `checkpoint_in_cpu` is true, or `mpu_` describes model parallelism.
    """
    global _is_configured  # noqa: PLW0603
    check_mpu("checkpointing.configure(mpu_=...)", mpu_)
    if checkpoint_in_cpu:
        raise ConfigError(
            "checkpointing.configure(checkpoint_in_cpu=True) has no engine that it could be about: write "
            '"activation_checkpointing": {"cpu_checkpointing": true} into the config of initialize() instead'
        )
    without_effect = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name in (name for name, value in without_effect.items() if value):
        log.warning("checkpointing.configure(%s=True) has no effect: torch's checkpoints have no such setting", name)
    _is_configured = True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _is_configured


def reset() -> None:
    """Do nothing: torch's checkpoints keep nothing between two passes."""


def get_cuda_rng_tracker() -> Any:
    """Refuse the call, because random numbers are tracked for model parallelism. It raises NotBuiltError."""
    refuse("checkpointing.get_cuda_rng_tracker()", "model parallelism is not built; torch restores the generators")


def model_parallel_cuda_manual_seed(seed: int) -> Any:
    """Refuse the call, because it seeds ranks of a model-parallel group differently. It raises NotBuiltError."""
    refuse(f"checkpointing.model_parallel_cuda_manual_seed({seed})", "call torch.manual_seed")
