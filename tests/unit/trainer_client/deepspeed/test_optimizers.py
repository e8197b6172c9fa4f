"""DeepSpeed's optimizers compute what their classes in torch compute, and the store runs them as those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer_client import Lion
from trainer_client.deepspeed.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
)
from trainer_client.errors import ConfigError, NotBuiltError
from trainer_client.ops.lamb import FusedLamb
from trainer_client.optimizers.registry import find_record

CASES: list[Any] = [
    (FusedAdam, {"lr": 0.1, "weight_decay": 0.2}, torch.optim.AdamW),
    (FusedAdam, {"lr": 0.1, "weight_decay": 0.2, "adam_w_mode": False, "set_grad_none": False}, torch.optim.Adam),
    (DeepSpeedCPUAdam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.2}, torch.optim.AdamW),
    (DeepSpeedCPUAdam, {"lr": 0.1, "weight_decay": 0.2, "adamw_mode": False}, torch.optim.Adam),
    (FusedLion, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.2}, Lion),
    (DeepSpeedCPULion, {"lr": 0.1, "betas": (0.9, 0.99)}, Lion),
    (DeepSpeedCPUAdagrad, {"lr": 0.1, "eps": 1e-5, "weight_decay": 0.2}, torch.optim.Adagrad),
]


def trained(cls: Any, arguments: dict[str, Any]) -> torch.Tensor:
    parameter = nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = cls([parameter], **arguments)
    for step in range(3):
        parameter.grad = torch.linspace(0, step + 1, 7)
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize(("ours", "arguments", "torchs"), CASES)
def test_the_update_is_that_of_torch(ours: Any, arguments: dict[str, Any], torchs: Any) -> None:
    shared = {k: v for k, v in arguments.items() if k not in ("adam_w_mode", "adamw_mode", "set_grad_none")}

    assert torch.equal(trained(ours, arguments), trained(torchs, shared))


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        (FusedAdam, "Adam"),
        (DeepSpeedCPUAdam, "Adam"),
        (FusedLion, "Lion"),
        (DeepSpeedCPULion, "Lion"),
        (DeepSpeedCPUAdagrad, "Adagrad"),
    ],
)
def test_the_store_runs_them_and_not_their_subclasses(ours: Any, name: str) -> None:
    class Mine(ours):  # type: ignore[misc]
        pass

    parameter = nn.Parameter(torch.zeros(2))
    assert find_record(ours([parameter])).name == name
    with pytest.raises(ConfigError, match="Mine is none of the optimizers"):
        find_record(Mine([parameter]))


@pytest.mark.parametrize(
    ("ours", "arguments", "remedy"),
    [
        (FusedAdam, {"bias_correction": False}, r"optimizer\.params\.bias_correction is honoured"),
        (FusedAdam, {"amsgrad": True}, "leave it out"),
        (DeepSpeedCPUAdam, {"bias_correction": False}, r"optimizer\.params\.bias_correction is honoured"),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}, "leave it out"),
    ],
)
def test_what_would_change_the_update_is_refused(ours: Any, arguments: dict[str, Any], remedy: str) -> None:
    (name,) = arguments
    with pytest.raises(ConfigError, match=rf"{ours.__name__}\({name}=.*{remedy}"):
        ours([nn.Parameter(torch.zeros(2))], **arguments)


@pytest.mark.parametrize("ours", [DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad])
def test_states_in_bf16_are_in_fp32_here(ours: Any, caplog: pytest.LogCaptureFixture) -> None:
    ours([nn.Parameter(torch.zeros(2))], fp32_optimizer_states=False)

    assert f"{ours.__name__}(fp32_optimizer_states=False) has no effect" in caplog.text


def test_what_is_not_elementwise_is_refused() -> None:
    with pytest.raises(NotBuiltError, match="FusedLamb"):
        FusedLamb([nn.Parameter(torch.zeros(2))])
