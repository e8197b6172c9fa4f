"""How the bytes of a lease reach this process: through the mapped arena, or over gRPC streams.

Both planes stand behind one contract and are chosen once per session. Owns no lease: it gives a tensor for one and, for
a write lease, makes the store see what the caller put into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
import torch

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.arena import Arena
from trainer_client.channel import LEASE_DEADLINE_SECONDS, translate

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBytes:
    """A granted lease and its bytes in this process.

    Attributes:
        version: the step of the bytes (read leases).
        data: uint8, 1-D, on the CPU; valid until the lease is released.
    """

    lease_id: int
    version: int
    data: torch.Tensor


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


class ArenaPlane:
    """Views of the shared arena: nothing is copied and nothing is sent."""

    name = "arena"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        data = self._arena.view(lease.arena_offset, lease.size_bytes)
        return LeasedBytes(lease_id=lease.lease_id, version=lease.version, data=data)

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        return self.open_read(lease)

    def flush(self, leased: LeasedBytes) -> None:
        """The store looks at the same memory."""


class StreamPlane:
    """Private buffers, filled from and sent to the store in chunks."""

    name = "streams"

    def __init__(self, stub: pb_grpc.ParameterStoreStub, session_id: str) -> None:
        self._stub = stub
        self._session_id = session_id

    def open_read(self, lease: pb.Lease) -> LeasedBytes:
        leased = self.open_write(lease)
        view = leased.data.numpy().data
        filled = 0
        request = pb.ReadRequest(session_id=self._session_id, lease_id=lease.lease_id)
        try:
            for response in self._stub.Read(request, timeout=LEASE_DEADLINE_SECONDS):
                if response.WhichOneof("message") == "chunk":
                    view[filled : filled + len(response.chunk)] = response.chunk
                    filled += len(response.chunk)
        except grpc.RpcError as error:
            raise translate(error) from error
        if filled != lease.size_bytes:
            raise RuntimeError(f"the store sent {filled} bytes for a lease of {lease.size_bytes}")
        return leased

    def open_write(self, lease: pb.Lease) -> LeasedBytes:
        data = torch.empty(lease.size_bytes, dtype=torch.uint8)
        return LeasedBytes(lease_id=lease.lease_id, version=lease.version, data=data)

    def flush(self, leased: LeasedBytes) -> None:
        try:
            self._stub.Write(self._write_requests(leased), timeout=LEASE_DEADLINE_SECONDS)
        except grpc.RpcError as error:
            raise translate(error) from error

    def _write_requests(self, leased: LeasedBytes) -> Iterator[pb.WriteRequest]:
        size = leased.data.numel()
        header = pb.WriteHeader(session_id=self._session_id, lease_id=leased.lease_id, size_bytes=size)
        yield pb.WriteRequest(header=header)
        view = leased.data.numpy().data
        for start in range(0, size, _CHUNK_BYTES):
            yield pb.WriteRequest(chunk=bytes(view[start : start + _CHUNK_BYTES]))
