"""DeepSpeed's activation checkpoints are torch's, and their settings are accepted or refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainer_client.deepspeed import checkpointing
from trainer_client.errors import ConfigError


def test_a_checkpoint_computes_again_in_backward() -> None:
    layer = nn.Linear(3, 3)
    calls = []

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x) * scale

    x, scale = torch.rand(2, 3), torch.rand(3, requires_grad=True)
    checkpointing.checkpoint(forward, x, scale=scale).sum().backward()

    expected = torch.autograd.grad(forward(x, scale).sum(), (scale, layer.weight))
    assert len(calls) == 3
    for parameter, gradient in zip((scale, layer.weight), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_settings_without_effect_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 1)
    checkpointing.configure(mpu, partition_activations=True, contiguous_checkpointing=False, num_checkpoints=4)
    checkpointing.reset()

    assert checkpointing.is_configured()
    assert [r.getMessage() for r in caplog.records] == [
        "checkpointing.configure(partition_activations=True) has no effect: torch's checkpoints have no such setting"
    ]


def test_activations_in_host_memory_are_refused_with_the_key_of_the_config() -> None:
    with pytest.raises(ConfigError, match='"cpu_checkpointing": true'):
        checkpointing.configure(None, checkpoint_in_cpu=True)
