"""Leases that a StoreClient requests ahead: within their bound, and none is left, whatever fails."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Call, StoreSession
from trainer_client.client.store_client.staging import put_slabs, registrations

LEASE_BYTES = 8


class FakeSession(StoreSession):
    """A session whose store grants every lease at once, and publishes when the client waits for it."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.published: dict[str, bytes] = {}
        self.memory: dict[int, torch.Tensor] = {}
        self.most_held = 0

    def begin(self, method: str, request: Any, call: Call) -> Any:
        done: Future[Any] = Future()
        if method == "AcquireLeases":
            lease_id = len(self.memory)
            self.held[lease_id] = request.wants[0].slab.group
            self.memory[lease_id] = torch.full((LEASE_BYTES,), 255, dtype=torch.uint8)
            self.most_held = max(self.most_held, len(self.held))
            lease = pb.Lease(lease_id=lease_id, size_bytes=LEASE_BYTES)
            done.set_result(pb.AcquireLeasesResponse(leases=[lease]))
            return done
        for one in request.releases:
            group = self.held.pop(one.lease_id)
            if one.publish:
                self.published[group] = self.memory[one.lease_id].numpy().tobytes()
        done.set_result(pb.ReleaseLeasesResponse())
        return done

    def copy_in(self, call: Call, lease: pb.Lease, source: torch.Tensor, at: int = 0) -> None:
        self.memory[lease.lease_id][at : at + source.numel()] = source


def put(session: FakeSession, count: int, fail_at: int | None = None, **bounds: int) -> None:
    def contents() -> Any:
        for number in range(count):
            if number == fail_at:
                raise KeyboardInterrupt
            yield [(0, torch.full((3,), number, dtype=torch.uint8)), (3, torch.ones(1, dtype=torch.uint8))]

    slabs = [pb.SlabName(group=str(number)) for number in range(count)]
    put_slabs(session, 1, slabs, contents(), lambda: Call(None, 30.0), **bounds)


@pytest.mark.parametrize(("most", "ahead"), [(1, 1), (2, 1), (3, 3)])
def test_each_slab_has_its_bytes_and_zeros_behind_them_within_the_bound(most: int, ahead: int) -> None:
    session = FakeSession()
    put(session, 7, most=most, ahead=ahead)
    assert session.published == {str(number): bytes([number] * 3 + [1] + [0] * 4) for number in range(7)}
    assert session.held == {}
    assert session.most_held == ahead


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_no_lease_is_left_when_the_source_of_the_bytes_fails(fail_at: int) -> None:
    session = FakeSession()
    with pytest.raises(KeyboardInterrupt):
        put(session, 7, fail_at, most=3, ahead=3)
    assert session.held == {}
    assert len(session.published) == fail_at


def test_groups_are_declared_with_a_limited_number_of_shards_at_once() -> None:
    groups = [pb.ShardGroup(name=str(number), shards=[pb.Shard()] * 5000) for number in range(7)] + [pb.ShardGroup()]
    assert [len(request.groups) for request in registrations(groups)] == [4, 4]
    assert list(registrations([])) == []


def test_a_call_without_a_deadline_gets_that_of_the_method_from_its_beginning_on() -> None:
    call = Call(None)
    assert Call.of(call, 30.0) is call
    assert 29.0 < call.left_seconds <= 30.0
    # A method that another one calls has the deadline of the whole call.
    assert Call.of(call, 300.0).left_seconds <= 30.0
    assert Call.of(Call(timedelta(seconds=2)), 30.0).left_seconds <= 2.0
    assert 29.0 < Call.of(None, 30.0).left_seconds <= 30.0
