"""The delay of ranks by the store is that of the equation, with its limits."""

from __future__ import annotations

from dataclasses import fields

import pytest
from torch import nn

from trainer_client.config.loading import load_config
from trainer_client.plan.layout import World, lay_out
from trainer_client.plan.machine import Overhead, Rates, StepOverhead
from trainer_client.plan.step_time import Traffic, delay_by_store, predict


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


@pytest.mark.parametrize(("limit", "threads"), [(None, 8), (2e9, 16), (1e9, 0)])
def test_more_threads_help_updates_only_until_memory_bounds_them(limit: float | None, threads: int) -> None:
    raw = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    layout = lay_out(nn.Linear(8, 8).to("meta"), load_config(raw, {}), World(ranks=1))
    none = dict.fromkeys((field.name for field in fields(Traffic)), 0)
    traffic = Traffic(**none | {"updated": 10**9, "updated_in_memory": 10**9})
    rates = Rates(
        copy=1.0,
        fresh_copy=1.0,
        device_link=1.0,
        nvme_read=1.0,
        nvme_write=1.0,
        nvme_both=1.0,
        update=125e6,
        device_update=None,
        collective=None,
        update_limit=limit,
    )

    # One thread updates the elements in 8 s, and the computation takes one.
    found = predict(
        layout,
        traffic,
        rates,
        compute_seconds=1.0,
        overhead=StepOverhead(rank=0.0, store=0.0),
        tokens=1,
        is_cpu=False,
        store_has_cores=True,
        optimizer_threads=4,
    )

    assert found.store_threads == threads
    assert found.resources["store_processor"] == 2.0 + (1e9 / limit if limit else 0.0)


def test_the_overhead_of_a_step_grows_with_its_units() -> None:
    whole = Overhead(per_unit=0.25, per_step=1.0, store_per_unit=0.5, store_per_step=2.0).of_step(4)

    assert whole == StepOverhead(rank=2.0, store=4.0)
