"""Lanes on the simulated device: right values under every schedule of lag, no races, and each wait is needed."""

from __future__ import annotations

import time

import pytest
import torch

from tests.device import lag, lanes_cases
from tests.device.lanes_cases import DEVICE, MUTANTS, mutated
from trainer_client.base.lanes.device_lanes import DeviceLanes


@pytest.mark.parametrize("schedule", lag.SCHEDULES)
def test_values_are_right_whatever_is_late(schedule: str) -> None:
    lag.SCHEDULES[schedule].use()
    assert lanes_cases.run() == lanes_cases.expected()


@pytest.mark.parametrize("schedule", lag.SCHEDULES)
def test_nothing_uses_memory_any_more_when_lanes_say_so(schedule: str) -> None:
    lag.SCHEDULES[schedule].use()
    lanes_cases.run_ends()
    assert lag.races() == []


def test_a_collective_leaves_the_compute_stream_free() -> None:
    assert lanes_cases.measure_beside() == 1.0


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_wait_and_each_reference_is_needed(mutant: str) -> None:
    lag.SCHEDULES["all late"].use()
    with mutated(mutant):
        results = lanes_cases.run()
    wrong, races = results != lanes_cases.expected(), lag.races()
    lag.clear_races()
    assert wrong or races


def test_a_stopwatch_reports_when_the_device_is_done() -> None:
    lanes, reports = DeviceLanes(DEVICE), list[tuple[float, float]]()
    lanes.stopwatch().stop(lambda *_: None)
    lag.set_lag(lag.ENDLESS)
    began = time.monotonic()
    stopwatch = lanes.stopwatch()
    torch.ones(4, device=DEVICE).mul_(2)
    stopwatch.stop(lambda begin, end: reports.append((begin, end)))
    lanes.poll()
    assert reports == []
    lag.synchronize()
    lanes.poll()
    ((begin, end),) = reports
    assert begin <= end
    assert end > began - 1


def test_memory_that_lanes_take_in_inference_mode_is_written_to_outside_of_it() -> None:
    """The first forward of a run may be in inference mode."""
    lanes, target = DeviceLanes(DEVICE), torch.zeros(4, device=DEVICE)
    for number in range(4):
        source = torch.full((4,), number, dtype=torch.float32)
        with torch.inference_mode(number == 0):
            lanes.copy_in(target, source.view(torch.uint8))
        assert target.cpu().tolist() == [number] * 4
    lanes.close()
