"""DeepSpeed's `deepspeed.runtime.zero.offload_states`: where a kind of state is, after `engine.offload_states()`."""

from __future__ import annotations

import torch

from trainer_client.engine import Engine
from trainer_client.run.state_offload import DeviceState

__all__ = ["get_state_devices"]


def get_state_devices(model: Engine, state: DeviceState) -> set[torch.device]:
    """Return the devices of a kind of state of an engine on this rank; see `Engine.state_devices`."""
    return model.state_devices(state)
