"""The protocols of Read and Write: a header, then chunks in order, never more than there is credit for.

Both work on raw messages (see paramserver.contract.chunks), so they are registered in place of the handlers that protoc
generates. A lease can end while its stream runs, so it is checked after every `await`, before its memory is touched.
read_source.py provides the bytes, and chunk_budget.py limits how many bytes each transfer may have under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError

from paramserver.contract import chunks
from paramserver.contract.chunks import MAX_CHUNK_BYTES, Chunk
from paramserver.dataplane.chunk_budget import FIRST_CHUNK_BYTES, ChunkBudget, Transfer
from paramserver.dataplane.raw_stream import RawContext, next_message, run_transfer, write_message
from paramserver.dataplane.read_source import ReadSource, check_held, open_source
from paramserver.rpc import convert
from paramserver.rpc.status import answer
from paramserver.sessions.leases import Lease, LeaseMode
from paramserver.sessions.session import Session
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import DTYPE_TO_WIRE
from storage.base.errors import ConflictError, DataLossError, InvalidRequestError, StorageError
from storage.engine import Engine

# A function that takes a session's id and returns the session. It raises if the caller may not use that session.
FindSession = Callable[[str], Session]

# A chunk that is being sent counts twice in the chunk budget, because the daemon's bytes and gRPC's copy are both in
# memory.
_COPIES_SENT = 2


class ReadWrite:
    """The handlers of the RPCs Read and Write. A writer may have at most `window_bytes` of credit at a time."""

    def __init__(self, engine: Engine, chunk_budget: ChunkBudget, window_bytes: int) -> None:
        self._engine = engine
        self._chunk_budget = chunk_budget
        self._window_bytes = window_bytes

    async def read(self, find_session: FindSession, context: RawContext) -> None:
        """Serve one Read, from its first message to its last chunk.

        Raises:
            StorageError: the call is refused; the caller answers with the error's status.
        """
        request = await _next_read_request(context)
        if request is None or request.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of a read must be open")
        opened = request.open
        session = find_session(opened.session_id)
        urgency = convert.urgency(opened.urgency)
        source = await open_source(self._engine, session, opened)
        if opened.first_byte > source.size_bytes:
            raise InvalidRequestError(f"first_byte {opened.first_byte} is behind the end, {source.size_bytes}")
        if not opened.credit_bytes:
            raise InvalidRequestError("credit_bytes is 0; the first credit must allow to send something")
        dtype = pb.DTYPE_UNSPECIFIED if source.dtype is None else DTYPE_TO_WIRE[source.dtype]
        header = pb.ReadHeader(size_bytes=source.size_bytes, version=source.version, dtype=dtype)
        credit = _Credit(opened.credit_bytes)
        with self._chunk_budget.open(session.session_id, source.job, urgency) as transfer:
            # The session may have ended while the source of this read was opened. A session's end ends only transfers
            # that are open, so it would miss this one. The session is looked up again, which raises if it has ended.
            find_session(opened.session_id)
            await write_message(context, pb.ReadResponse(header=header))
            sending = self._send(transfer, source, opened.first_byte, credit, context)
            try:
                await run_transfer(transfer, sending, _take_credits(transfer, credit, context))
            except StorageError as error:
                # If the client does not read, the status of the failed call waits in gRPC behind the last chunk. So the
                # room of gRPC's copy of that chunk stays taken in the chunk budget until the status is sent.
                with self._chunk_budget.pinned(transfer, transfer.held_bytes // _COPIES_SENT):
                    await answer(context, error)

    async def _send(
        self, transfer: Transfer, source: ReadSource, first_byte: int, credit: _Credit, context: RawContext
    ) -> None:
        while first_byte < source.size_bytes:
            await credit.wait()
            nbytes = credit.take(min(self._chunk_budget.chunk_bytes(transfer), source.size_bytes - first_byte))
            await self._chunk_budget.reserve(transfer, nbytes * _COPIES_SENT)
            await write_message(context, chunks.encode(first_byte, await source.piece(first_byte, nbytes)))
            self._chunk_budget.moved(transfer, nbytes * _COPIES_SENT)
            first_byte += nbytes

    async def write(self, find_session: FindSession, context: RawContext) -> None:
        """Serve one Write, from its header to the acknowledgement of its last byte.

        Raises:
            StorageError: the call fails; the caller answers with the error's status.
        """
        request = await _next_write_request(context)
        if not isinstance(request, pb.WriteRequest) or request.WhichOneof("message") != "header":
            raise InvalidRequestError("the first message of a write must be the header")
        header = request.header
        session = find_session(header.session_id)
        urgency = convert.urgency(header.urgency)
        lease = session.lease(header.lease_id)
        if lease.mode in (LeaseMode.READ, LeaseMode.RANGE):
            raise ConflictError(f"lease {lease.lease_id} is for reading and cannot be written")
        end = header.first_byte + header.size_bytes
        if end > lease.nbytes:
            raise InvalidRequestError(f"bytes [{header.first_byte}, {end}) leave the lease of {lease.nbytes} bytes")
        # The initial metadata of a Write stream are sent on their own, because gRPC would send them with the first
        # credit. If the write of that credit were cancelled half-way, gRPC would send the metadata again with the
        # status, which gRPC's core refuses.
        await context.send_initial_metadata(())
        find_session(header.session_id)
        with self._chunk_budget.open(session.session_id, session.require_run().spec.name, urgency) as transfer:
            inbox = _Inbox(self._engine, lease, header)
            await run_transfer(
                transfer, self._answer(transfer, inbox, context), self._receive(transfer, inbox, context)
            )

    async def _receive(self, transfer: Transfer, inbox: _Inbox, context: RawContext) -> None:
        while inbox.missing_bytes:
            request = await _next_write_request(context)
            if request is None:
                raise InvalidRequestError(f"the stream ended {inbox.missing_bytes} bytes early")
            if not isinstance(request, Chunk):
                raise InvalidRequestError("after the header of a write there must be chunks only")
            inbox.put(request)
            transfer.is_proven = True
            self._chunk_budget.moved(transfer, len(request.data))

    async def _answer(self, transfer: Transfer, inbox: _Inbox, context: RawContext) -> None:
        """Grant the writer credit until it has enough for all bytes, then acknowledge the last byte.

        The first credit is small. Once the writer has sent a chunk it may have a whole window, which is renewed when
        half of it is used.
        """
        while ungranted := inbox.missing_bytes - inbox.credit_bytes:
            window = self._window_bytes if transfer.is_proven else FIRST_CHUNK_BYTES
            room = min(window - inbox.credit_bytes, ungranted)
            if room < min(window // 2, ungranted):
                await inbox.wait_for_chunk()
                continue
            granted = min(self._chunk_budget.chunk_bytes(transfer), room)
            await self._chunk_budget.reserve(transfer, granted)
            while quantum := min(self._chunk_budget.chunk_bytes(transfer), room - granted):
                if not self._chunk_budget.try_reserve(transfer, quantum):
                    break
                granted += quantum
            inbox.credit_bytes += granted
            await write_message(context, pb.WriteResponse(received_bytes=inbox.received_bytes, credit_bytes=granted))
        while inbox.missing_bytes:
            await inbox.wait_for_chunk()
        await write_message(context, pb.WriteResponse(received_bytes=inbox.size_bytes))


class _Credit:
    """The number of bytes that the client of a Read still allows the daemon to send."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._no_more = False
        self._changed = asyncio.Event()

    def add(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._changed.set()

    def close(self) -> None:
        """End the waits for credit, because the client has closed its side and will grant no more."""
        self._no_more = True
        self._changed.set()

    async def wait(self) -> None:
        """Wait until there is credit.

        Raises:
            InvalidRequestError: there is no credit, and the client will grant no more.
        """
        while not self._nbytes:
            if self._no_more:
                raise InvalidRequestError("the client closed its side of the read before it had granted all credit")
            self._changed.clear()
            await self._changed.wait()

    def take(self, at_most: int) -> int:
        """Take up to `at_most` bytes of credit, and return how many were taken."""
        taken = min(at_most, self._nbytes)
        self._nbytes -= taken
        return taken


class _Inbox:
    """The range of a lease that the client of a Write fills, in order."""

    def __init__(self, engine: Engine, lease: Lease, header: pb.WriteHeader) -> None:
        self._engine = engine
        self._lease = lease
        self._first_byte = header.first_byte
        self._arrived = asyncio.Event()
        self.size_bytes = header.size_bytes
        self.received_bytes = 0
        self.credit_bytes = 0

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.received_bytes

    def put(self, chunk: Chunk) -> None:
        """Verify a chunk and copy it into the lease's memory.

        Raises:
            InvalidRequestError: the chunk does not begin at the next byte, or is larger than allowed.
            DataLossError: the chunk's checksum is wrong.
            ConflictError: the lease has ended.
        """
        expected, nbytes = self._first_byte + self.received_bytes, len(chunk.data)
        if chunk.first_byte != expected:
            raise InvalidRequestError(f"the next chunk must begin at byte {expected}, not at byte {chunk.first_byte}")
        if not 0 < nbytes <= min(MAX_CHUNK_BYTES, self.credit_bytes):
            raise InvalidRequestError(
                f"a chunk of {nbytes} bytes at byte {expected}: allowed are 1 to {MAX_CHUNK_BYTES}, within the credit "
                f"of {self.credit_bytes} and the announced {self.size_bytes} bytes"
            )
        check_held(self._lease)
        if not chunk.is_intact:
            raise DataLossError(
                f"bytes [{expected}, {expected + nbytes}) of lease {self._lease.lease_id} (group "
                f"{self._lease.group!r}) were damaged on their way to the store; send them again"
            )
        self._engine.host.view(self._lease.arena_range)[expected : expected + nbytes] = chunk.data
        self.received_bytes += nbytes
        self.credit_bytes -= nbytes
        self._arrived.set()

    async def wait_for_chunk(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()


async def _take_credits(transfer: Transfer, credit: _Credit, context: RawContext) -> None:
    while (request := await _next_read_request(context)) is not None:
        if request.WhichOneof("message") != "credit":
            raise InvalidRequestError("after the first message of a read there must be credits only")
        credit.add(request.credit.bytes)
        transfer.is_proven = True
    credit.close()


async def _next_read_request(context: RawContext) -> pb.ReadRequest | None:
    """Return the client's next message, or None if the client has closed its side."""
    message = await next_message(context)
    if message is None:
        return None
    try:
        return pb.ReadRequest.FromString(message)
    except DecodeError as error:
        raise InvalidRequestError(f"{len(message)} bytes that are no ReadRequest") from error


async def _next_write_request(context: RawContext) -> pb.WriteRequest | Chunk | None:
    """Return the client's next message, or None if the client has closed its side."""
    message = await next_message(context)
    if message is None:
        return None
    try:
        return chunks.decode(message, pb.WriteRequest)
    except chunks.MalformedMessageError as error:
        raise InvalidRequestError(str(error)) from error
