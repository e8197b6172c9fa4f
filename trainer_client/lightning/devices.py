"""The device of a LightningModule's metrics, and the value of its attribute `device`.

The engine moves parameters and buffers. This module must never move a parameter, because the engine owns its memory.
"""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import LightningModule
from torchmetrics import Metric


def follow(module: LightningModule, device: torch.device) -> None:
    """Move the states of a module's metrics to the engine's device, and set `device` of all submodules to it.

    Lightning does both when it moves a module to a device. But it does not move a module that has an engine.
    """
    for part in module.modules():
        if isinstance(part, _DeviceDtypeModuleMixin):
            part._device = device
        if isinstance(part, Metric):
            # If a metric has parameters, the engine has moved them to the device already. So `to` moves only the
            # metric's states.
            part.to(device)
