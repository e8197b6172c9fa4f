"""Tasks run late, in the order of their stream, and events order the streams."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from tests.device import lag

DEVICE = torch.device("lag", 0)


def test_torch_sees_two_devices() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("lag")
    assert torch.accelerator.device_count() == 2
    torch.accelerator.set_device_index(1)
    try:
        assert torch.empty(1, device="lag").device == torch.device("lag", 1)
    finally:
        torch.accelerator.set_device_index(0)
    with torch.get_device_module("lag").device(1):
        assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0


def test_a_tensor_of_one_device_does_not_meet_one_of_the_other() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="lag:0") + torch.ones(2, device="lag:1")
    moved = torch.arange(3.0, device="lag:0").to("lag:1")
    assert moved.device.index == 1
    assert moved.tolist() == [0, 1, 2]


def test_a_task_begins_when_its_lag_is_over() -> None:
    lag.set_lag(300)
    began = time.monotonic()
    value = torch.ones(4, device=DEVICE) * 2
    stream = torch.accelerator.current_stream()
    assert not stream.query()
    while not lag.is_idle(stream):
        assert time.monotonic() - began < 20
        time.sleep(0.01)
    assert time.monotonic() - began >= 0.3
    assert value.tolist() == [2, 2, 2, 2]


def test_a_host_that_asks_again_and_again_and_does_nothing_else_waits() -> None:
    lag.set_lag(lag.ENDLESS)
    value = torch.ones(4, device=DEVICE)
    stream = torch.accelerator.current_stream()
    for _ in range(10):
        # Each addition is a task, so the host does something else, and a program that only looks delays nothing.
        value += 1
        assert not stream.query()
    done = stream.record_event()
    while not done.query():
        time.sleep(0.001)
    assert value.tolist() == [11, 11, 11, 11]


def test_a_task_does_not_lag_any_more_when_the_host_waits_for_it_through_another_stream() -> None:
    lag.set_lag(lag.ENDLESS)
    side = torch.Stream(device=DEVICE)
    value = torch.ones(4, device=DEVICE) * 2
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = value * 2
        done = side.record_event()
    assert not done.query()
    done.synchronize()
    torch.accelerator.current_stream().wait_event(done)
    assert doubled.sum().item() == 16


def test_an_unordered_read_of_another_stream_sees_old_bytes_only_if_that_lags() -> None:
    side = torch.Stream(device=DEVICE)
    seen = {}
    for milliseconds in (0, lag.ENDLESS):
        source = torch.zeros(1000, device=DEVICE)
        torch.accelerator.synchronize()
        lag.set_lag(milliseconds, side)
        with side:
            source += 1
        if not milliseconds:
            side.synchronize()
            lag.clear_races()
        seen[milliseconds] = (source * 1).sum().item()
        side.synchronize()
    assert seen == {0: 1000, lag.ENDLESS: 0}
    assert {(race.first, race.second) for race in lag.races()} == {("aten::add", "aten::mul")}
    lag.clear_races()


def test_an_error_of_a_late_task_is_raised_by_the_next_wait() -> None:
    table = torch.ones(4, 2, device=DEVICE)
    rows = torch.nn.functional.embedding(torch.tensor([9], device=DEVICE), table)
    assert rows.shape == (1, 2)
    with pytest.raises(RuntimeError, match="aten::index_select failed: index out of range"):
        torch.accelerator.synchronize()


def test_a_forked_process_says_that_it_cannot_use_the_device() -> None:
    torch.ones(1, device=DEVICE).item()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, device=DEVICE)
        except RuntimeError as error:
            os.write(writing, str(error).partition(":")[2].encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read().startswith(" this process was forked from one that uses the device")


def test_autocast_computes_products_in_low_precision_and_losses_in_fp32() -> None:
    layer = torch.nn.Linear(4, 4, device=DEVICE)
    with torch.autocast("lag", dtype=torch.bfloat16):
        product = layer(torch.ones(2, 4, device=DEVICE))
        loss = torch.nn.functional.mse_loss(product, torch.zeros(2, 4, device=DEVICE))
    loss.backward()
    assert (product.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.isfinite().all().item()


def test_one_thread_waits_while_another_goes_on() -> None:
    """The GIL is free during a wait, so a thread that sends heartbeats is not stopped by a late device."""
    lag.set_lag(200)
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    event = torch.Event(device=DEVICE)
    torch.ones(1, device=DEVICE)
    event.record()
    while not lag.is_idle(torch.accelerator.current_stream()):
        time.sleep(0.01)
    ended.set()
    thread.join()
    assert ticks > 10
