"""Copies of registered host memory are asynchronous, copies of other host memory are staged and synchronous."""

from __future__ import annotations

import mmap

import pytest
import torch

from tests.device import lag

DEVICE = torch.device("lag", 0)
PAGE = mmap.PAGESIZE
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 2, 712, 713


def pages(count: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, count * PAGE), dtype=torch.float32)


def test_a_pageable_source_may_be_changed_after_the_copy() -> None:
    lag.set_lag(50)
    source = torch.ones(1000)
    target = source.to(DEVICE, non_blocking=True)
    assert torch.accelerator.current_stream().query()
    source.fill_(2)
    assert target.sum().item() == 1000


def test_a_pageable_target_has_its_bytes_when_the_copy_returns() -> None:
    lag.set_lag(50)
    target = torch.zeros(1000)
    target.copy_(torch.ones(1000, device=DEVICE), non_blocking=True)
    assert target.sum().item() == 1000


@pytest.mark.parametrize("pinned", [False, True])
def test_a_registered_source_is_read_late(pinned: bool) -> None:
    lag.set_lag(lag.ENDLESS)
    source = torch.ones(1024, pin_memory=True) if pinned else pages(1)
    if not pinned:
        assert lag.register_host(source.data_ptr(), PAGE) == SUCCESS
        source.fill_(1)
    assert source.is_pinned()
    target = torch.zeros(1024, device=DEVICE)
    target.copy_(source, non_blocking=True)
    assert not torch.accelerator.current_stream().query()
    # The host changes the bytes without a wait: they are what the late copy finds.
    lag.host_access(source, "change of the source", writes=True)
    source.fill_(5)
    assert target.sum().item() == 5 * 1024
    assert [(race.first, race.second) for race in lag.races()] == [("copy to the device", "change of the source")]
    lag.clear_races()
    if not pinned:
        assert lag.unregister_host(source.data_ptr()) == SUCCESS
        assert not source.is_pinned()


def test_a_registered_target_has_its_bytes_after_the_event() -> None:
    lag.set_lag(lag.ENDLESS)
    target = torch.zeros(1024, pin_memory=True)
    target.copy_(torch.ones(1024, device=DEVICE), non_blocking=True)
    assert target.sum().item() == 0
    done = torch.accelerator.current_stream().record_event()
    done.synchronize()
    lag.host_access(target, "read of the target", writes=False)
    assert target.sum().item() == 1024


def test_a_blocking_copy_of_registered_memory_is_done_when_it_returns() -> None:
    lag.set_lag(50)
    target = torch.zeros(1024, pin_memory=True)
    target.copy_(torch.ones(1024, device=DEVICE))
    assert target.sum().item() == 1024


def test_registrations_fail_as_the_driver_says_it() -> None:
    memory = pages(4)
    address = memory.data_ptr()
    assert lag.register_host(address, 0) == INVALID_VALUE
    assert lag.register_host(address, 2 * PAGE) == SUCCESS
    assert lag.register_host(address + PAGE, 2 * PAGE) == ALREADY_REGISTERED
    assert lag.unregister_host(address + PAGE) == NOT_REGISTERED
    lag.fail_registrations(1)
    assert lag.register_host(address + 2 * PAGE, PAGE) == OUT_OF_MEMORY
    assert lag.register_host(address + 2 * PAGE, PAGE) == SUCCESS
    assert lag.unregister_host(address) == SUCCESS
    assert lag.unregister_host(address + 2 * PAGE) == SUCCESS
    assert lag.unregister_host(address) == NOT_REGISTERED


def test_a_copy_over_two_registrations_fails_and_one_within_each_does_not() -> None:
    memory = pages(4)
    address, half = memory.data_ptr(), memory.numel() // 2
    assert lag.register_host(address, 2 * PAGE) == SUCCESS
    assert lag.register_host(address + 2 * PAGE, 2 * PAGE) == SUCCESS
    target = torch.zeros_like(memory, device=DEVICE)
    for to, source in ((target, memory), (memory, target)):
        with pytest.raises(RuntimeError, match="does not lie in one registration"):
            to.copy_(source, non_blocking=True)
    memory.fill_(1)
    target[:half].copy_(memory[:half], non_blocking=True)
    target[half:].copy_(memory[half:], non_blocking=True)
    assert target.sum().item() == memory.numel()
    lag.unregister_host(address + 2 * PAGE)
    with pytest.raises(RuntimeError, match="invalid argument"):
        target.copy_(memory)
    lag.unregister_host(address)
    target.copy_(memory)


def test_memory_that_is_unregistered_under_a_copy_is_a_race() -> None:
    memory = pages(1)
    lag.register_host(memory.data_ptr(), PAGE)
    torch.zeros(memory.numel(), device=DEVICE).copy_(memory, non_blocking=True)
    lag.unregister_host(memory.data_ptr())
    assert [(race.first, race.second) for race in lag.races()] == [("copy to the device", "unregister")]
    lag.clear_races()
    lag.register_host(memory.data_ptr(), PAGE)
    torch.zeros(memory.numel(), device=DEVICE).copy_(memory, non_blocking=True)
    torch.accelerator.synchronize()
    lag.unregister_host(memory.data_ptr())


def test_freed_pinned_memory_waits_for_the_copies_of_it() -> None:
    lag.set_lag(lag.ENDLESS)
    before = lag.host_allocations()
    registered = lag.registered_bytes()
    source = torch.ones(1024, pin_memory=True)
    target = torch.zeros(1024, device=DEVICE)
    target.copy_(source, non_blocking=True)
    del source
    assert lag.registered_bytes() == registered + PAGE
    assert target.sum().item() == 1024
    torch.ones(1, pin_memory=True)
    assert lag.host_allocations() == before + 2
