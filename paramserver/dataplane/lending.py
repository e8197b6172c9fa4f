"""The lender's side of BorrowMemory and AccessLoan: a loan lives as long as the stream that has asked for it.

This module owns the ids of loans, by which their borrowers reach them. The memory of a loan (`storage/tiers/lent.py`)
may be taken back at any time, so this module looks a segment up and copies it without an `await` in between.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from paramserver.contract import chunks
from paramserver.contract.chunks import MAX_CHUNK_BYTES, Chunk
from paramserver.dataplane.chunk_budget import ChunkBudget, Transfer
from paramserver.dataplane.raw_stream import RawContext, next_message, run_transfer, write_message
from paramserver.errors import UnavailableError
from paramserver.rpc import convert
from paramserver.rpc.urgency import Urgency
from paramserver.security.gate import Context, ForeignLoanError, Gate, certificate_name
from paramserver.security.principals import Principal
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import DataLossError, InvalidRequestError, NotFoundError
from storage.base.waiting import unlogged
from storage.tiers.lent import LentMemory, Loan

# The time that a lender gives a borrower, after it has opened a stream, to send its request or the id of its loan.
REQUEST_SECONDS = 10.0
# A lender checks the token of each loan's borrower at this interval, so that the loan ends if the token was withdrawn.
CHECK_SECONDS = 1.0
# For each loan, a borrower has one stream by which it reads bytes back, and one by which it sends bytes to be kept.
MAX_STREAMS_OF_A_LOAN = 2
# A chunk that is being sent counts twice in the chunk budget, because the daemon's bytes and gRPC's copy are both in
# memory.
_COPIES_SENT = 2
_KEPT = pb.AccessLoanResponse(kept=pb.AccessLoanResponse.Kept()).SerializeToString()
_GONE = pb.AccessLoanResponse(gone=pb.AccessLoanResponse.Gone()).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Borrower:
    """The caller of BorrowMemory or AccessLoan: its token's principal, and the common name of its certificate.

    A daemon without a `token_file` has one principal for all callers, so there the certificate alone tells two
    borrowers apart.
    """

    principal: Principal
    certificate: str

    @property
    def identity(self) -> str:
        """The names of the principal and the certificate, for operators and for the limit on one borrower's loans."""
        return f"{self.principal.name} {self.certificate}".strip()


@dataclass(slots=True, eq=False)
class _Granted:
    """A loan, the borrower that owns it, and the AccessLoan streams by which the borrower uses it."""

    loan: Loan
    owner: _Borrower
    transfers: set[Transfer] = field(default_factory=set)


