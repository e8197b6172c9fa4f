"""Borrowers that write their messages by hand, and the figures that both ends of a loan show."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import grpc

from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.parameter_store_pb2_grpc import ParameterStoreStub
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon


def tier_of(daemon: Daemon, tier: pb.Tier, token: str | None = None) -> admin_pb.TierInfo:
    """Return the present figures of one tier. A daemon with a token file needs an operator's token."""
    with channel_to(daemon.address, options=CHANNEL_OPTIONS, token=token) as channel:
        tiers = StoreAdminStub(channel).GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers
    return next(info for info in tiers if info.tier == tier)


class Borrower:
    """A borrower that writes its messages by hand."""

    def __init__(self, channel: grpc.Channel, size_bytes: int) -> None:
        """Borrow memory over a channel."""
        self._store = ParameterStoreStub(channel)
        # The stream stays open, because the queue has no end.
        requests: SimpleQueue[pb.BorrowMemoryRequest | None] = SimpleQueue()
        requests.put(pb.BorrowMemoryRequest(borrower="b", size_bytes=size_bytes))
        self.loan = self._store.BorrowMemory(iter(requests.get, None), timeout=60)
        self.granted = next(self.loan)
        self._requests = requests

    def close(self) -> None:
        """Close the stream, which ends the loan."""
        self._requests.put(None)

    def access(self, *messages: pb.AccessLoanRequest) -> Any:
        """Send messages about the loan, and return the answers."""
        return access(self._store, self.granted.loan_id, *messages)


def access(store: ParameterStoreStub, loan_id: str, *messages: pb.AccessLoanRequest) -> Any:
    """Send messages about the loan of an id, and return the answers."""
    opening = pb.AccessLoanRequest(open=pb.AccessLoanRequest.Open(loan_id=loan_id))
    return store.AccessLoan(iter([opening, *messages]), timeout=20)


def read(first_byte: int, size_bytes: int) -> pb.AccessLoanRequest:
    """Return the message that asks for bytes of a loan."""
    return pb.AccessLoanRequest(read=pb.AccessLoanRequest.Span(first_byte=first_byte, size_bytes=size_bytes))
