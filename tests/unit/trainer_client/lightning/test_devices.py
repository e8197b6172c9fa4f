"""The metrics of a LightningModule follow it to the engine's device, which is "meta" here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="lightning is not installed: `make peers` installs it")

from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric, MetricCollection

from trainer_client.lightning.devices import follow


def test_metrics_and_the_name_of_the_device_follow_and_parameters_stay() -> None:
    module = LightningModule()
    module.part = LightningModule()
    module.part.metric = MeanMetric()
    module.metrics = MetricCollection({"mean": MeanMetric()})
    module.layer = nn.Linear(2, 2)
    device = torch.device("meta")

    follow(module, device)

    assert module.device == module.part.device == device
    for metric in (module.part.metric, module.metrics["mean"]):
        metric.reset()
        assert metric.device == metric.mean_value.device == metric.weight.device == device
    assert module.layer.weight.device == torch.device("cpu")
