"""`OnDevice` sets the device and the dtype of what a constructor makes, and puts both back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_client import OnDevice


def test_modules_are_made_on_the_device_in_the_dtype() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(2, 2)
        named = torch.zeros(2, dtype=torch.float32, device="cpu")

    assert (model.weight.device.type, model.weight.dtype) == ("meta", torch.bfloat16)
    assert (named.device.type, named.dtype) == ("cpu", torch.float32)
    assert (nn.Linear(2, 2).weight.device.type, nn.Linear(2, 2).weight.dtype) == ("cpu", torch.float32)


def test_it_can_be_disabled_and_ends_after_an_error() -> None:
    with OnDevice(dtype=torch.half, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(ZeroDivisionError), OnDevice(dtype=torch.half, device="meta"):
        raise ZeroDivisionError
    assert nn.Linear(2, 2).weight.dtype == torch.float32
