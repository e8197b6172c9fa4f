"""The borrower's side of BorrowMemory and AccessLoan: the lenders of the configuration, over channels of grpc.aio.

It fulfils the contract in `storage/tiers/lender.py`. This module owns the channels and streams to lenders. It must
never touch the buffer of a read that has ended, because that memory belongs to another tile by then, and never log a
token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from paramserver.config import RemoteSection
from paramserver.contract import chunks
from paramserver.contract.channel import Options, async_channel_to
from paramserver.contract.chunks import Chunk
from paramserver.contract.limits import MAX_FRAME_BYTES
from paramserver.v1 import parameter_store_pb2 as pb
from storage.tiers.lender import BorrowedMemory, LenderError

_SERVICE = f"/{pb.DESCRIPTOR.services_by_name['ParameterStore'].full_name}"
_OPTIONS: Options = (
    ("grpc.http2.max_frame_size", MAX_FRAME_BYTES),
    # A new channel to a lender must not reuse the connection of a closed one, because that connection was made with the
    # certificate files as they were, and the files may have changed.
    ("grpc.use_local_subchannel_pool", 1),
    # If a lender's machine fails silently, its loan ends within the times of these options, even if the borrower sends
    # no request.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class _UnreachableError(LenderError):
    """The lender does not answer, or refuses the connection."""


class DaemonLender:
    """A daemon of the configuration's section `remote`, of which this daemon borrows memory. It fulfils `Lender`."""

    def __init__(self, address: str, section: RemoteSection, borrower: str) -> None:
        """Prepare to borrow of the daemon at `address`. `borrower` is this daemon's name for the lender's operator."""
        self.address = address
        self._section = section
        self._borrower = borrower
        self._loan: _Loan | None = None
        # The background tasks that close the channels of ended loans. The set keeps them from being garbage collected.
        self._closing: set[asyncio.Task[None]] = set()

    async def borrow(
        self, size_bytes: int, on_size: Callable[[int], None], on_end: Callable[[str], None]
    ) -> BorrowedMemory:
        """Borrow memory; see `Lender.borrow`. Token and certificates are read from their files each time."""
        try:
            token, tls = self._section.read_token(), self._section.read_tls()
            channel = async_channel_to(self.address, options=_OPTIONS, tls=tls)
        except (OSError, ValueError) as error:
            raise LenderError(str(error)) from error
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        loan = _Loan(channel, metadata, on_size, on_end, self._close_channel)
        try:
            await loan.open(self._borrower, size_bytes)
        except _UnreachableError as error:
            loan.close()
            if tls is None:
                raise
            # With TLS 1.3, the borrower cannot tell a lender that refuses its certificate from a lender that has died,
            # so the error's text names both causes.
            raise LenderError(
                f"{error}; if that daemon serves, look into its log for a failed TLS handshake, which means that its "
                f"tls_client_ca has not signed remote.tls_certificate {self._section.tls_certificate} for a client"
            ) from error
        except BaseException:
            loan.close()
            raise
        self._loan = loan
        return loan

    async def close(self) -> None:
        """End the loan, and wait until its channel is closed."""
        if self._loan is not None:
            self._loan.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_channel(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.ensure_future(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class _Loan:
    """One loan: the stream that keeps it open, and the two streams for its bytes. It fulfils `BorrowedMemory`."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
        on_size: Callable[[int], None],
        on_end: Callable[[str], None],
        close_channel: Callable[[grpc.aio.Channel], None],
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._on_size = on_size
        self._on_end = on_end
        self._close_channel = close_channel
        self._streams: list[_AnsweredStream] = []
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False
        self._holding = channel.stream_stream(
            f"{_SERVICE}/BorrowMemory",
            request_serializer=pb.BorrowMemoryRequest.SerializeToString,
            response_deserializer=pb.BorrowMemoryResponse.FromString,
        )(metadata=metadata)

    async def open(self, borrower: str, size_bytes: int) -> None:
        """Ask for the loan, and open its streams. Raise LenderError if the lender cannot be reached, or refuses."""
        try:
            await self._holding.write(pb.BorrowMemoryRequest(borrower=borrower, size_bytes=size_bytes))
            granted = await self._holding.read()
            if not isinstance(granted, pb.BorrowMemoryResponse):
                raise await _error_of(self._holding)
            opening = pb.AccessLoanRequest(open=pb.AccessLoanRequest.Open(loan_id=granted.loan_id))
            for _ in range(2):
                call: Any = self._channel.stream_stream(f"{_SERVICE}/AccessLoan")(metadata=self._metadata)
                self._streams.append(_AnsweredStream(call, opening.SerializeToString(), self._end))
                await call.initial_metadata()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            unreachable = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE
            raise (_UnreachableError if unreachable else LenderError)(_text(error)) from error
        self._on_size(granted.size_bytes)
        self._following = asyncio.ensure_future(self._follow())

    async def read(self, spans: Sequence[tuple[int, memoryview]]) -> Sequence[bool]:
        """Read bytes of the loan into the buffers; see `BorrowedMemory.read`."""
        reads = self._streams[0]
        expected = [
            reads.ask(
                pb.AccessLoanRequest(
                    read=pb.AccessLoanRequest.Span(first_byte=first_byte, size_bytes=len(buffer))
                ).SerializeToString(),
                (first_byte, buffer),
            )
            for first_byte, buffer in spans
        ]
        try:
            return await asyncio.gather(*expected)
        finally:
            for one in expected:
                # The caller may free the buffer after this read. If the lender answers later, `_take` finds the future
                # cancelled and does not write to the buffer.
                one.cancel()

    def keep(self, first_byte: int, data: memoryview) -> asyncio.Future[bool]:
        """Send bytes to the lender, which keeps them in the loan if it has room; see `BorrowedMemory.keep`."""
        return self._streams[1].ask(chunks.encode(first_byte, data), None)

    def discard(self, first_byte: int, nbytes: int) -> None:
        """Tell the lender that bytes are of no use any more; see `BorrowedMemory.discard`."""
        span = pb.AccessLoanRequest.Span(first_byte=first_byte, size_bytes=nbytes)
        answer = self._streams[1].ask(pb.AccessLoanRequest(discard=span).SerializeToString(), None)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def close(self) -> None:
        """End the loan, which ends its streams; see `BorrowedMemory.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._following is not None:
            self._following.cancel()
        for stream in self._streams:
            stream.close("the loan was given back")
        self._holding.cancel()
        self._close_channel(self._channel)

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self._on_end(reason)

    async def _follow(self) -> None:
        """Pass each change of the loan's size to `on_size`, and the reason of the loan's end to `on_end`."""
        try:
            while isinstance(changed := await self._holding.read(), pb.BorrowMemoryResponse):
                self._on_size(changed.size_bytes)
            self._end(await _reason(self._holding))
        except grpc.RpcError as error:
            self._end(_text(error))


@dataclass(slots=True)
class _Expected:
    """The answer to a message that the lender has not answered yet.

    For a read, `into` is the first byte of the range in the loan, and the buffer that gets the bytes.
    """

    answer: asyncio.Future[bool]
    into: tuple[int, memoryview] | None


class _AnsweredStream:
    """One AccessLoan stream, on which each message has one answer, in order."""

    def __init__(self, call: Any, first: bytes, on_end: Callable[[str], None]) -> None:
        self._call = call
        self._on_end = on_end
        self._outgoing = deque([first])
        self._has_outgoing = asyncio.Event()
        self._has_outgoing.set()
        self._expected: deque[_Expected] = deque()
        self._reason = ""
        self._tasks = [asyncio.ensure_future(work) for work in (self._write(), self._read())]

    def ask(self, message: bytes, into: tuple[int, memoryview] | None) -> asyncio.Future[bool]:
        """Send a message soon, and return the lender's answer to it.

        The answer to a read is whether the lender still has the bytes, which are then in the buffer. The answer to
        bytes that are sent is whether the lender had room to keep them. The answer to a discard is always True.

        Args:
            message: the encoded read, discard or chunk.
            into: for a read, the first byte in the loan, and the buffer for the bytes; None for other messages.
        """
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._reason:
            answer.set_exception(LenderError(self._reason))
            return answer
        self._expected.append(_Expected(answer, into))
        self._outgoing.append(message)
        self._has_outgoing.set()
        return answer

    def close(self, reason: str) -> None:
        """End the stream, and fail the answers that are to come. A repeated call has no effect."""
        if self._reason:
            return
        self._reason = reason
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        while self._expected:
            answer = self._expected.popleft().answer
            if not answer.done():
                answer.set_exception(LenderError(reason))
        self._outgoing.clear()

    async def _write(self) -> None:
        # A write to the lender fails if the stream has ended. The error is dropped here, because the task that reads
        # from the same stream reports why it ended.
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while True:
                while self._outgoing:
                    await self._call.write(self._outgoing.popleft())
                self._has_outgoing.clear()
                await self._has_outgoing.wait()

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), bytes):
                self._take(message)
            reason = await _reason(self._call)
        except (grpc.RpcError, chunks.MalformedMessageError, LenderError) as error:
            reason = _text(error)
        self.close(reason)
        self._on_end(reason)

    def _take(self, message: bytes) -> None:
        """Give an answer of the lender to the oldest message that has none yet, because answers come in order."""
        response = chunks.decode(message, pb.AccessLoanResponse)
        if not self._expected:
            raise LenderError("the lender has sent an answer without a question")
        expected = self._expected[0]
        if expected.answer.done():
            pass
        elif not isinstance(response, Chunk):
            expected.answer.set_result(response.WhichOneof("message") == "kept")
        elif expected.into is None or not _fits(response, *expected.into):
            raise LenderError("the lender has sent other bytes than it was asked for")
        else:
            # The checksum in the lender's chunk is not compared, because the remote tier verifies a MAC of each block
            # that it reads.
            expected.into[1][:] = response.data
            expected.answer.set_result(True)
        self._expected.popleft()


def _fits(chunk: Chunk, first_byte: int, buffer: memoryview) -> bool:
    return chunk.first_byte == first_byte and len(chunk.data) == len(buffer)


async def _error_of(call: Any) -> LenderError:
    """Return the LenderError for a call that has ended without an answer; it says why the call has ended."""
    unreachable = await call.code() is grpc.StatusCode.UNAVAILABLE
    return (_UnreachableError if unreachable else LenderError)(await _reason(call))


async def _reason(call: Any) -> str:
    """Return one line about why a call to a lender has ended, for the log."""
    code, details = await call.code(), await call.details()
    return f"{code.name}: {details}" if details else code.name


def _text(error: BaseException) -> str:
    """Return the status of a failed call, or the text of another error, as one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def lenders_of(section: RemoteSection, state_dir: Path, host: str) -> list[DaemonLender]:
    """Return the lenders that a configuration names. The borrower's name is its host and state directory."""
    borrower = f"{host}:{state_dir.absolute()}"
    return [DaemonLender(address, section, borrower) for address in section.lenders]
