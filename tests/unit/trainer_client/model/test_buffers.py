"""A config may give the model's buffers a dtype; buffers that are no floating-point numbers stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from trainer_client.model.buffers import cast_buffers


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
