"""The streams Read and Write over the generated stubs, for tests, as any client of the contract uses them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import xxhash

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from tests.integration.support.store_client import CALL_SECONDS, Client

MIB = 1 << 20


def seal(first_byte: int, data: bytes) -> pb.Chunk:
    """Return a chunk with its checksum."""
    return pb.Chunk(checksum=xxhash.xxh3_64_intdigest(data, seed=first_byte), first_byte=first_byte, data=data)


class Reading:
    """A running Read of a client, which grants credit only when the test calls `grant`. It uses `store` if given."""

    def __init__(
        self,
        client: Client,
        store: pb_grpc.ParameterStoreStub | None = None,
        *,
        credit_bytes: int,
        seconds: float = CALL_SECONDS,
        **fields: Any,
    ) -> None:
        self._requests: queue.SimpleQueue[pb.ReadRequest | None] = queue.SimpleQueue()
        opened = pb.ReadRequest.Open(session_id=client.session_id, credit_bytes=credit_bytes, **fields)
        self._requests.put(pb.ReadRequest(open=opened))
        self.call = (store or client.store).Read(iter(self._requests.get, None), timeout=seconds)
        self._responses = iter(self.call)

    def header(self) -> pb.ReadHeader:
        """Return the header, which is the first message."""
        response = next(self._responses)
        assert response.WhichOneof("message") == "header"
        header: pb.ReadHeader = response.header
        return header

    def chunks(self) -> Iterator[pb.Chunk]:
        """Yield the chunks after checking their size and checksum."""
        for response in self._responses:
            assert response.WhichOneof("message") == "chunk"
            chunk = response.chunk
            assert 0 < len(chunk.data) <= MIB
            assert chunk == seal(chunk.first_byte, chunk.data)
            yield chunk

    def grant(self, nbytes: int) -> None:
        """Grant further credit."""
        self._requests.put(pb.ReadRequest(credit=pb.Credit(bytes=nbytes)))

    def half_close(self) -> None:
        """Close the client's side of the stream: there is no further credit."""
        self._requests.put(None)

    def cancel(self) -> None:
        self.call.cancel()
        self.half_close()


def read(client: Client, *, first_byte: int = 0, **source: Any) -> tuple[pb.ReadHeader, bytes]:
    """Read a source and return its header and bytes; check the form of the stream, and that it respects the credit."""
    credit = 300_000
    reading = Reading(client, credit_bytes=credit, first_byte=first_byte, **source)
    header, data = reading.header(), bytearray()
    for chunk in reading.chunks():
        assert chunk.first_byte == first_byte + len(data)
        data += chunk.data
        credit -= len(chunk.data)
        assert credit >= 0
        reading.grant(len(chunk.data))
        credit += len(chunk.data)
    reading.half_close()
    assert first_byte + len(data) == header.size_bytes
    return header, bytes(data)


class Writing:
    """A running Write, which sends the chunks that the test passes to `send`."""

    def __init__(
        self, client: Client, lease_id: int, size_bytes: int, *, first_byte: int = 0, seconds: float = CALL_SECONDS
    ) -> None:
        self._requests: queue.SimpleQueue[pb.WriteRequest | None] = queue.SimpleQueue()
        header = pb.WriteHeader(
            session_id=client.session_id, lease_id=lease_id, first_byte=first_byte, size_bytes=size_bytes
        )
        self._requests.put(pb.WriteRequest(header=header))
        self.call = client.store.Write(iter(self._requests.get, None), timeout=seconds)
        self.responses: Iterator[pb.WriteResponse] = iter(self.call)

    def send(self, chunk: pb.Chunk) -> None:
        self._requests.put(pb.WriteRequest(chunk=chunk))

    def half_close(self) -> None:
        self._requests.put(None)

    def cancel(self) -> None:
        self.call.cancel()
        self.half_close()


def write(client: Client, lease_id: int, data: bytes, *, first_byte: int = 0) -> int:
    """Write data within the granted credit, and return the number of bytes that the store has received."""
    writing = Writing(client, lease_id, len(data), first_byte=first_byte)
    sent, received = 0, 0
    for response in writing.responses:
        assert received <= response.received_bytes <= sent
        received = response.received_bytes
        for start in range(sent, sent + response.credit_bytes, MIB):
            piece = data[start : min(start + MIB, sent + response.credit_bytes)]
            writing.send(seal(first_byte + start, piece))
        sent += response.credit_bytes
        assert sent <= len(data)
    writing.half_close()
    return received
