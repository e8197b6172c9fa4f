"""Lion in plain PyTorch does what its paper says, and refuses what torch's own optimizers would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_client import Lion


def test_it_follows_algorithm_2_of_the_paper() -> None:
    torch.manual_seed(0)
    parameter, frozen = nn.Parameter(torch.randn(5, dtype=torch.float64)), nn.Parameter(torch.ones(2))
    optimizer = Lion([{"params": [parameter, frozen]}], lr=0.1, betas=(0.8, 0.5), weight_decay=0.5)
    weight, moment = parameter.detach().clone(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        gradient = torch.randn(5, dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        direction = torch.sign(0.8 * moment + 0.2 * gradient)
        weight = weight - 0.1 * (direction + 0.5 * weight)
        moment = 0.5 * moment + 0.5 * gradient

    torch.testing.assert_close(parameter.detach(), weight)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], moment)
    assert frozen.tolist() == [1.0, 1.0]


def test_a_closure_is_evaluated_with_gradients() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = Lion([parameter], lr=0.5)

    def closure() -> float:
        loss = (parameter**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert parameter.item() == 1.5


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_hyper_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Lion"):
        Lion([nn.Parameter(torch.ones(1))], **wrong)  # type: ignore[arg-type]
