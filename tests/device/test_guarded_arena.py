"""Guarded leases: a copy that is still under way when its lease ends does harm, and is reported."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from tests.device import lag
from tests.device.guarded_arena import GuardedPlane
from trainer_client.client.transport.arena import MappedArena

DEVICE = torch.device("lag", 0)
NUMEL = 1024
NONCE = b"nonce of 20 bytes..."
START = 4096
LEASE = pb.Lease(lease_id=7, arena_offset=START, size_bytes=4 * NUMEL, version=3)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[MappedArena]:
    """An arena whose bytes under LEASE are ones."""
    content = bytearray(START) + NUMEL * struct.pack("f", 1.0)
    content[: len(NONCE)] = NONCE
    content[64:72] = struct.pack("<Q", 1)
    path = tmp_path / "arena"
    path.write_bytes(content)
    mapped = MappedArena.map(
        pb.Arena(file_path=os.fspath(path), nonce=NONCE, size_bytes=len(content), generation_offset=64, generation=1)
    )
    assert mapped is not None
    with closing(mapped):
        yield mapped


@pytest.fixture
def plane(arena: MappedArena) -> Iterator[GuardedPlane]:
    plane = GuardedPlane(arena)
    yield plane
    torch.accelerator.synchronize()
    plane.close()


def stored(arena: MappedArena) -> float:
    return float(arena.view(START, 4 * NUMEL).view(torch.float32).sum())


def test_a_read_that_was_waited_for_has_the_bytes(plane: GuardedPlane, arena: MappedArena) -> None:
    lag.set_lag(lag.ENDLESS)
    leased = plane.open_read(LEASE)
    target = torch.zeros(NUMEL, device=DEVICE)
    target.copy_(leased.data.view(torch.float32), non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    plane.end_leases([LEASE.lease_id])
    assert target.sum().item() == NUMEL
    assert leased.data.view(torch.float32).isnan().all()
    assert stored(arena) == NUMEL


@pytest.mark.parametrize("milliseconds", [0, lag.ENDLESS])
def test_a_lease_that_is_released_too_early_is_a_race_and_nan_if_the_copy_is_late(
    plane: GuardedPlane, milliseconds: int
) -> None:
    lag.set_lag(milliseconds)
    leased = plane.open_read(LEASE)
    target = torch.zeros(NUMEL, device=DEVICE)
    target.copy_(leased.data.view(torch.float32), non_blocking=True)
    plane.end_leases([LEASE.lease_id])
    assert [(race.first, race.second) for race in lag.races()] == [("copy to the device", "release of a lease")]
    lag.clear_races()
    if milliseconds:
        assert target.isnan().all().item()


@pytest.mark.parametrize("milliseconds", [0, lag.ENDLESS])
def test_a_write_that_is_handed_over_too_early_is_a_race_and_nan_if_the_copy_is_late(
    plane: GuardedPlane, arena: MappedArena, milliseconds: int
) -> None:
    lag.set_lag(milliseconds)
    leased = plane.open_write(LEASE)
    leased.data.view(torch.float32).copy_(torch.full((NUMEL,), 2.0, device=DEVICE), non_blocking=True)
    plane.flush(leased)
    assert [(race.first, race.second) for race in lag.races()] == [("copy to the host", "hand-over of a lease")]
    lag.clear_races()
    if milliseconds:
        assert torch.tensor(stored(arena)).isnan()
    torch.accelerator.synchronize()
    plane.flush(leased)
    assert stored(arena) == 2 * NUMEL


def test_a_write_lease_that_is_released_too_early_is_a_race_and_nan(plane: GuardedPlane) -> None:
    leased = plane.open_write(LEASE)
    leased.data.view(torch.float32).copy_(torch.full((NUMEL,), 2.0, device=DEVICE), non_blocking=True)
    torch.accelerator.synchronize()
    later = plane.open_write(pb.Lease(lease_id=8, arena_offset=START, size_bytes=4 * NUMEL, version=3))
    later.data.view(torch.float32).copy_(torch.full((NUMEL,), 2.0, device=DEVICE), non_blocking=True)
    plane.end_leases([LEASE.lease_id])
    assert lag.races() == []
    assert leased.data.view(torch.float32).isnan().all()
    plane.end_leases([8])
    assert [(race.first, race.second) for race in lag.races()] == [("copy to the host", "release of a lease")]
    lag.clear_races()


def test_a_check_of_leases_before_the_copy_is_done_is_a_race(plane: GuardedPlane) -> None:
    leased = plane.open_read(LEASE)
    target = torch.zeros(NUMEL, device=DEVICE)
    target.copy_(leased.data.view(torch.float32), non_blocking=True)
    plane.check_leases()
    assert [race.first for race in lag.races()] == ["copy to the device"]
    lag.clear_races()
    torch.accelerator.synchronize()
    plane.check_leases()
    assert lag.races() == []


def test_a_read_lease_that_is_not_returned_is_an_error(plane: GuardedPlane) -> None:
    plane.open_read(LEASE)
    with pytest.raises(AssertionError, match="1 read leases are held in a step"):
        plane.require_none_held("in a step")
    plane.end_leases([LEASE.lease_id])
    plane.require_none_held("in a step")
