"""How the bytes of a lease reach this process: through the mapped arena, or over gRPC streams.

Both planes stand behind one contract and are chosen once per session. Owns no lease: it gives a tensor for one and, for
a write lease, makes the store see what the caller put into it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from paramserver.contract.malloc_settings import keep_chunk_buffers
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.transport.arena import Arena
from trainer_client.transport.channel import LEASE_DEADLINE_SECONDS
from trainer_client.transport.mapping import FileRange
from trainer_client.transport.streams import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBytes:
    """A granted lease and its bytes in this process.

    Attributes:
        version: the step of the bytes (read leases).
        data: uint8, 1-D, on the CPU; valid until the lease is released.
        plane: the plane of the session that the lease belongs to.
        source: where the bytes can be mapped from, as long as `data` is kept; None: they cannot be.
    """

    lease_id: int
    version: int
    data: torch.Tensor
    plane: Plane
    source: FileRange | None = None


class Plane(Protocol):
    """The contract of a data plane."""

    @property
    def name(self) -> str: ...

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        """The bytes of a read lease."""

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        """Uninitialised bytes to be written."""

    def flush(self, leased: LeasedBytes) -> None:
        """Makes the store see the bytes of a write lease."""

    def check(self) -> None:
        """To be called after bytes of a lease were used, before what was computed with them is.

        Raises:
            SessionEndedError: the leases of the plane's session are void, and the bytes may have been somebody else's.
        """


class ArenaPlane:
    """Views of the shared arena: nothing is copied and nothing is sent."""

    name = "arena"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        data = self._arena.view(lease.arena_offset, lease.size_bytes)
        source = self._arena.file_range(lease.arena_offset)
        return LeasedBytes(lease_id=lease.lease_id, version=lease.version, data=data, plane=self, source=source)

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        return self.open_read(lease)

    def flush(self, leased: LeasedBytes) -> None:
        """The store looks at the same memory."""

    def check(self) -> None:
        self._arena.check()


class StreamPlane:
    """Private buffers, filled from and sent to the store in chunks."""

    name = "streams"

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        keep_chunk_buffers()

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        leased = self.open_write(lease)
        source = pb.ReadRequest.Open(lease_id=lease.lease_id)
        self._streams.read(source, leased.data.numpy().data, LEASE_DEADLINE_SECONDS)
        return leased

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        data = torch.empty(lease.size_bytes, dtype=torch.uint8)
        return LeasedBytes(lease_id=lease.lease_id, version=lease.version, data=data, plane=self)

    def flush(self, leased: LeasedBytes) -> None:
        self._streams.write(leased.lease_id, leased.data.numpy().data, LEASE_DEADLINE_SECONDS)

    def check(self) -> None:
        """Private buffers stay what they are."""


def check(leases: Iterable[LeasedBytes]) -> None:
    """Raises SessionEndedError if the bytes of some of the leases may have been somebody else's; see Plane.check."""
    for plane in {id(leased.plane): leased.plane for leased in leases}.values():
        plane.check()
