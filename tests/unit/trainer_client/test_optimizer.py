"""The store's optimizer takes an AdamW over: its groups, its schedulers, and nothing that it could not honour."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from trainer_client.config import OptimizerSection
from trainer_client.errors import ConfigError
from trainer_client.optimizer import StoreOptimizer, make_optimizer
from trainer_client.parameters import list_parameters


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def taken_over(net: nn.Module, groups: Any, **options: Any) -> tuple[AdamW, StoreOptimizer]:
    original = AdamW(groups, **options)
    return original, StoreOptimizer(original, list_parameters(net))


def test_hyper_parameters_are_those_of_the_parameters_group() -> None:
    net = model()
    groups = [
        {"params": list(net[0].parameters()), "lr": 0.5, "weight_decay": 0.0},
        {"params": list(net[1].parameters())},
    ]
    _, optimizer = taken_over(net, groups, lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.125)

    first, last = optimizer.hyper_parameters(0, 1).adamw, optimizer.hyper_parameters(3, 7).adamw

    assert (first.lr, first.weight_decay, first.update_count) == (0.5, 0.0, 1)
    assert (last.lr, last.weight_decay, last.beta1, last.beta2, last.eps) == (0.25, 0.125, 0.5, 0.75, 1e-3)
    assert last.update_count == 7


@pytest.mark.parametrize("made_for", ["original", "ours"])
def test_a_scheduler_drives_it_without_warnings(made_for: str) -> None:
    net = model()
    original, optimizer = taken_over(net, net.parameters(), lr=1.0)
    scheduler = LambdaLR(original if made_for == "original" else optimizer, lambda step: 0.5**step)

    for _ in range(2):
        with optimizer.stepping_with(lambda: None):
            optimizer.step()
        scheduler.step()

    assert optimizer.hyper_parameters(0, 1).adamw.lr == 0.25


def test_direct_steps_are_refused_with_what_to_call() -> None:
    net = model()
    _, optimizer = taken_over(net, net.parameters())

    with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        optimizer.zero_grad()


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_flags_that_change_the_arithmetic_are_refused(flag: str) -> None:
    net = model()

    with pytest.raises(ConfigError, match=flag):
        taken_over(net, net.parameters(), **{flag: True})


def test_other_classes_are_refused_by_name() -> None:
    net = model()

    with pytest.raises(ConfigError, match="SGD"):
        StoreOptimizer(SGD(net.parameters()), list_parameters(net))


def test_an_optimizer_with_states_is_refused() -> None:
    net = model()
    original = AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    original.step()

    with pytest.raises(ConfigError, match="steps already"):
        StoreOptimizer(original, list_parameters(net))


def test_a_trainable_parameter_in_no_group_is_refused_by_name() -> None:
    net = model()

    with pytest.raises(ConfigError, match=r"1\.weight"):
        taken_over(net, net[0].parameters())
    net[1].requires_grad_(False)
    taken_over(net, net[0].parameters())


def test_a_foreign_parameter_is_refused() -> None:
    net = model()

    with pytest.raises(ConfigError, match="not the model's"):
        taken_over(net, [*net.parameters(), nn.Parameter(torch.ones(1))])


def test_the_config_makes_one_and_a_callable_too() -> None:
    net = model()
    section = OptimizerSection.model_validate({"type": "AdamW", "params": {"lr": 0.5, "betas": [0.8, 0.9]}})
    from_config = make_optimizer(None, section, None, list_parameters(net))
    called = make_optimizer(lambda params: AdamW(params, lr=0.25), section, None, list_parameters(net))

    assert from_config.hyper_parameters(0, 1).adamw.lr == 0.5
    assert from_config.hyper_parameters(0, 1).adamw.beta2 == 0.9
    assert called.hyper_parameters(0, 1).adamw.lr == 0.25


def test_no_optimizer_at_all_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match="AdamW"):
        make_optimizer(None, None, None, list_parameters(model()))


def test_settings_go_round() -> None:
    net = model()
    _, optimizer = taken_over(net, net.parameters(), lr=0.5)
    _, other = taken_over(net, net.parameters(), lr=0.25)

    other.load_settings(optimizer.settings())

    assert other.hyper_parameters(0, 1) == optimizer.hyper_parameters(0, 1)
    with pytest.raises(ConfigError, match="2"):
        other.load_settings([*optimizer.settings(), {}])
