"""The device's memory: reused at once, overwritten when it is freed, counted, limited, and closed to the host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.device import lag
from tests.integration.support.forked import Forked

DEVICE = torch.device("lag", 0)


def test_the_host_dies_when_it_touches_memory_of_the_device(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = Forked("tests.device.touching", [], environment=os.environ, log=log).wait()
    assert (log.read_text(), code) == ("4.0\n", -signal.SIGSEGV)


def test_a_freed_block_is_reused_at_once_by_its_stream_and_by_no_other() -> None:
    lag.set_lag(lag.ENDLESS)
    side = torch.Stream(device=DEVICE)
    first = torch.empty(5000, device=DEVICE)
    address = first.data_ptr()
    del first
    with side:
        elsewhere = torch.empty(5000, device=DEVICE)
    again = torch.empty(5000, device=DEVICE)
    assert again.data_ptr() == address
    assert elsewhere.data_ptr() != address


def test_a_freed_block_becomes_nan_in_the_order_of_its_stream() -> None:
    lag.set_lag(20)
    first = torch.ones(1000, device=DEVICE)
    total = first.sum()
    address = first.data_ptr()
    del first
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == address
    assert total.item() == 1000
    assert again.isnan().all().item()


def test_neighbours_that_are_freed_become_one_block() -> None:
    torch.accelerator.empty_cache()
    pieces = [torch.empty(100_000, device=DEVICE) for _ in range(2)]
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 400_384
    segments = lag.memory_counters().segments
    address = pieces[0].data_ptr()
    del pieces
    assert torch.empty(800_000, dtype=torch.uint8, device=DEVICE).data_ptr() == address
    assert lag.memory_counters().segments == segments


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_recorded_stream_keeps_a_freed_block_from_being_reused(is_recorded: bool) -> None:
    side = torch.Stream(device=DEVICE)
    lag.set_lag(lag.ENDLESS, side)
    block = torch.full((3000,), 3.0, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = block.sum()
    if is_recorded:
        block.record_stream(side)
    address = block.data_ptr()
    del block
    other = torch.full((3000,), 7.0, device=DEVICE)
    torch.accelerator.current_stream().synchronize()
    assert (other.data_ptr() == address) is not is_recorded
    with side:
        assert total.item() == (9000 if is_recorded else 21000)
    found = {(race.first, race.second) for race in lag.races()}
    assert found == (set() if is_recorded else {("aten::sum", "free")})
    lag.clear_races()


def test_allocations_are_counted_so_that_a_test_can_say_that_there_are_none() -> None:
    side = torch.Stream(device=DEVICE)
    before = lag.memory_counters()

    def step() -> None:
        held = [torch.empty(size, device=DEVICE) for size in (100, 70_000, 900_000)]
        del held

    step()
    step()
    after_two, on_side = lag.memory_counters(), lag.allocations_of(side)
    for _ in range(5):
        step()
    now = lag.memory_counters()
    assert now.allocations - after_two.allocations == 15
    assert now.segments == after_two.segments
    assert now.allocated_bytes == before.allocated_bytes
    assert lag.allocations_of(side) == on_side
    with side:
        torch.empty(3, device=DEVICE)
    assert lag.allocations_of(side) == on_side + 1


def test_a_limit_raises_out_of_memory_and_cached_blocks_are_given_back_first() -> None:
    torch.accelerator.empty_cache()
    reserved = lag.memory_counters().reserved_bytes
    megabyte = 1 << 20
    with lag.memory_limit(reserved + 8 * megabyte):
        block = torch.empty(5 * megabyte, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="lag:0 is out of memory: tried to allocate 5242880 bytes"):
            torch.empty(5 * megabyte, dtype=torch.uint8, device=DEVICE)
        del block
        assert lag.memory_counters().reserved_bytes == reserved + 6 * megabyte
        larger = torch.zeros(8 * megabyte, dtype=torch.uint8, device=DEVICE)
        free, total = torch.accelerator.get_memory_info(0)
        assert (free, total) == (0, reserved + 8 * megabyte)
    assert larger.sum().item() == 0


def test_the_statistics_of_torch_are_those_of_the_allocator() -> None:
    before = torch.accelerator.memory_allocated()
    block = torch.empty(1 << 18, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 1 << 20
    assert torch.accelerator.max_memory_allocated() >= before + (1 << 20)
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    del block
    assert torch.accelerator.memory_allocated() == before


def test_views_keep_their_place_in_a_storage_that_is_freed_and_allocated_again() -> None:
    lag.set_lag(5)
    flat = torch.arange(100.0, device=DEVICE)
    view = flat[10:20].view(2, 5)
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its data is not allocated yet"):
        view + 1
    flat.untyped_storage().resize_(400)
    assert view.isnan().all().item()
    flat.copy_(torch.arange(100.0))
    assert view.sum().item() == sum(range(10, 20))


def test_a_storage_that_grows_moves_its_bytes_to_new_memory() -> None:
    flat = torch.arange(100.0, device=DEVICE)
    address = flat.data_ptr()
    flat.untyped_storage().resize_(800)
    assert flat.data_ptr() != address
    assert flat.tolist() == list(range(100))


def test_a_tensor_can_be_set_to_a_part_of_a_storage() -> None:
    flat = torch.arange(12.0, device=DEVICE)
    part = torch.empty(0, device=DEVICE)
    part.set_(flat.untyped_storage(), 4, (2, 3), (3, 1))
    assert part.tolist() == [[4, 5, 6], [7, 8, 9]]
    parameter = torch.nn.Parameter(torch.zeros(3, device=DEVICE))
    parameter.data = flat[:3]
    assert parameter.data_ptr() == flat.data_ptr()