class Lending:
    """The handlers of the RPCs BorrowMemory and AccessLoan, by which other daemons borrow host memory of this one."""

    def __init__(self, lent: LentMemory, chunk_budget: ChunkBudget, gate: Gate, check_open: Callable[[], None]) -> None:
        """Make the handlers for a daemon that lends the memory `lent`.

        `check_open` raises UnavailableError if the daemon is being drained, so that it gives no new loan.
        """
        self._lent = lent
        self._chunk_budget = chunk_budget
        self._gate = gate
        self._check_open = check_open
        self._granted: dict[str, _Granted] = {}
        self._is_stopping = False

    async def borrow(
        self, requests: AsyncIterator[pb.BorrowMemoryRequest], principal: Principal, context: Context
    ) -> None:
        """Serve one loan, from the borrower's request to the end of its stream.

        Raises:
            StorageError: the loan is refused, or the daemon ends it.
            RefusedError: the borrower's token does not allow the loan any more.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await anext(aiter(requests), None)
        except TimeoutError:
            raise InvalidRequestError(f"no request for a loan came for {REQUEST_SECONDS:g} s") from None
        if request is None or not request.size_bytes:
            raise InvalidRequestError("size_bytes is 0; say how much memory is to be borrowed")
        borrower = convert.name(request.borrower, "borrower")
        if self._is_stopping:
            raise UnavailableError("the store daemon is shutting down")
        self._check_open()
        owner = _Borrower(principal=principal, certificate=certificate_name(context))
        loan = self._lent.open(borrower, owner.identity, context.peer(), request.size_bytes)
        granted, loan_id = _Granted(loan, owner), secrets.token_hex(16)
        self._granted[loan_id] = granted
        listening = unlogged(asyncio.ensure_future(_until_closed(requests)))
        try:
            await self._keep_open(loan_id, granted, listening, context)
        finally:
            listening.cancel()
            del self._granted[loan_id]
            loan.end()
            for transfer in granted.transfers:
                transfer.end(NotFoundError("the loan has ended; borrow anew"))

    async def _keep_open(
        self, loan_id: str, granted: _Granted, listening: asyncio.Future[None], context: Context
    ) -> None:
        """Tell the borrower the size of its loan, and each change of it, until it closes the stream.

        Raises:
            StorageError: the daemon is shutting down, or the borrower has sent a second message.
            RefusedError: the borrower's token does not allow the loan any more.
        """
        loan, told = granted.loan, -1
        while not listening.done():
            if loan.is_ended:
                raise UnavailableError("the store daemon is shutting down")
            _check_owner(self._gate.principal(context), context, granted.owner)
            loan.changed.clear()
            if told != loan.size_bytes:
                told = loan.size_bytes
                await context.write(pb.BorrowMemoryResponse(loan_id=loan_id, size_bytes=told))
            changed: asyncio.Future[Any] = asyncio.ensure_future(loan.changed.wait())
            await asyncio.wait([changed, listening], timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        listening.result()

    async def access(self, principal: Principal, context: RawContext) -> None:
        """Serve one stream of a loan, until the borrower closes it or the loan ends.

        Raises:
            StorageError: a message is malformed or damaged, or the loan has ended.
            RefusedError: the loan is another borrower's.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await _next_request(context)
        except TimeoutError:
            raise InvalidRequestError(f"the id of a loan did not come for {REQUEST_SECONDS:g} s") from None
        if not isinstance(request, pb.AccessLoanRequest) or request.WhichOneof("message") != "open":
            raise InvalidRequestError("the first message of AccessLoan must be open")
        granted = self._granted.get(request.open.loan_id)
        if granted is None:
            raise NotFoundError(ForeignLoanError.text)
        _check_owner(principal, context, granted.owner)
        if len(granted.transfers) >= MAX_STREAMS_OF_A_LOAN:
            raise InvalidRequestError(f"a loan has at most {MAX_STREAMS_OF_A_LOAN} streams")
        with self._chunk_budget.open(request.open.loan_id, "", Urgency.PREFETCH) as transfer:
            granted.transfers.add(transfer)
            try:
                # The stream's initial metadata are sent now, because they show the borrower that the stream is open. By
                # default, gRPC would send them only with the first answer.
                await context.send_initial_metadata(())
                await run_transfer(transfer, self._answer_all(granted.loan, transfer, context))
            finally:
                granted.transfers.discard(transfer)

    async def _answer_all(self, loan: Loan, transfer: Transfer, context: RawContext) -> None:
        while (request := await _next_request(context)) is not None:
            if isinstance(request, Chunk):
                await write_message(context, _KEPT if _keep(loan, request) else _GONE)
                continue
            match request.WhichOneof("message"):
                case "read":
                    await self._send(loan, transfer, request.read, context)
                case "discard":
                    loan.discard(request.discard.first_byte, request.discard.size_bytes)
                    await write_message(context, _KEPT)
                case _:
                    raise InvalidRequestError("after the first message of AccessLoan: a chunk, read or discard")

    async def _send(self, loan: Loan, transfer: Transfer, span: pb.AccessLoanRequest.Span, context: RawContext) -> None:
        """Send the bytes of a range of the loan, or answer that the loan does not have them.

        Room for the chunk is reserved in the budget before the bytes are copied out of the loan.
        """
        if not 0 < span.size_bytes <= MAX_CHUNK_BYTES:
            raise InvalidRequestError(f"a read of {span.size_bytes} bytes: allowed are 1 to {MAX_CHUNK_BYTES}")
        nbytes = span.size_bytes * _COPIES_SENT
        if not self._chunk_budget.can_fit(transfer, nbytes):
            # The chunk budget has no room for this chunk until calls of clients that do not read are over. If the
            # borrower's read waited for room, other transfers would wait behind it. The borrower has the same bytes on
            # NVMe, so the lender answers that its own copy is gone.
            await write_message(context, _GONE)
            return
        await self._chunk_budget.reserve(transfer, nbytes)
        data = loan.read(span.first_byte, span.size_bytes)
        await write_message(context, _GONE if data is None else chunks.encode(span.first_byte, data))
        transfer.is_proven = True
        self._chunk_budget.moved(transfer, nbytes)

    def close(self) -> None:
        """Refuse loans from now on, and end those that there are."""
        self._is_stopping = True
        self._lent.close()


def _check_owner(principal: Principal, context: Context | RawContext, owner: _Borrower) -> None:
    """Check that a caller is the borrower to which a loan was granted, with the same rights as then.

    Raises:
        ForeignLoanError: the caller has another token or certificate, or the token's rights have changed since.
    """
    caller = _Borrower(principal=principal, certificate=certificate_name(context))
    if caller != owner:
        raise ForeignLoanError(f"{_described(caller)} asks for a loan that {_described(owner)} has")


def _described(borrower: _Borrower) -> str:
    certificate = f" with certificate {borrower.certificate}" if borrower.certificate else ""
    return f"token {borrower.principal.name}{certificate}"


def _keep(loan: Loan, chunk: Chunk) -> bool:
    if len(chunk.data) > MAX_CHUNK_BYTES:
        raise InvalidRequestError(f"a chunk of {len(chunk.data)} bytes: allowed are 1 to {MAX_CHUNK_BYTES}")
    if not chunk.is_intact:
        raise DataLossError(f"the bytes for byte {chunk.first_byte} of the loan were damaged on their way")
    return loan.keep(chunk.first_byte, chunk.data)


async def _until_closed(requests: AsyncIterator[pb.BorrowMemoryRequest]) -> None:
    async for _ in requests:
        raise InvalidRequestError("after the first message of BorrowMemory there must be none")


async def _next_request(context: RawContext) -> pb.AccessLoanRequest | Chunk | None:
    """Return the borrower's next message, or None if it has closed its side."""
    message = await next_message(context)
    if message is None:
        return None
    try:
        return chunks.decode(message, pb.AccessLoanRequest)
    except chunks.MalformedMessageError as error:
        raise InvalidRequestError(str(error)) from error
