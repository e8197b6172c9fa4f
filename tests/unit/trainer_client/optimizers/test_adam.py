"""DeepSpeed's Adam without the correction of bias is computed by torch's kernel, as its formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paramserver.contract.optimizers.registry import apply, state_kinds
from trainer_client.config.loading import load_config
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.store_optimizer import make_optimizer

LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.9, 0.999, 1e-3, 0.5


def expected(weight: torch.Tensor, gradients: list[torch.Tensor], *, corrects: bool) -> torch.Tensor:
    """Return the weight after updates by the formula of FusedAdam, in double precision."""
    weight, first, second = weight.double(), torch.zeros(5).double(), torch.zeros(5).double()
    for count, gradient in enumerate(gradients, start=1):
        first = BETA1 * first + (1 - BETA1) * gradient.double()
        second = BETA2 * second + (1 - BETA2) * gradient.double() ** 2
        correction1, correction2 = (1 - BETA1**count, 1 - BETA2**count) if corrects else (1.0, 1.0)
        step = (first / correction1) / ((second / correction2).sqrt() + EPS)
        weight = weight - LR * (step + DECAY * weight)
    return weight


@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam"])
def test_bias_is_corrected_as_the_config_says(kind: str, corrects: bool) -> None:
    params: dict[str, Any] = {"lr": LR, "betas": [BETA1, BETA2], "eps": EPS, "weight_decay": DECAY}
    section = {"type": kind, "params": params | {"bias_correction": corrects}}
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(None, load_config({"optimizer": section}, {}).optimizer, None, list_parameters(model))
    torch.manual_seed(0)
    weight, gradients = torch.randn(5), [torch.randn(5) for _ in range(3)]
    states = {state: [torch.zeros(5)] for state in state_kinds(optimizer.row(0, 1))}
    updated = weight.clone()
    for count, gradient in enumerate(gradients, start=1):
        apply(optimizer.row(0, count), [updated], [gradient.clone()], states)

    torch.testing.assert_close(updated.double(), expected(weight, gradients, corrects=corrects), rtol=1e-5, atol=1e-6)


def test_a_group_that_is_added_later_is_treated_alike() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    section = {"type": "Adam", "params": {"bias_correction": False}}
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], "bias_correction": True}]
    optimizer = make_optimizer(None, load_config({"optimizer": section}, {}).optimizer, groups, list_parameters(model))
    optimizer.add_param_group({"params": [model[1].weight]})

    counts = [optimizer.row(number, 3).adamw.update_count for number in range(3)]
    assert counts[1] == 3
    assert counts[0] == counts[2] == 2**52


def test_torch_adam_counts_in_the_params_only() -> None:
    """DeepSpeed reads the key there, so a config that has it beside them gets the defaults of DeepSpeed's kernel."""
    sections: list[dict[str, Any]] = [{}, {"torch_adam": True}, {"params": {"torch_adam": True}}]
    decays = []
    for section in sections:
        model = nn.Linear(1, 1)
        config = load_config({"optimizer": {"type": "AdamW", "params": {}, **section}}, {})
        optimizer = make_optimizer(None, config.optimizer, None, list_parameters(model))
        decays.append(optimizer.param_groups[0]["weight_decay"])
    assert decays == [0.0, 0.0, 0.01]
