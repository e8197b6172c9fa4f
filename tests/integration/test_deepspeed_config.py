"""A config as Hugging Face's tools ship it trains unchanged, and the log says what in it differs here."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainer_client
from tests.integration.support.daemon import Daemon

SHIPPED = """{
    // written for DeepSpeed
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": true}
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu"},
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 1e5,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false,
}"""


def lines(caplog: pytest.LogCaptureFixture, beginning: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(beginning)]


def test_a_shipped_config_trains_and_the_log_has_each_difference_once(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMSERVER_ADDRESS", daemon.address)
    path = tmp_path / "ds_config.json"
    path.write_text(SHIPPED)
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(torch.bfloat16)
    with caplog.at_level(logging.INFO), trainer_client.initialize(model=model, config=path)[0] as engine:
        engine.backward(engine(torch.ones(1, 4, device=engine.device)).square().mean())
        engine.step()
        assert engine.global_steps == 1
        assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() == 1
        assert next(model.parameters()).dtype == torch.bfloat16

    (automatic,) = lines(caplog, '"auto" in the config became: ')
    expected: dict[str, Any] = {
        "fp16.enabled": False,
        "bf16.enabled": True,
        "optimizer.params.lr": 0.001,
        "optimizer.params.betas": [0.9, 0.999],
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.01,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert automatic.partition(": ")[2] == ", ".join(f"{key} = {json.dumps(value)}" for key, value in expected.items())
    (without_effect,) = lines(caplog, "keys of the config without effect here: ")
    for key in ("overlap_comm", "allgather_bucket_size", "offload_param (at stage 2 "):
        assert f"zero_optimization.{key}" in without_effect
    for key in ("reduce_bucket_size", "contiguous_gradients", "wall_clock_breakdown", "pin_memory"):
        assert key not in without_effect


def test_a_model_that_is_not_trained_warns_of_nothing_that_a_config_for_training_has(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMSERVER_ADDRESS", daemon.address)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 16},
    }
    with caplog.at_level(logging.INFO), trainer_client.initialize(model=nn.Linear(4, 1), config=config)[0]:
        (without_effect,) = lines(caplog, "keys of the config without effect here: ")

    assert "zero_optimization.overlap_comm" in without_effect
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
