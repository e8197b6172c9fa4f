"""A schedule goes on from a stored state with the rates that it has at the stored count of steps.

It has its own parameters if the stored schedule is of another class, and its own base rate if the groups of the
optimizer have the settings of this run. Each expectation is the rates of a schedule that was never interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # Otherwise torch would import it at the first optimizer, within a test.
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from trainer_client.errors import ConfigError
from trainer_client.schedules import OneCycle, WarmupDecayLR
from trainer_client.training.run.schedule_state import restore_schedule

MADE, MORE = 7, 6
Make = Callable[[Optimizer], LRScheduler]
OF_TORCH: dict[str, Make] = {
    "StepLR": lambda o: StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 8, 11], gamma=0.25),
    "ConstantLR": lambda o: ConstantLR(o, factor=0.5, total_iters=9),
    "LinearLR": lambda o: LinearLR(o, start_factor=0.125, total_iters=10),
    "ExponentialLR": lambda o: ExponentialLR(o, gamma=0.75),
    "PolynomialLR": lambda o: PolynomialLR(o, total_iters=20, power=2.0),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=20),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=5),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda step: 1.0 / (1 + step)),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=2.0, total_steps=30, cycle_momentum=False),
    "CyclicLR": lambda o: CyclicLR(o, base_lr=0.25, max_lr=2.0, step_size_up=4, cycle_momentum=False),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.25, total_iters=4), ExponentialLR(o, 0.75)], [4]),
    "ChainedScheduler": lambda o: ChainedScheduler([StepLR(o, 2, gamma=0.5), ExponentialLR(o, 0.75)]),
}
# Their rates are not multiples of the optimizer's rate, or have other names in the parameter groups.
WITHOUT_BASE = ("OneCycleLR", "CyclicLR")
OF_DEEPSPEED: dict[str, Make] = {
    "WarmupDecayLR": lambda o: WarmupDecayLR(o, 20, warmup_max_lr=None, warmup_num_steps=4),
    "OneCycle": lambda o: OneCycle(o, 0.125, 0.5, cycle_first_step_size=5),
}
EVERY = OF_TORCH | OF_DEEPSPEED
STORED = ("StepLR", "CosineAnnealingLR", "SequentialLR", "WarmupDecayLR")
OTHERS = [(name, other) for name in OF_TORCH for other in STORED if name != other]


def make_optimizer(rate: float | torch.Tensor) -> Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for _ in range(2)]
    return AdamW(groups, lr=rate, foreach=False)


def go_on(optimizer: Optimizer, scheduler: LRScheduler, count: int) -> list[tuple[float, float]]:
    """Return the rate and the first beta of the second group in the next steps."""
    seen = []
    with warnings.catch_warnings():
        # SequentialLR gives its parts a count, of which torch warns.
        warnings.simplefilter("ignore")
        for _ in range(count):
            group = optimizer.param_groups[1]
            seen.append((float(group["lr"]), float(group["betas"][0])))
            optimizer.step()
            scheduler.step()
    return seen


def uninterrupted(make: Make, rate: float) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """Return the state of a schedule after MADE steps, and what the groups have in the steps that follow."""
    optimizer = make_optimizer(rate)
    scheduler = make(optimizer)
    go_on(optimizer, scheduler, MADE)
    state = scheduler.state_dict()
    # The state of torch's schedules refers to lists that the schedule changes.
    kept = {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
    if "_schedulers" in kept:
        kept["_schedulers"] = [dict(part) for part in kept["_schedulers"]]
    return kept, go_on(optimizer, scheduler, MORE)


def resumed(
    make: Make, rate: float | torch.Tensor, stored: dict[str, Any] | None, name: str | None, *, settings: float | None
) -> tuple[Optimizer, list[tuple[float, float]]]:
    """Return the optimizer of a run that goes on from a state, and what its groups have in the next steps.

    With `settings`, the stored settings of the groups were loaded, of which that is the rate.
    """
    optimizer = make_optimizer(rate)
    scheduler = make(optimizer)
    before = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups if settings is not None else ():
        group["lr"] = settings
    restore_schedule(
        scheduler,
        stored,
        name,
        groups=optimizer.param_groups,
        rates_before=before,
        keeps_settings=settings is not None,
    )
    return optimizer, go_on(optimizer, scheduler, MORE)


@pytest.mark.parametrize(("name", "other"), OTHERS)
@pytest.mark.parametrize("keeps", [True, False])
def test_one_of_another_class_has_its_own_parameters_and_the_stored_count(name: str, other: str, keeps: bool) -> None:
    stored, _ = uninterrupted(EVERY[other], 1.0)
    _, expected = uninterrupted(OF_TORCH[name], 0.5)

    _, seen = resumed(OF_TORCH[name], 0.5, stored, other, settings=0.01 if keeps else None)

    assert [rate for rate, _ in seen] == pytest.approx([rate for rate, _ in expected], rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_one_of_the_same_class_goes_on_with_the_stored_settings_of_the_groups(name: str) -> None:
    stored, expected = uninterrupted(EVERY[name], 0.5)

    _, seen = resumed(EVERY[name], 0.5, stored, name, settings=expected[0][0])

    assert [rate for rate, _ in seen] == [rate for rate, _ in expected]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("rate", [0.5, 0.0625])
def test_one_of_the_same_class_goes_on_where_the_groups_have_the_settings_of_this_run(name: str, rate: float) -> None:
    """The rate of a group stays the same part of its base rate, whatever that is now."""
    stored, former = uninterrupted(EVERY[name], 0.5)
    _, expected = uninterrupted(EVERY[name], rate)

    _, seen = resumed(EVERY[name], rate, stored, name, settings=None)

    if rate == 0.5:
        # The betas of torch's classes are not cycled here.
        assert seen == expected == former
    elif name not in WITHOUT_BASE:
        assert seen == [pytest.approx(each, rel=1e-12) for each in expected]


def test_parameters_of_torchs_schedules_are_the_stored_ones() -> None:
    stored, expected = uninterrupted(OF_TORCH["StepLR"], 0.5)

    for settings in (expected[0][0], None):
        _, seen = resumed(lambda o: StepLR(o, 100, gamma=0.1), 0.5, stored, "StepLR", settings=settings)
        assert seen == expected


def test_a_state_without_a_class_is_told_by_its_entries() -> None:
    """An imported checkpoint of DeepSpeed has the last iteration of DeepSpeed's schedule, and nothing else."""
    _, expected = uninterrupted(OF_TORCH["LambdaLR"], 0.5)
    of_torch, _ = uninterrupted(OF_TORCH["LambdaLR"], 0.5)

    for stored in ({"last_batch_iteration": MADE - 1}, of_torch):
        _, seen = resumed(OF_TORCH["LambdaLR"], 0.5, stored, None, settings=expected[0][0])
        assert seen == expected


