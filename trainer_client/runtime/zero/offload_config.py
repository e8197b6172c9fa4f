"""DeepSpeed's `deepspeed.runtime.zero.offload_config`: the names of the devices that states are offloaded to."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OffloadDeviceEnum"]


class OffloadDeviceEnum(StrEnum):
    """The values of the config's keys `offload_param.device` and `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
