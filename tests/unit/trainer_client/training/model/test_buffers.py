"""Buffers get other values and dtypes. Those that are no floating-point numbers keep their dtype."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from trainer_client.training.model.buffers import cast_buffers, give_buffers


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Identity())
    model[0].register_buffer("angles", torch.tensor([1.0, 1.0 + 2**-20]))
    model[2].register_buffer("again", model[0].get_buffer("angles"))
    model[2].register_buffer("phases", torch.ones(2, dtype=torch.complex64), persistent=False)
    model[2].register_buffer("nothing", None)
    return model


def test_floating_point_buffers_get_the_dtype_and_shared_ones_stay_shared() -> None:
    model = build()
    cast_buffers(model, torch.bfloat16)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers(remove_duplicate=False)}
    assert dtypes == {
        "0.angles": torch.bfloat16,
        "1.running_mean": torch.bfloat16,
        "1.running_var": torch.bfloat16,
        "1.num_batches_tracked": torch.int64,
        "2.again": torch.bfloat16,
        "2.phases": torch.complex64,
    }
    assert model[2].again is model[0].angles
    assert torch.equal(model[0].angles, torch.ones(2, dtype=torch.bfloat16))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert "2.phases" not in model.state_dict()


def test_buffers_keep_their_dtypes_unless_the_config_says_one() -> None:
    model = build()
    before = dict(model.named_buffers())
    cast_buffers(model, None)
    after = dict(model.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())


def test_buffers_get_values_whatever_lies_in_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    """One element of an expanded buffer stands for several, so that torch writes into none of them."""
    model = build()
    model[1].register_buffer("same", torch.ones(1).expand(3))
    model[2].register_buffer("shared", model[1].same)
    model[2].register_buffer("turned", torch.zeros(2, 3).t())
    same, values = model[1].same, torch.arange(6.0).view(3, 2)

    give_buffers(model, {"1.same": torch.ones(3), "2.turned": values})
    assert model[1].same is same and torch.equal(model[2].turned, values)

    with caplog.at_level(logging.WARNING):
        give_buffers(model, {"1.same": values[:, 1], "2.shared": values[:, 1], "0.angles": values, "lost": values})
    assert torch.equal(model[1].same, values[:, 1]) and model[2].shared is model[1].same
    assert [record.args for record in caplog.records] == [("0.angles", [3, 2]), ("lost", [3, 2])]
