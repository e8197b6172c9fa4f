"""The delay of ranks by the store is that of the equation, with its limits."""

from __future__ import annotations

import pytest

from trainer_client.plan.machine import Overhead
from trainer_client.plan.step_time import delay_by_store


@pytest.mark.parametrize(
    ("own", "optimizer", "other", "delay"),
    [
        # One thread alone delays the ranks by all that it computes.
        (0.5, 0.2, 0.0, 0.2),
        (0.5, 0.0, 0.2, 0.2),
        # step = (0.9 + sqrt(0.81 - 0.32)) / 2 = 0.8, and 2 * 0.2 * 0.2 / 0.8 = 0.1 is saved.
        (0.5, 0.2, 0.2, 0.3),
        # Both threads work all the time, and there is nothing to delay.
        (0.0, 1.0, 1.0, 1.0),
        (0.0, 1.0, 3.0, 3.0),
    ],
)
def test_two_threads_of_the_store_delay_less_than_their_sum(
    own: float, optimizer: float, other: float, delay: float
) -> None:
    assert delay_by_store(own, optimizer, other) == pytest.approx(delay)


def test_the_overhead_of_a_step_grows_with_its_units() -> None:
    whole = Overhead(per_unit=0.25, per_step=1.0, store_per_unit=0.5, store_per_step=2.0).of_step(4)

    assert (whole.per_step, whole.store_per_step) == (2.0, 4.0)
