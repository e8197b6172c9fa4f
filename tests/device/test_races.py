"""Accesses that no stream, event or wait orders are reported with both operators, also where nothing is late.

Each planted race stands beside the program without it, which must be quiet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device import lag

DEVICE = torch.device("lag", 0)


class Scene:
    """Two streams, and registered memory of the host; `careful` programs wait, the others do not."""

    def __init__(self, careful: bool) -> None:
        self.careful = careful
        self.main = torch.accelerator.current_stream()
        self.side = torch.Stream(device=DEVICE)
        self.host = torch.ones(1024, pin_memory=True)

    def wait(self, waiting: torch.Stream, other: torch.Stream) -> None:
        if self.careful:
            waiting.wait_stream(other)


def compute_before_the_copy_has_filled(scene: Scene) -> None:
    target = torch.empty(1024, device=DEVICE)
    scene.side.wait_stream(scene.main)
    with scene.side:
        target.copy_(scene.host, non_blocking=True)
    scene.wait(scene.main, scene.side)
    target.mul(2)


def copy_into_a_slot_that_is_still_read(scene: Scene) -> None:
    with scene.side:
        slot = torch.empty(1024, device=DEVICE)
        slot.copy_(scene.host, non_blocking=True)
    scene.main.wait_stream(scene.side)
    slot.mul(2)
    scene.wait(scene.side, scene.main)
    with scene.side:
        slot.copy_(scene.host, non_blocking=True)
    # The slot is freed on its own stream, which has to know of the last read for that, too.
    scene.side.wait_stream(scene.main)


def copy_out_before_the_kernel_has_written(scene: Scene) -> None:
    gradient = torch.ones(1024, device=DEVICE)
    scene.wait(scene.side, scene.main)
    with scene.side:
        scene.host.copy_(gradient, non_blocking=True)
    scene.main.wait_stream(scene.side)


def free_what_is_still_copied(scene: Scene) -> None:
    gradient = torch.ones(1024, device=DEVICE)
    scene.side.wait_stream(scene.main)
    with scene.side:
        scene.host.copy_(gradient, non_blocking=True)
    scene.wait(scene.main, scene.side)
    del gradient


def change_the_source_of_a_copy(scene: Scene) -> None:
    torch.empty(1024, device=DEVICE).copy_(scene.host, non_blocking=True)
    if scene.careful:
        scene.main.record_event().synchronize()
    lag.host_access(scene.host, "the host's write", writes=True)


def read_the_target_of_a_copy(scene: Scene) -> None:
    scene.host.copy_(torch.ones(1024, device=DEVICE), non_blocking=True)
    if scene.careful:
        while not scene.main.query():
            pass
    lag.host_access(scene.host, "the host's read", writes=False)


def record_the_event_too_early(scene: Scene) -> None:
    target = torch.empty(1024, device=DEVICE)
    event = scene.main.record_event()
    target.fill_(1)
    if scene.careful:
        event.record(scene.main)
    scene.side.wait_event(event)
    with scene.side:
        target.sum()
    scene.main.wait_stream(scene.side)


def allocate_under_another_stream_than_the_one_that_frees(scene: Scene) -> None:
    with scene.side:
        flat = torch.empty(1024, device=DEVICE)
    scene.main.wait_stream(scene.side)
    flat.fill_(1)
    scene.wait(scene.side, scene.main)
    flat.untyped_storage().resize_(0)


PLANTED: dict[Callable[[Scene], None], tuple[str, str]] = {
    compute_before_the_copy_has_filled: ("copy to the device", "aten::mul"),
    copy_into_a_slot_that_is_still_read: ("aten::mul", "copy to the device"),
    copy_out_before_the_kernel_has_written: ("aten::fill_", "copy to the host"),
    free_what_is_still_copied: ("copy to the host", "free"),
    change_the_source_of_a_copy: ("copy to the device", "the host's write"),
    read_the_target_of_a_copy: ("copy to the host", "the host's read"),
    record_the_event_too_early: ("aten::fill_", "aten::sum"),
    allocate_under_another_stream_than_the_one_that_frees: ("aten::fill_", "free"),
}


@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.__name__)
def test_a_planted_race_is_reported_without_any_lag(program: Callable[[Scene], None]) -> None:
    program(Scene(careful=True))
    assert lag.races() == []
    program(Scene(careful=False))
    found = {(race.first, race.second) for race in lag.races()}
    torch.accelerator.synchronize()
    assert PLANTED[program] in found
    lag.clear_races()


def test_a_race_names_both_operators_and_streams() -> None:
    scene = Scene(careful=False)
    compute_before_the_copy_has_filled(scene)
    [text] = [str(race) for race in lag.races() if race.second == "aten::mul"]
    side = scene.side.stream_id
    assert text.startswith(
        "nothing orders aten::mul (reads, lag:0, stream 0) after "
        f"copy to the device (writes, lag:0, stream {side}): 1 times, at 0x"
    )
    lag.clear_races()


def test_two_parts_of_one_block_and_two_reads_are_no_race() -> None:
    scene = Scene(careful=True)
    block = torch.ones(1024, device=DEVICE)
    scene.side.wait_stream(scene.main)
    with scene.side:
        block[:512].fill_(2)
    block[512:].fill_(3)
    scene.side.wait_stream(scene.main)
    scene.main.wait_stream(scene.side)
    with scene.side:
        block.sum()
    assert block.sum().item() == 512 * 5
    scene.main.wait_stream(scene.side)


def test_order_goes_through_a_third_stream_and_through_the_host() -> None:
    scene, third = Scene(careful=True), torch.Stream(device=DEVICE)
    block = torch.ones(1024, device=DEVICE)
    third.wait_stream(scene.main)
    scene.side.wait_stream(third)
    with scene.side:
        block.fill_(2)
    scene.side.synchronize()
    # The host has waited, so what it submits now comes after the write, on whichever stream.
    assert block.sum().item() == 2048


def test_a_wait_of_the_allocator_orders_nothing_for_the_program() -> None:
    """Waiting for the event of one block must not hide that another block was not waited for."""
    scene = Scene(careful=False)
    block, other = torch.ones(1024, device=DEVICE), torch.ones(2048, device=DEVICE)
    scene.side.wait_stream(scene.main)
    with scene.side:
        scene.host.copy_(block, non_blocking=True)
        other.fill_(3)
    block.record_stream(scene.side)
    del block
    while not lag.is_idle(scene.side):
        pass
    torch.empty(1024, device=DEVICE)  # the allocator looks at its events
    other.mul(2)
    assert ("aten::fill_", "aten::mul") in {(race.first, race.second) for race in lag.races()}
    scene.main.wait_stream(scene.side)
    lag.clear_races()