@pytest.mark.parametrize("name", EVERY)
def test_one_that_the_stored_run_did_not_have_begins_with_its_own_rate(name: str) -> None:
    optimizer = make_optimizer(0.5)
    expected = go_on(optimizer, EVERY[name](optimizer), MORE)

    _, seen = resumed(EVERY[name], 0.5, None, None, settings=0.01)

    assert [rate for rate, _ in seen] == [rate for rate, _ in expected]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    stored, expected = uninterrupted(OF_TORCH["StepLR"], 0.5)
    rate = torch.tensor(0.5)

    optimizer, seen = resumed(OF_TORCH["StepLR"], rate, stored, "StepLR", settings=None)

    assert seen == expected
    assert optimizer.param_groups[1]["lr"] is rate


def test_one_that_cannot_go_back_says_so() -> None:
    stored, _ = uninterrupted(OF_TORCH["StepLR"], 0.5)
    optimizer = make_optimizer(0.5)
    scheduler = OF_TORCH["SequentialLR"](optimizer)
    go_on(optimizer, scheduler, MADE + 1)

    with pytest.raises(ConfigError, match=r"SequentialLR has made 8 steps and cannot go back to step 7"):
        restore_schedule(
            scheduler, stored, "StepLR", groups=optimizer.param_groups, rates_before=[0.5, 0.5], keeps_settings=False
        )
