"""The page says what binds a step: the resource that needs nearly all of its time, waiting, or nothing in the store."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from paramserver.page.roofline import MEASURED_STEPS, describe_step, steps_per_minute
from paramserver.page.steps import TIMED, Step
from storage.base.tracing import Activity

MB = 1_000_000


def step(
    number: int = 1,
    committed_at: float = 0.0,
    seconds: float | None = 2.0,
    *,
    read: int = 0,
    others: int = 0,
    covered: Mapping[Activity, float] | None = None,
) -> Step:
    return Step(
        number=number,
        committed_at=committed_at,
        seconds=seconds,
        read_bytes=read,
        written_bytes=0,
        all_read_bytes=read + others,
        all_written_bytes=0,
        covered_seconds=dict.fromkeys(TIMED, 0.0) | dict(covered or {}),
    )


def test_the_rate_is_that_of_the_kept_steps_and_falls_when_none_come() -> None:
    steps = [step(number, 2.0 * number) for number in range(11)]

    assert steps_per_minute(steps[:1], 0.0) is None
    assert steps_per_minute(steps, 20.0) == pytest.approx(30.0)
    assert steps_per_minute(steps, 200.0) == pytest.approx(3.0)
    # The last 300 s began at 10 s, and have the steps 6 to 10.
    assert steps_per_minute(steps, 310.0) == pytest.approx(60 * 5 / 300)
    assert steps_per_minute(steps, 1000.0) == 0.0


def test_means_are_taken_of_the_last_steps_whose_time_is_known() -> None:
    assert describe_step([], 1e9) is None
    assert describe_step([step(seconds=None)], 1e9) is None
    old = [step(seconds=100.0, read=500 * MB)] * 5
    new = [step(seconds=1.0, read=100 * MB), step(seconds=3.0, read=300 * MB)] * (MEASURED_STEPS // 2)
    found = describe_step([*old, *new, step(seconds=None)], 400e6)

    assert found is not None
    assert (found["steps"], found["seconds"], found["median_seconds"]) == (MEASURED_STEPS, 2.0, 2.0)
    assert (found["read_bytes"], found["needed_seconds"]["nvme_read"]) == (200 * MB, 0.5)


@pytest.mark.parametrize(
    ("made", "bandwidth", "binding", "fraction"),
    [
        pytest.param(step(read=300 * MB), 200e6, "nvme_read", 0.75, id="its own reads"),
        pytest.param(step(read=100 * MB, others=300 * MB), 200e6, "nvme_read", 1.0, id="reads of another job, too"),
        pytest.param(step(covered={Activity.OPTIMIZER: 1.8}), 200e6, "optimizer", 0.9, id="the optimizer"),
        pytest.param(step(covered={Activity.COMMIT: 1.4}), 200e6, "commit", 0.7, id="the commit"),
        pytest.param(step(covered={Activity.DEMAND_FETCH: 1.0}), 200e6, "fetch_waiting", 0.5, id="waiting for bytes"),
        pytest.param(step(read=100 * MB), 200e6, "trainer", 0.25, id="nothing in the store"),
        pytest.param(step(read=100 * MB), 0.0, None, None, id="an unknown speed"),
        pytest.param(step(covered={Activity.OPTIMIZER: 1.8}), 0.0, "optimizer", 0.9, id="no speed is needed"),
    ],
)
def test_what_binds_a_step_is_named(made: Step, bandwidth: float, binding: str | None, fraction: float | None) -> None:
    found = describe_step([made], bandwidth)

    assert found is not None
    assert (found["binding"], found["binding_fraction"]) == (binding, fraction)
