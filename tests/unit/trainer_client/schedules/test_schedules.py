"""DeepSpeed's schedules give every step of the optimizer the rates and betas that DeepSpeed gives it.

deepspeed_values.json has what `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.6 gave an optimizer in a process of
its own: the values that the groups had before each step. DeepSpeed's engine makes the schedule before the first step,
and calls its `step()` after each step that is made. So value k is what the k-th step of the optimizer has.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from trainer_client import schedules
from trainer_client.config.loading import load_config
from trainer_client.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from trainer_client.schedules.registry import make_schedule
from trainer_client.schedules.schedule import Schedule

VALUES = Path(__file__).with_name("deepspeed_values.json")
CASES: dict[str, dict[str, Any]] = json.loads(VALUES.read_text(encoding="utf-8"))["cases"]
# The rates of the two groups of the optimizer for which DeepSpeed's values were taken.
RATES = [0.02, 0.04]
RATE = RATES[0]

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make_optimizer(groups: int = 1) -> Optimizer:
    return AdamW([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in RATES[:groups]])


def make(case: dict[str, Any]) -> tuple[Optimizer, Schedule]:
    """Return the optimizer and the schedule of a case."""
    optimizer = make_optimizer(len(case["rates"][0]))
    return optimizer, getattr(schedules, case["schedule"])(optimizer, **case["params"])


def steps_of(optimizer: Optimizer, schedule: Schedule, count: int) -> list[tuple[list[float], list[float]]]:
    """Return the rates of all groups, and the betas of the first, in the next steps of the optimizer."""
    seen = []
    for _ in range(count):
        seen.append(([group["lr"] for group in optimizer.param_groups], list(optimizer.param_groups[0]["betas"])))
        optimizer.step()
        schedule.step()
    return seen


@each_case
def test_each_step_of_the_optimizer_has_the_values_that_deepspeed_gives_it(case: dict[str, Any]) -> None:
    optimizer, schedule = make(case)

    seen = steps_of(optimizer, schedule, len(case["rates"]))

    assert [rates for rates, _ in seen] == case["rates"]
    assert [betas for _, betas in seen] == case["betas"]


def values_of(schedule: Callable[[Optimizer], Schedule], count: int) -> list[tuple[float, float]]:
    """Return the rate and the first beta in the first steps of an optimizer with one group."""
    optimizer = make_optimizer()
    made = schedule(optimizer)
    return [(rates[0], betas[0]) for rates, betas in steps_of(optimizer, made, count)]


def warmup(step: int, steps: int, kind: str) -> float:
    """Return which part of a warm-up is over at a step of the schedule, from 0 on."""
    return min(1.0, math.log(step + 1) / math.log(steps) if kind == "log" else step / steps)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [2, 3, 10, 37])
def test_the_warm_ups_are_those_that_the_documentation_describes(kind: str, steps: int) -> None:
    """The formulas are written down from the descriptions of the schedules. Before step 0, all are at their start."""
    low, high, total, count = 1e-4, 3e-3, 50, 60

    def rates(schedule: Callable[[Optimizer], Schedule]) -> list[float]:
        return [rate for rate, _ in values_of(schedule, count + 1)]

    part = [warmup(step, steps, kind) for step in range(count)]
    warm: dict[str, Any] = {"warmup_num_steps": steps, "warmup_type": kind}
    limits: dict[str, Any] = {"warmup_min_lr": low, "warmup_max_lr": high}
    constant = [low + (high - low) * part[step] for step in range(count)]
    assert rates(lambda o: WarmupLR(o, **limits, **warm)) == pytest.approx([low, *constant], rel=1e-12)

    left = [1.0 if step < steps else max(0.0, (total - step) / (total - steps)) for step in range(count)]
    decayed = [low + (high - low) * part[step] * left[step] for step in range(count)]
    assert rates(lambda o: WarmupDecayLR(o, total, **limits, **warm)) == pytest.approx([low, *decayed], rel=1e-12)

    first, last = 0.25, 0.125
    cosine = [
        RATE * (first + (1 - first) * part[step])
        if step < steps
        else RATE * (last + (1 - last) * (1 + math.cos(math.pi * min(1, (step - steps + 1) / (total - steps)))) / 2)
        for step in range(count)
    ]
    seen = rates(lambda o: WarmupCosineLR(o, total, first, cos_min_ratio=last, **warm))
    assert seen == pytest.approx([0.0, *cosine], rel=1e-12)


@pytest.mark.parametrize(("first", "second"), [(5, 5), (3, 8), (11, 2)])
def test_the_cycle_is_that_which_the_documentation_describes(first: int, second: int) -> None:
    low, high, slow, fast, length, count = 1e-4, 3e-3, 0.7, 0.95, first + second, 40
    params = {"cycle_first_step_size": first, "cycle_second_step_size": second, "decay_step_size": 4}
    decay = {"decay_lr_rate": 0.5, "decay_mom_rate": 0.01, "cycle_min_mom": slow, "cycle_max_mom": fast}
    arguments: dict[str, Any] = params | decay

    seen = values_of(lambda o: OneCycle(o, low, high, **arguments), count)

    heights = [step / first if step <= first else max(0.0, (length - step) / second) for step in range(count)]
    intervals = [max(0, step - length) / 4 for step in range(count)]
    rates = [(low + (high - low) * height) / (1 + 0.5 * n) for height, n in zip(heights, intervals, strict=True)]
    betas = [(fast - (fast - slow) * height) * (1 + 0.01 * n) for height, n in zip(heights, intervals, strict=True)]
    assert [rate for rate, _ in seen] == pytest.approx(rates, rel=1e-12)
    # The first step has the minimum, which the cycle itself reaches at its peak.
    assert [beta for _, beta in seen] == pytest.approx([slow, *betas[1:]], rel=1e-12)


@pytest.mark.parametrize("staircase", [True, False])
def test_the_range_test_is_that_which_the_documentation_describes(staircase: bool) -> None:
    seen = values_of(lambda o: LRRangeTest(o, 1e-3, 7, 0.3, staircase), 30)

    intervals = [step // 7 if staircase else step / 7 for step in range(30)]
    assert [rate for rate, _ in seen] == pytest.approx([1e-3 + 1e-3 * 0.3 * n for n in intervals], rel=1e-12)


@each_case
def test_a_state_goes_on_where_it_was(case: dict[str, Any]) -> None:
    count = len(case["rates"])
    optimizer, schedule = make(case)
    expected = steps_of(optimizer, schedule, count)
    optimizer, schedule = make(case)
    steps_of(optimizer, schedule, 3)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    resumed_optimizer, resumed = make(case)
    for group, values in zip(resumed_optimizer.param_groups, settings, strict=True):
        group.update(values)
    resumed.load_state_dict(schedule.state_dict())

    assert resumed.last_batch_iteration == 2
    assert resumed.get_last_lr() == schedule.get_last_lr() == [values["lr"] for values in settings]
    assert steps_of(resumed_optimizer, resumed, count - 3) == expected[3:]


def test_a_state_of_deepspeed_can_be_loaded() -> None:
    optimizer = make_optimizer()
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")

    schedule.load_state_dict({"last_batch_iteration": 2})
    assert schedule.get_last_lr() == [RATE * 2 / 4]
    optimizer.step()
    schedule.step()

    assert optimizer.param_groups[0]["lr"] == RATE * 3 / 4


def test_schedules_of_torch_and_of_deepspeed_find_the_iteration_in_each_others_states() -> None:
    optimizer, other = make_optimizer(), make_optimizer()
    ours = LRRangeTest(optimizer, 1.0, 1)
    of_torch = torch.optim.lr_scheduler.ExponentialLR(other, gamma=0.5)
    steps_of(optimizer, ours, 3)
    state_of_torch = of_torch.state_dict()

    of_torch.load_state_dict(ours.state_dict())
    assert of_torch.last_epoch == 3
    ours.load_state_dict(state_of_torch)
    assert ours.last_batch_iteration == -1


def test_the_parameters_of_the_new_run_count_after_a_resume() -> None:
    first = WarmupDecayLR(make_optimizer(), total_num_steps=5, warmup_num_steps=2)
    optimizer = make_optimizer()
    longer = WarmupDecayLR(optimizer, total_num_steps=12, warmup_num_steps=2)

    longer.load_state_dict({**first.state_dict(), "last_batch_iteration": 6})
    optimizer.step()
    longer.step()

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * 5 / 10)


def test_a_schedule_that_is_made_to_go_on_leaves_the_groups_as_they_are_until_its_next_step() -> None:
    optimizer = make_optimizer()
    schedule = OneCycle(optimizer, 0.001, 0.005, cycle_first_step_size=4, last_batch_iteration=0)

    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (RATE, (0.9, 0.999))
    assert schedule.get_last_lr() == [RATE]
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.003)
    assert optimizer.param_groups[0]["betas"] == pytest.approx((0.85, 0.99))


def test_a_step_can_be_given_by_its_iteration() -> None:
    optimizer = make_optimizer()
    schedule = WarmupLR(optimizer, warmup_num_steps=10, warmup_type="linear")
    optimizer.step()

    schedule.step(5)

    assert schedule.last_batch_iteration == 5
    assert schedule.get_lr() == [RATE * 5 / 10]


def test_the_values_that_deepspeeds_users_read_are_there() -> None:
    optimizer = make_optimizer()
    cycle = OneCycle(optimizer, 0.001, 0.01, cycle_first_step_size=3)
    cosine = WarmupCosineLR(make_optimizer(), 10, warmup_num_steps=4)

    assert cycle.get_lr() == [0.001]
    assert cycle.get_mom() == [(0.9, 0.99)], "the cycle begins there, although the first step has the minimum"
    assert cycle.step_ratio == 0.5
    assert cosine.get_lr_ratio() == 0.0
    assert (cosine.warmup_num_steps, cosine.warmup_type) == (4, "log")
    warmup = WarmupLR(make_optimizer(2), warmup_num_steps=1, warmup_type="linear")
    assert (warmup.max_lrs, warmup.warmup_num_steps, warmup.warmup_type) == (RATES, 2, "linear")


def test_a_warm_up_without_a_maximum_ends_at_the_own_rate_of_each_group() -> None:
    optimizer = make_optimizer(2)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)

    seen = steps_of(optimizer, schedule, 5)

    assert seen[-1][0] == RATES


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, capturable=False, foreach=False)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    for _ in range(3):
        optimizer.step()
        schedule.step()

    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_an_optimizer_without_betas_keeps_its_momentum(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(optimizer, 0.001, 0.01)

    assert "SGD has no betas" in caplog.text
    optimizer.step()
    schedule.step()
    assert (schedule.get_mom(), optimizer.param_groups[0]["momentum"]) == (None, 0.5)


def test_a_run_that_ends_within_its_warm_up_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        WarmupCosineLR(make_optimizer(), total_num_steps=3, warmup_num_steps=7)

    assert "total_num_steps 3 is less than warmup_num_steps 7" in caplog.text


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_warm_up_of_less_than_two_steps_is_one_of_two(name: str, count: int) -> None:
    """Before 0.19.6, which refuses 0, DeepSpeed had max(2, warmup_num_steps)."""

    def seen(warmup_num_steps: int) -> list[tuple[list[float], list[float]]]:
        arguments = {} if name == "WarmupLR" else {"total_num_steps": 5}
        params = {"type": name, "params": {**arguments, "warmup_num_steps": warmup_num_steps}}
        section = load_config({"train_batch_size": 1, "scheduler": params}, {}).scheduler
        assert section is not None
        optimizer = make_optimizer()
        schedule = make_schedule(section, optimizer)
        assert isinstance(schedule, Schedule)
        return steps_of(optimizer, schedule, 4)

    assert seen(count) == seen(2)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps = -1"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "warmup_num_steps = 1.5"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_type": "cubic"}, "warmup_type = 'cubic'.*'log' or 'linear'"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "warmup_max_lr has 2 values.*1 parameter groups"),
        ("LRRangeTest", {"lr_range_test_step_size": -1}, "lr_range_test_step_size = -1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size = 0"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_second_step_size": -1},
            "cycle_second_step_size = -1",
        ),
    ],
)
def test_arguments_out_of_range_are_refused_before_a_group_is_changed(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    optimizer = make_optimizer()

    with pytest.raises(ValueError, match=words):
        getattr(schedules, name)(optimizer, **arguments)

    assert optimizer.param_groups[0]["lr"] == RATE
