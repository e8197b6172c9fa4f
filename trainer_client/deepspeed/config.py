"""DeepSpeed's classes for configs, for scripts that read or check a config by themselves.

`initialize` takes the config itself, and no object of these classes.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from trainer_client import comm
from trainer_client.base.not_built import refuse
from trainer_client.config.batch_sizes import resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.config.older_names import with_todays_names
from trainer_client.config.precision import Bf16Section, Fp16Section
from trainer_client.config.zero import ZeroSection
from trainer_client.training.data_parallel import check_mpu

_SECTION = "zero_optimization"


class DeepSpeedConfig:
    """A checked config with the values that scripts read. `initialize` takes the config itself, not this object.

    Attributes:
        settings: the whole config, as docs/config.md describes it.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: the three batch sizes; a size
            that the config leaves out is computed from the others.
        gradient_clipping: the limit of the gradient's norm; 0: there is no limit.
        gradient_allreduce_op: "mean" or "sum": how the gradients of the ranks are combined to the gradient of a step.
        zero_optimization_stage: the stage, 0 to 3.
        zero_enabled: whether the stage is above 0.
        bfloat16_enabled, float16_enabled: whether the model computes in that dtype.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: an object that describes the groups of ranks; accepted if the ranks share out nothing but the data.
        mesh_device: refused unless it is None.

    Raises:
        ConfigError: a key is refused, or the batch sizes contradict each other.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            refuse("DeepSpeedConfig(mesh_device=...)", "there is data parallelism only (ZeRO); leave it out")
        check_mpu("DeepSpeedConfig(mpu=...)", mpu)
        self.settings = load_config(config, os.environ)
        sizes = resolve_batch_sizes(self.settings, comm.get_world_size())
        self.train_batch_size = sizes.train
        self.train_micro_batch_size_per_gpu = sizes.micro
        self.gradient_accumulation_steps = sizes.accumulation
        self.gradient_clipping = self.settings.gradient_clipping
        self.gradient_allreduce_op = self.settings.gradient_allreduce_op
        self.zero_optimization_stage: int = self.settings.zero_optimization.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.bfloat16_enabled = self.settings.bf16.enabled
        self.float16_enabled = self.settings.fp16.enabled


class ZeroStageEnum(enum.IntEnum):
    """The stages of ZeRO, by DeepSpeed's names for them."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedZeroConfig(ZeroSection):
    """The config's section `zero_optimization`, with DeepSpeed's names of its values.

    It takes the keys of the section as keyword arguments, also by their older names. The keys of stage 3 are attributes
    both with their prefix `stage3_` and without it. As with DeepSpeed, `overlap_comm` is true at stage 3 if the config
    leaves it out.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is not possible.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_older_names(cls, given: Any) -> Any:
        return with_todays_names({_SECTION: given})[_SECTION] if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _choose_overlap(self) -> Self:
        if self.overlap_comm is None:
            object.__setattr__(self, "overlap_comm", self.stage == 3)
        return self

    def __getattr__(self, name: str) -> Any:
        """Return the value of a key of stage 3 by its name without the prefix."""
        key = f"stage3_{name}"
        if key in type(self).model_fields:
            return getattr(self, key)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class OffloadDeviceEnum(enum.StrEnum):
    """The values of the config's keys `offload_param.device` and `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Section:
    """Return the section `bf16` of a config (older name: `bfloat16`), or the defaults if the config has none.

    Raises:
        pydantic.ValidationError: a value is not possible.
    """
    return Bf16Section(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> Fp16Section:
    """Return the section `fp16` of a config, or the defaults if the config has no such section.

    Raises:
        pydantic.ValidationError: a value is not possible.
    """
    return Fp16Section(**(param_dict.get("fp16") or {}))
