"""Virtual time: schedules that can be computed by hand, the same in each run and under each lag."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.device import lag
from tests.device.lag import Engine

DEVICE = torch.device("lag", 0)
NBYTES = 1_000_000


@pytest.fixture(autouse=True)
def speeds() -> None:
    """A copy of NBYTES takes 1 ms to the device and 2 ms back, a product 3 ms, and all else nothing."""
    lag.set_speed(Engine.TO_DEVICE, bytes_per_second=1e9)
    lag.set_speed(Engine.TO_HOST, bytes_per_second=0.5e9)
    lag.set_kernel_seconds("aten::mm", 3e-3)


def milliseconds(spans: list[lag.Span], engine: Engine) -> list[tuple[float, float]]:
    return [(round(s.begin * 1e3, 6), round(s.end * 1e3, 6)) for s in spans if s.engine is engine and s.end > s.begin]


def train(units: int, *, ahead: bool) -> list[lag.Span]:
    """Copy and use one unit after the other: on one stream, or with two slots and a stream for the copies."""
    host = torch.ones(NBYTES // 4, pin_memory=True)
    slots = [torch.empty(NBYTES // 4, device=DEVICE) for _ in range(2)]
    matrix = torch.ones(8, 8, device=DEVICE)
    compute = torch.accelerator.current_stream()
    copies = torch.Stream(device=DEVICE) if ahead else compute
    drained = [compute.record_event(), compute.record_event()]
    torch.accelerator.synchronize()
    with lag.recorded() as spans:
        for unit in range(units):
            slot = slots[unit % 2]
            copies.wait_event(drained[unit % 2])
            with copies:
                slot.copy_(host, non_blocking=True)
            compute.wait_stream(copies)
            slot[:64].view(8, 8).mm(matrix)
            drained[unit % 2] = compute.record_event()
        torch.accelerator.synchronize()
    return spans


def test_one_stream_hides_nothing() -> None:
    spans = train(3, ahead=False)
    assert milliseconds(spans, Engine.TO_DEVICE) == [(0, 1), (4, 5), (8, 9)]
    assert milliseconds(spans, Engine.COMPUTE) == [(1, 4), (5, 8), (9, 12)]
    assert lag.hidden_share(spans, {Engine.TO_DEVICE}) == 0


@pytest.mark.parametrize("milliseconds_late", [0, 20])
def test_two_slots_hide_all_copies_but_the_first_whatever_the_lag(milliseconds_late: int) -> None:
    lag.set_lag(milliseconds_late)
    spans = train(4, ahead=True)
    assert milliseconds(spans, Engine.TO_DEVICE) == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert milliseconds(spans, Engine.COMPUTE) == [(1, 4), (4, 7), (7, 10), (10, 13)]
    assert lag.hidden_share(spans, {Engine.TO_DEVICE}) == pytest.approx(3 / 4)


def test_a_wait_of_the_host_costs_what_it_waits_for() -> None:
    host = torch.ones(NBYTES // 4, pin_memory=True)
    target = torch.empty(NBYTES // 4, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with lag.recorded() as spans:
        target.copy_(host, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        with side:
            host.copy_(target, non_blocking=True)
        side.synchronize()
    assert milliseconds(spans, Engine.TO_DEVICE) == [(0, 1)]
    assert milliseconds(spans, Engine.TO_HOST) == [(1, 3)]
    assert lag.host_works(0) == pytest.approx(3e-3)


def test_polls_and_waits_of_a_thread_that_submits_nothing_take_no_time_of_the_host() -> None:
    matrix = torch.ones(8, 8, device=DEVICE)
    matrix.mm(matrix)
    done = torch.accelerator.current_stream().record_event()
    waiting = threading.Thread(target=done.synchronize)
    waiting.start()
    waiting.join()
    assert done.query()
    assert lag.host_works(0) == 0
    done.synchronize()
    assert lag.host_works(0) == pytest.approx(3e-3)


def test_the_time_of_the_host_delays_what_it_submits() -> None:
    lag.set_host_seconds(of_a_task=0.5e-3)
    matrix = torch.ones(8, 8, device=DEVICE)
    torch.accelerator.synchronize()
    started = lag.host_works(2e-3)
    with lag.recorded() as spans:
        matrix.mm(matrix)
        matrix.mm(matrix)
    first = started * 1e3 + 0.5
    assert milliseconds(spans, Engine.COMPUTE) == [(first, first + 3), (first + 3, first + 6)]


def test_both_directions_run_at_once_and_a_short_copy_takes_a_gap() -> None:
    host, back = torch.ones(NBYTES // 4, pin_memory=True), torch.ones(NBYTES // 4, pin_memory=True)
    first, second = torch.empty(NBYTES // 4, device=DEVICE), torch.zeros(NBYTES // 4, device=DEVICE)
    matrix = torch.ones(8, 8, device=DEVICE)
    main = torch.accelerator.current_stream()
    outward, inward = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    torch.accelerator.synchronize()
    with lag.recorded() as spans:
        matrix.mm(matrix)
        outward.wait_stream(main)
        with outward:
            first.copy_(host, non_blocking=True)  # is submitted first, but waits for the product
        with inward:
            second.copy_(host, non_blocking=True)
            back.copy_(second, non_blocking=True)
        torch.accelerator.synchronize()
    assert milliseconds(spans, Engine.TO_DEVICE) == [(3, 4), (0, 1)]
    assert milliseconds(spans, Engine.TO_HOST) == [(1, 3)]


def test_events_measure_virtual_time() -> None:
    begin, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    matrix = torch.ones(8, 8, device=DEVICE)
    begin.record()
    matrix.mm(matrix)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(3)
    # The stream has been idle for 5 ms, which count for no event that is recorded afterwards.
    lag.host_works(5e-3)
    begin.record()
    matrix.mm(matrix)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(3)


def test_products_take_their_operations_and_kernels_their_bytes() -> None:
    lag.reset()
    lag.set_speed(Engine.COMPUTE, latency_seconds=1e-6, bytes_per_second=1e9, flops_per_second=1e9)
    matrix = torch.ones(100, 100, device=DEVICE)
    torch.accelerator.synchronize()
    with lag.recorded() as spans:
        matrix.mm(matrix)
        matrix.neg()
    product, negation = ((span.end - span.begin) for span in spans)
    assert product == pytest.approx(1e-6 + 3 * 40_000 / 1e9 + 2e6 / 1e9)
    assert negation == pytest.approx(1e-6 + 2 * 40_000 / 1e9)
