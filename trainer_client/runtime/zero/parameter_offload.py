"""DeepSpeed's `deepspeed.runtime.zero.parameter_offload`: the class of `engine.optimizer.parameter_offload`."""

from __future__ import annotations

from trainer_client.model.parameter_offload import ParameterOffload

__all__ = ["DeepSpeedZeRoOffload"]

DeepSpeedZeRoOffload = ParameterOffload
