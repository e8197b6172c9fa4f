"""Bytes over gRPC, for clients that cannot map the arena: a header, then raw chunks in order.

A lease can end while its stream runs (the session died, the client returned it): after every wait the lease is looked
at again, before its memory is touched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from paramserver import wire
from paramserver.leases import Lease, LeaseMode
from paramserver.v1 import parameter_store_pb2 as pb
from storage.engine import Engine
from storage.errors import ConflictError, InvalidRequestError
from storage.versions import Job

CHUNK_BYTES = 1 << 20


async def read_lease(engine: Engine, lease: Lease) -> AsyncIterator[pb.ReadResponse]:
    """The bytes of a read lease."""
    if lease.mode is not LeaseMode.READ or lease.pin is None:
        raise ConflictError(f"lease {lease.lease_id} is for writing ({lease.mode.value}) and cannot be read")
    slab = lease.pin.slab
    header = pb.ReadHeader(
        size_bytes=lease.nbytes, version=lease.pin.copy.step or 0, dtype=wire.DTYPE_TO_WIRE[slab.spec.dtype]
    )
    yield pb.ReadResponse(header=header)
    for start in range(0, lease.nbytes, CHUNK_BYTES):
        _check(lease)
        view = engine.host.view(lease.region)
        yield pb.ReadResponse(chunk=bytes(view[start : min(start + CHUNK_BYTES, lease.nbytes)]))


async def read_range(engine: Engine, job: Job, source: pb.TensorRange) -> AsyncIterator[pb.ReadResponse]:
    """The newest bytes of a range of a tensor, by name."""
    if source.numel == 0 or max(source.offset, source.numel) > wire.MAX_ELEMENTS:
        raise InvalidRequestError(f"range of {source.fqn!r}: offset {source.offset}, numel {source.numel} is no range")
    kind = wire.kind(source.kind)
    dtype, version = engine.reader.describe(job, source.fqn, kind, source.offset, source.numel)
    size = source.numel * dtype.itemsize
    yield pb.ReadResponse(header=pb.ReadHeader(size_bytes=size, version=version, dtype=wire.DTYPE_TO_WIRE[dtype]))
    async for piece in engine.reader.read(job, source.fqn, kind, source.offset, source.numel):
        for start in range(0, len(piece), CHUNK_BYTES):
            yield pb.ReadResponse(chunk=piece[start : start + CHUNK_BYTES])


async def write_lease(
    engine: Engine, lease: Lease, header: pb.WriteHeader, requests: AsyncIterator[pb.WriteRequest]
) -> pb.WriteResponse:
    """Fills a part of a write lease; raises InvalidRequestError unless exactly the announced bytes come."""
    if lease.mode is LeaseMode.READ:
        raise ConflictError(f"lease {lease.lease_id} is for reading and cannot be written")
    end = header.offset_bytes + header.size_bytes
    if end > lease.nbytes:
        raise InvalidRequestError(f"bytes [{header.offset_bytes}, {end}) leave the lease of {lease.nbytes} bytes")
    position = header.offset_bytes
    async for request in requests:
        chunk = request.chunk
        if request.WhichOneof("message") != "chunk" or position + len(chunk) > end:
            raise InvalidRequestError(f"after the header there must be chunks of {header.size_bytes} bytes in all")
        _check(lease)
        engine.host.view(lease.region)[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != end:
        raise InvalidRequestError(f"the stream ended {end - position} bytes early")
    return pb.WriteResponse(size_bytes=header.size_bytes)


def _check(lease: Lease) -> None:
    if lease.void:
        raise ConflictError(f"lease {lease.lease_id} ended while its bytes were streamed")
