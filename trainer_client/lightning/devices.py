"""The device of what a LightningModule has besides its parameters and buffers, which the engine places.

This module must never move a parameter, because the engine owns their memory.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from torchmetrics import Metric


def follow(module: LightningModule, device: torch.device) -> None:
    """Move the states of a module's metrics to the engine's device, and have `device` of it and its parts name that.

    Lightning does both when it moves a module, and a module over an engine is not moved.
    """
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device
        if isinstance(part, Metric):
            # The parameters of a metric, if it has any, are on the device already, so this leaves them where they are.
            part.to(device)
