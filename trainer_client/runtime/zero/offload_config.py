"""DeepSpeed's `deepspeed.runtime.zero.offload_config`: the names of states and of the devices they are offloaded to."""

from __future__ import annotations

from enum import StrEnum

from trainer_client.run.state_offload import DeviceState

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]

OffloadStateTypeEnum = DeviceState


class OffloadDeviceEnum(StrEnum):
    """The values of the config's keys `offload_param.device` and `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
