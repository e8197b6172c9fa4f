"""The getters of DeepSpeed's engine: its config, batch sizes, ranks, ZeRO stage, precision and optimizer.

This module owns nothing. It must never change anything: scripts that were written for DeepSpeed call these methods, and
this base class of all engines returns what the config says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.step.precision import PrecisionPolicy


class EngineGetters(nn.Module):
    """The base class of the engine with DeepSpeed's getters, which read attributes that the engine sets.

    An attribute that the engine does not have is looked up in the model.
    """

    module: nn.Module
    _settings: TrainingConfig
    _collectives: Collectives
    _micro_batches: MicroBatches
    local_rank: int

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, because the engine has none of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    @property
    def config(self) -> dict[str, Any]:
        """The keys that the config gives, with their values as JSON types, as DeepSpeed's engine has it."""
        return self._settings.model_dump(mode="json", exclude_unset=True)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The names of the modules whose gradients are sparse: none, because gradients are dense."""
        return set()

    # The getters below return batch sizes.

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step."""
        return self._micro_batches.sizes.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a micro-batch of one rank."""
        return self._micro_batches.sizes.micro

    def train_batch_size(self) -> int:
        """Return the number of samples in a step of all ranks."""
        return self._micro_batches.sizes.train

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples in a step of all ranks, those in a micro-batch of one rank, and the accumulation steps."""
        sizes = self._micro_batches.sizes
        return sizes.train, sizes.micro, sizes.accumulation

    # The getters below return numbers of ranks.

    @property
    def global_rank(self) -> int:
        """The number of this rank."""
        return self._collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._collectives.world_size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that share a step's samples: all of them."""
        return self._collectives.world_size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share one sample's computation: 1, because there is no model parallelism."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """Return the number of this rank among those that share a step's samples."""
        return self._collectives.rank

    # The getters below return the ZeRO stage, and what is offloaded and gathered.

    def zero_optimization(self) -> bool:
        """Return whether the stage is 1 or higher."""
        return self._settings.zero_optimization.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self._settings.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether each rank keeps only its part of the gradients."""
        return self._settings.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether each rank keeps only its part of the parameters."""
        return self._settings.zero_optimization.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether a program that saves the model, such as Accelerate, has to gather all weights first."""
        return self._settings.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_enable_sanity_checks(self) -> bool:
        """Return whether a change of parameters within `GatheredParameters` is an error if it would be lost."""
        return self._settings.zero_optimization.enable_sanity_checks

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer states are offloaded to host memory."""
        section = self._settings.zero_optimization.offload_optimizer
        return section is not None and section.device == "cpu"

    # The getters below return the settings of precision.

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self._settings.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self._settings.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Return whether the engine runs the forward under `torch.autocast`."""
        return self._settings.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of `torch.autocast`; None if the engine does not use autocast."""
        return PrecisionPolicy.of(self._settings).autocast_dtype

    def managed_gradient_accumulation(self) -> bool:
        """Return whether the engine counts the micro-batches of a step."""
        return self._settings.managed_gradient_accumulation

    def amp_enabled(self) -> bool:
        """Return False, because this library does not have Apex's AMP."""
        return False

    def loss_scale(self) -> float:
        """Return the loss scale of the config; 0 if it is dynamic."""
        return self._settings.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic: it falls at an overflow, and grows when none has come for long."""
        return self._settings.fp16.enabled and self._settings.fp16.loss_scale == 0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the parameters, and the dtype of gradients between micro-batches."""
        policy = PrecisionPolicy.of(self._settings)
        compute = policy.compute_dtype or torch.float32
        return compute, policy.accumulation_dtype or compute

    # The getters below return settings of the optimizer and of the training loop.

    def gradient_clipping(self) -> float:
        """Return the limit of the gradient's norm; 0 if there is no limit."""
        return self._settings.gradient_clipping

    def optimizer_name(self) -> str | None:
        """Return the type of the config's optimizer; None if the config has no optimizer."""
        section = self._settings.optimizer
        return None if section is None else section.type

    def log_level(self) -> str | None:
        """Return the logger's level in the config; None if the config has none."""
        return self._settings.log_level

    def gradient_allreduce_op(self) -> str:
        """Return how the ranks' gradients are combined into a step's gradient: "mean" or "sum"."""
        return self._settings.gradient_allreduce_op

    def steps_per_print(self) -> int | None:
        """Return the number of steps between two lines of the log; None if no lines are logged."""
        return self._settings.steps_per_print
