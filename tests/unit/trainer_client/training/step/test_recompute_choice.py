"""When each second boundary is computed again: if steps waited for boundaries, and take less time then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.recompute_choice import RecomputeChoice, StepWaits


def choices(mode: Any, steps: list[StepWaits]) -> list[bool]:
    """Return for each step, and for the one that follows, whether boundaries are computed again in it."""
    choice = RecomputeChoice(mode, Collectives(torch.device("cpu")))
    found = [choice.is_on]
    for step in steps:
        choice.end_step(step)
        found.append(choice.is_on)
    return found


def waits(seconds: float, waited: float = 0.0, *, again: int = 1024, is_refused: bool = False) -> StepWaits:
    return StepWaits(seconds=seconds, waited_seconds=waited, again_bytes=again, is_refused=is_refused)


@pytest.mark.parametrize("mode", [True, False])
def test_what_the_user_has_chosen_stays(mode: bool) -> None:
    assert choices(mode, [waits(1.0, 0.9)] * 20) == [mode] * 21


def test_steps_that_wait_little_change_nothing() -> None:
    # The first two steps are left out.
    assert choices("auto", [waits(1.0, 0.9)] * 2 + [waits(1.0, 0.05)] * 20) == [False] * 23


def test_it_stays_if_steps_take_less_time() -> None:
    assert choices("auto", [waits(1.0, 0.06)] * 6 + [waits(2.0)] * 2 + [waits(0.9)] * 20) == [False] * 6 + [True] * 23


def test_it_ends_if_steps_take_no_less_time() -> None:
    assert choices("auto", [waits(1.0, 0.06)] * 6 + [waits(0.99)] * 20) == [False] * 6 + [True] * 6 + [False] * 15


def test_it_ends_if_the_model_has_no_boundary_that_can_be_computed_again() -> None:
    steps = [waits(1.0, 0.06, is_refused=True)] * 6 + [waits(0.5, again=0)] * 20
    assert choices("auto", steps) == [False] * 6 + [True] * 6 + [False] * 15


def test_it_stays_if_the_store_has_no_room() -> None:
    steps = [waits(1.0)] * 3 + [waits(1.0, is_refused=True)] + [waits(1.0)] * 2 + [waits(1.3)] * 20
    assert choices("auto", steps) == [False] * 6 + [True] * 21
