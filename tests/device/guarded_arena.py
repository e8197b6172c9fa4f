"""An arena whose leases are private memory, so that a copy which comes too late does harm that a test can see.

With the real arena, a lease that is returned too early goes unnoticed: its bytes stay what they are until the daemon
grants the range to another client, which is long after the late copy. Here

- a read lease is a private copy of the bytes;
- a write lease is private memory full of NaN, whose bytes reach the arena when the trainer hands them to the store;
- the private memory of either becomes NaN when the lease is released.

The private memory is registered with the device, so its copies are asynchronous. The plane declares to the device what
the host does with it, so a copy that no wait orders is reported as a race, too, even if it was fast:

- the release of a lease is a write, because the next owner may write at once;
- so is each check on the trainer's thread that leases are valid, for all read leases that it still has: the session may
  end behind the check, and the daemon then gives the memory to others.

A read lease that the trainer holds while a step changes the parameters, or never returns, is an error of its own.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from tests.device import lag
from trainer_client.client.transport import attachment
from trainer_client.client.transport.arena import MappedArena
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.planes import ArenaPlane, LeasedBytes
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.training.step.hooks import UnitHooks

NAN_BYTE = 0xFF


class _PrivateMemory:
    """Registered memory, full of NaN, until `close`; a task that is late finds it there after the lease has gone."""

    def __init__(self, nbytes: int) -> None:
        self.data = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
        self.data.fill_(NAN_BYTE)
        assert lag.register_host(self.data.data_ptr(), max(nbytes, 1)) == 0

    def close(self) -> None:
        assert lag.unregister_host(self.data.data_ptr()) == 0


class GuardedPlane(ArenaPlane):
    """The plane of one session; it has the private memory of all its leases."""

    def __init__(self, arena: MappedArena) -> None:
        super().__init__(arena)
        self._memories: list[_PrivateMemory] = []
        # The private memory of each lease, and of write leases the place in the arena that the bytes belong to.
        self._read: dict[int, torch.Tensor] = {}
        self._filled: dict[int, torch.Tensor] = {}
        self._written: dict[int, torch.Tensor] = {}

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        leased = super().open_read(lease)
        private = self._private(leased)
        private.data.copy_(leased.data)
        if leased.lease_id in self._written:
            # A parked gradient is back, at another place.
            self._written[leased.lease_id] = leased.data
            self._filled[leased.lease_id] = private.data
            return private
        self._read[leased.lease_id] = private.data
        return private

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        leased = super().open_read(lease)
        self._written[leased.lease_id] = leased.data
        private = self._private(leased)
        self._filled[leased.lease_id] = private.data
        return private

    def flush(self, leased: LeasedBytes) -> None:
        if leased.parked is not None:
            # Its bytes have reached the arena when it was parked, and may have left that place.
            super().flush(leased)
            return
        lag.host_access(leased.data, "hand-over of a lease", writes=False)
        self._written[leased.lease_id].copy_(leased.data)

    def end_leases(self, lease_ids: Iterable[int]) -> None:
        """Make the bytes of leases NaN, because they are released."""
        for lease_id in lease_ids:
            data = self._read.pop(lease_id, None)
            if data is None:
                data = self._filled.pop(lease_id, None)
            if data is not None:
                lag.host_access(data, "release of a lease", writes=True)
                data.fill_(NAN_BYTE)

    def check_leases(self) -> None:
        """Declare that the bytes of all read leases may be others from now on."""
        for data in list(self._read.values()):
            lag.host_access(data, "the end of a session behind the check of its leases", writes=True)

    def require_none_held(self, when: str) -> None:
        """Raise AssertionError if a read lease was not returned."""
        assert not self._read, f"{len(self._read)} read leases are held {when}"

    def close(self) -> None:
        """Unregister the private memory."""
        for memory in self._memories:
            memory.close()

    def _private(self, leased: LeasedBytes) -> LeasedBytes:
        memory = _PrivateMemory(leased.data.numel())
        self._memories.append(memory)
        return replace(leased, data=memory.data, source=None)


@contextmanager
def guarded_arena() -> Iterator[None]:
    """Give the sessions that are opened meanwhile guarded leases."""
    planes: list[GuardedPlane] = []

    def make(arena: MappedArena) -> GuardedPlane:
        planes.append(GuardedPlane(arena))
        return planes[-1]

    release, release_quietly = Attachment.release, Attachment.release_quietly
    check_leases, begin_step = SlabLeases.check, UnitHooks.begin_step

    def ending(self: Attachment, releases: Sequence[pb.ReleaseLeasesRequest.Release]) -> Any:
        _plane_of(self).end_leases(asked.lease_id for asked in releases)
        return release(self, releases)

    def ending_quietly(self: Attachment, lease_ids: Iterable[int]) -> None:
        ids = list(lease_ids)
        _plane_of(self).end_leases(ids)
        release_quietly(self, ids)

    def checking(self: SlabLeases) -> None:
        check_leases(self)
        # Commits that are made later check on a thread of their own, beside the trainer's copies.
        if threading.current_thread() is threading.main_thread():
            planes[-1].check_leases()

    def beginning_step(self: UnitHooks) -> None:
        begin_step(self)
        planes[-1].require_none_held("while a step changes the parameters")

    with (
        patch.object(attachment, "ArenaPlane", make),
        patch.object(Attachment, "release", ending),
        patch.object(Attachment, "release_quietly", ending_quietly),
        patch.object(SlabLeases, "check", checking),
        patch.object(UnitHooks, "begin_step", beginning_step),
    ):
        try:
            yield
        finally:
            lag.synchronize()
            for plane in planes:
                plane.close()
    for plane in planes:
        plane.require_none_held("after the end of the training")


def _plane_of(session: Attachment) -> GuardedPlane:
    assert isinstance(session.plane, GuardedPlane)
    return session.plane
