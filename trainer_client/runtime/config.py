"""DeepSpeed's `DeepSpeedConfig`: a checked config with its batch sizes, for scripts that read one by themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_client import comm
from trainer_client.config.batch_sizes import resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.data_parallel import check_mpu
from trainer_client.errors import ConfigError
from trainer_client.not_built import refuse

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A checked config with the values that scripts ask for. `initialize` takes the config itself, not this object.

    Attributes:
        settings: the whole config, as docs/config.md describes it.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: the three batch sizes, those
            that the config leaves out too.
        gradient_clipping: the limit of the gradient's norm; 0: none.
        gradient_allreduce_op: "mean" or "sum", what a step's gradient is of those of the ranks.
        zero_optimization_stage: the stage, 0 to 3.
        zero_enabled: whether the stage is above 0.
        bfloat16_enabled, float16_enabled: whether the model computes in that dtype.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: accepted if it splits nothing but the data.
        mesh_device: refused.

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
