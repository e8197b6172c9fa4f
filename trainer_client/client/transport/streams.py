"""Transfers of bytes between this process and the store over gRPC streams, in chunks and with flow control by credits.

A transfer whose connection breaks goes on from the first missing byte. This module owns the calls and the progress of a
transfer. The caller gives the buffer; this module must never keep or touch it after the transfer has returned.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from paramserver.contract import chunks
from paramserver.contract.chunks import MAX_CHUNK_BYTES, Chunk
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.backoff import Backoff
from trainer_client.client.transport.channel import SERVICE_NAME, translate
from trainer_client.errors import DataLossError, StoreError

# Credit of a read: the number of bytes that the store may send ahead of the client. The client grants more whenever it
# has consumed _CREDIT_BYTES.
READ_WINDOW_BYTES = 16 << 20
_CREDIT_BYTES = READ_WINDOW_BYTES // 4

# The status codes of a broken stream after which a transfer goes on over a new stream: the connection broke, or the
# transfer stalled, so that the store or the connection has ended it.
_RESUMABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class _Transfer(Protocol):
    @property
    def moved_bytes(self) -> int: ...

    @property
    def is_complete(self) -> bool: ...

    def attempt(self, timeout_seconds: float) -> None:
        """Make one gRPC call that transfers the bytes that are still missing. It can raise grpc.RpcError."""


class Streams:
    """The transfers of bytes between this process and the store, over one channel and for one session.

    Args:
        channel: the gRPC channel to the daemon.
        session_id: the session that the leases belong to.
        check_session: raises StoreError if the session has ended, because its leases are void then.
    """

    def __init__(self, channel: grpc.Channel, session_id: str, check_session: Callable[[], None]) -> None:
        self._session_id = session_id
        self._check_session = check_session
        # The messages of both directions pass through gRPC as raw bytes, because protobuf would copy each chunk.
        self._read: Any = channel.stream_stream(f"/{SERVICE_NAME}/Read")
        self._write: Any = channel.stream_stream(f"/{SERVICE_NAME}/Write")

    def read(self, source: pb.ReadRequest.Open, target: memoryview, timeout_seconds: float) -> pb.ReadHeader:
        """Fill `target` with the bytes of a source, and go on if the connection breaks.

        Args:
            source: names what to read; this method sets session, first byte and credit.
            target: a writable buffer of exactly the source's size.
            timeout_seconds: deadline of the whole transfer.

        Returns:
            The store's header, which has the size and the version of the source.

        Raises:
            StoreError: the session has ended, the store refuses, or the deadline has passed.
            DataLossError: bytes were damaged on their way, or in the store.
        """
        reading = _Reading(self._read, source, self._session_id, target)
        self._complete(reading, timeout_seconds)
        return reading.header

    def write(self, lease_id: int, source: memoryview, timeout_seconds: float, at: int = 0) -> None:
        """Write all of `source` into a write lease, from byte `at` of it on, and go on if the connection breaks.

        Raises:
            StoreError: the session has ended, the store refuses, or the deadline of `timeout_seconds` has passed.
            DataLossError: bytes were damaged on their way.
        """
        self._complete(_WriteStream(self._write, lease_id, self._session_id, source, at), timeout_seconds)

    def _complete(self, transfer: _Transfer, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        backoff = Backoff()
        while True:
            before, closed = transfer.moved_bytes, None
            try:
                transfer.attempt(max(0.0, deadline - time.monotonic()))
                return
            except grpc.RpcError as error:
                if transfer.is_complete:
                    return
                if _code(error) not in _RESUMABLE or time.monotonic() + backoff.limit_seconds > deadline:
                    raise translate(error) from None
            except ValueError as error:
                # gRPC raises ValueError for a call on a closed channel, which is closed when the session ends. So the
                # ValueError means that the session has ended.
                closed = error
            self._check_session()
            if closed is not None:
                raise closed
            if transfer.moved_bytes > before:
                backoff.reset()
            time.sleep(backoff.next_seconds())


class _Reading:
    def __init__(self, method: Any, source: pb.ReadRequest.Open, session_id: str, target: memoryview) -> None:
        self._method = method
        self._source = source
        self._session_id = session_id
        self._target = target
        self.moved_bytes = 0
        self.header = pb.ReadHeader()

    @property
    def is_complete(self) -> bool:
        return self.moved_bytes == len(self._target)

    def attempt(self, timeout_seconds: float) -> None:
        opened = pb.ReadRequest.Open()
        opened.CopyFrom(self._source)
        opened.session_id = self._session_id
        opened.first_byte = self.moved_bytes
        missing = len(self._target) - self.moved_bytes
        # The first credit covers only half of the missing bytes. The client grants the second credit after the first
        # chunk, which shows the store that this client reads. Only after that, the store sends chunks of full size. The
        # credit is at least 1, because a source without bytes is read for its header.
        outstanding = opened.credit_bytes = max(1, min(READ_WINDOW_BYTES, -(-missing // 2)))
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        requests.put(pb.ReadRequest(open=opened).SerializeToString())
        call = self._method(iter(requests.get, None), timeout=timeout_seconds)
        try:
            for message in call:
                received = chunks.decode(message, pb.ReadResponse)
                if not isinstance(received, Chunk):
                    self._check_header(received.header)
                    continue
                has_begun = received.first_byte > opened.first_byte
                self._take(received)
                outstanding -= len(received.data)
                missing = len(self._target) - self.moved_bytes
                granted = min(READ_WINDOW_BYTES, missing) - outstanding
                # The client grants credit rarely, because each grant is a message: after the first chunk, after each
                # _CREDIT_BYTES, and at once for all remaining bytes as soon as they fit into the window.
                if granted and (not has_begun or granted >= _CREDIT_BYTES or missing <= READ_WINDOW_BYTES):
                    requests.put(pb.ReadRequest(credit=pb.Credit(bytes=granted)).SerializeToString())
                    outstanding += granted
        finally:
            requests.put(None)
            call.cancel()
        if not self.is_complete:
            raise StoreError(
                grpc.StatusCode.INTERNAL,
                f"the store ended a read after {self.moved_bytes} of {len(self._target)} bytes",
            )

    def _check_header(self, header: pb.ReadHeader) -> None:
        if header.size_bytes != len(self._target):
            raise StoreError(
                grpc.StatusCode.INTERNAL,
                f"the store has {header.size_bytes} bytes where {len(self._target)} were expected",
            )
        if self.moved_bytes and header.version != self.header.version:
            raise StoreError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"step {header.version} replaced step {self.header.version} while its bytes were read; read again",
            )
        self.header = header

    def _take(self, chunk: Chunk) -> None:
        end = chunk.first_byte + len(chunk.data)
        if chunk.first_byte != self.moved_bytes or end > len(self._target):
            raise StoreError(
                grpc.StatusCode.INTERNAL,
                f"the store sent bytes [{chunk.first_byte}, {end}) where those from {self.moved_bytes} on were next",
            )
        if not chunk.is_intact:
            raise DataLossError(
                grpc.StatusCode.DATA_LOSS, f"bytes [{chunk.first_byte}, {end}) of a read were damaged on their way"
            )
        self._target[chunk.first_byte : end] = chunk.data
        self.moved_bytes = end


class _WriteStream:
    def __init__(self, method: Any, lease_id: int, session_id: str, source: memoryview, at: int) -> None:
        self._method = method
        self._lease_id = lease_id
        self._session_id = session_id
        self._source = source
        # The position in the lease to which the source's first byte is written.
        self._at = at
        self.moved_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self.moved_bytes == len(self._source)

    def attempt(self, timeout_seconds: float) -> None:
        first_byte = self.moved_bytes
        credits: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        call = self._method(self._messages(first_byte, credits), timeout=timeout_seconds)
        try:
            for message in call:
                response = pb.WriteResponse.FromString(message)
                self.moved_bytes = first_byte + response.received_bytes
                credits.put(response.credit_bytes)
        finally:
            credits.put(None)
            call.cancel()
        if not self.is_complete:
            raise StoreError(
                grpc.StatusCode.INTERNAL,
                f"the store ended a write after {self.moved_bytes} of {len(self._source)} bytes",
            )

    def _messages(self, first_byte: int, credits: queue.SimpleQueue[int | None]) -> Iterator[bytes]:
        """Yield the messages of a Write stream: the header, then chunks, each once the store has granted its credit.

        gRPC calls this on a thread of its own.
        """
        size = len(self._source)
        header = pb.WriteHeader(
            session_id=self._session_id,
            lease_id=self._lease_id,
            first_byte=self._at + first_byte,
            size_bytes=size - first_byte,
        )
        yield pb.WriteRequest(header=header).SerializeToString()
        credit = 0
        while first_byte < size:
            while not credit:
                if (granted := credits.get()) is None:
                    return
                credit += granted
            end = min(first_byte + min(MAX_CHUNK_BYTES, credit), size)
            yield chunks.encode(self._at + first_byte, self._source[first_byte:end])
            credit -= end - first_byte
            first_byte = end


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    # Every RpcError that grpc raises is also a grpc.Call, which has the status code.
    assert isinstance(error, grpc.Call)
    return error.code() or grpc.StatusCode.UNKNOWN
