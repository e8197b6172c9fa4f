"""The bounds of a step are the longest and the sum of its resources' work by their rates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from trainer_client.plan.machine import Rates
from trainer_client.plan.step_time import StepTime, Traffic, predict

RATES = Rates(
    copy=10.0,
    device_link=20.0,
    nvme_read=4.0,
    nvme_write=2.0,
    nvme_both=1.0,
    update=5.0,
    device_update=50.0,
    collective=8.0,
    host_memory=100.0,
)


def predicted(*, is_cpu: bool, **moved: Any) -> StepTime:
    traffic = Traffic(**dict.fromkeys((field.name for field in fields(Traffic)), 0) | moved)
    return predict(traffic, RATES, ranks=2, compute_seconds=4.0, tokens=100, is_cpu=is_cpu)


def test_the_bounds_are_the_longest_resource_and_the_sum_of_all() -> None:
    found = predicted(
        is_cpu=False,
        to_rank=30,
        from_rank=10,
        collectives=16,
        nvme_read=10,
        nvme_written=8,
        updated=5,
        updated_on_device=50,
    )

    assert found.resources == {
        "compute": 4.0,
        "collectives": 2.0,
        # Eight bytes each way at once, and two bytes that are read alone.
        "nvme": 8.5,
        "store_link": 2.0,
        "store_update": 1.0,
        "device_update": 1.0,
        # NVMe and the links of both ranks move these bytes, and 28 more for each element that the store updates.
        "host_memory": pytest.approx((18 + 2 * 40 + 28 * 5) / 100),
    }
    assert found.binding == "nvme"
    assert found.overlapped_seconds == 8.5
    assert found.serial_seconds == pytest.approx(sum(found.resources.values()))
    assert found.hiding_tokens == int(100 * 8.5 / 4.0)


def test_a_rank_on_the_cpu_copies_what_it_does_not_map() -> None:
    found = predicted(is_cpu=True, to_rank=30, from_rank=10, mapped=25)

    assert found.resources["store_link"] == 1.5


def test_where_nothing_moves_nothing_has_to_be_hidden() -> None:
    found = predicted(is_cpu=False)

    assert found.hiding_tokens is None
    assert found.overlapped_seconds == found.serial_seconds == 4.0
