"""The seats that sessions take: limits on all sessions, on those of one identity and on those of one address.

A daemon has few seats, so each session that one client opens takes a seat from other clients. The last seats are kept
for clients of the daemon's node, and of these the very last ones for the operator, so that no holder of a job's token
can keep these clients or the operator out. This module owns the counts. It must never look into a session.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from paramserver.security.principals import ANYONE, Principal, Role
from storage.base.errors import BudgetExceededError


class ClientStanding(enum.Enum):
    """The three kinds of clients, by the kept seats that they may take."""

    OPERATOR = enum.auto()
    """The holder of an admin's token or, without a token file, a client on the UNIX socket. It may take every seat."""

    LOCAL = enum.auto()
    """A client on this node. It must not take the operator's seats."""

    REMOTE = enum.auto()
    """Any other client. It may take neither the operator's seats nor those of local clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A client that asks for a session.

    Attributes:
        owner: the principal behind the call's token.
        peer: the address as gRPC names it: "unix:", "ipv4:10.0.0.7:41318", "ipv6:%5B::1%5D:41318".
        certificate: the common name of the client's certificate, or "" if it showed none.
        quota: how many sessions the quota of the identity allows; None: there is no such quota.
    """

    owner: Principal
    peer: str
    certificate: str = ""
    quota: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether the client came through the UNIX socket, which only the daemon's user and root can open."""
        return self.peer.startswith("unix:")

    @property
    def place(self) -> str:
        """The place that the client comes from, for people."""
        return "the UNIX socket" if self.is_local else self.peer

    @property
    def standing(self) -> ClientStanding:
        """The kind of client, by the kept seats that it may take."""
        if self.owner.role is Role.ADMIN and (self.owner is not ANYONE or self.is_local):
            return ClientStanding.OPERATOR
        return ClientStanding.LOCAL if self.is_local else ClientStanding.REMOTE

    @property
    def identity(self) -> str:
        """The name of the client's token or certificate; "" for the operator, and for a client without either."""
        if self.standing is ClientStanding.OPERATOR:
            return ""
        if self.owner is not ANYONE:
            return f"token {self.owner.name}"
        return f"certificate {self.certificate!r}" if self.certificate else ""

    @property
    def address(self) -> str:
        """The remote machine's address without the port; "" for local clients and for the operator."""
        return (
            self.peer.rpartition(":")[0] if not self.is_local and self.standing is not ClientStanding.OPERATOR else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLimits:
    """The configuration of seats; config.py explains the values.

    Attributes:
        total: the number of seats.
        reserved: seats that only the operator may take; as many more are for clients of this node and the operator.
        per_identity, per_address: the most seats of one identity and of one address; None: as many as leave the seats
            `kept_for_others` free.
    """

    total: int
    reserved: int
    per_identity: int | None = None
    per_address: int | None = None

    @property
    def kept_for_others(self) -> int:
        """The free seats that a client which has as many already leaves to others: a quarter of all."""
        return max(1, self.total // 4)


class Seats:
    """The seats of all sessions."""

    def __init__(self, limits: SeatLimits) -> None:
        self._limits = limits
        self._taken = 0
        self._by_identity: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()

    def take(self, visitor: Visitor) -> None:
        """Take a seat.

        Raises:
            BudgetExceededError: a limit is reached. The text names the limit, its value and what is taken.
        """
        limits, kept = self._limits, self._kept_from(visitor.standing)
        if self._taken >= limits.total - kept:
            spare = f", and the {kept} that are left are kept for operators and clients of this node" if kept else ""
            raise BudgetExceededError(
                f"max_sessions: {self._taken} sessions are open, of {limits.total}{spare}; close some, or raise "
                "max_sessions"
            )
        opened = self._by_identity[visitor.identity]
        if visitor.identity and visitor.quota is not None and opened >= visitor.quota:
            raise BudgetExceededError(
                f"the quota of {visitor.identity}, sessions = {visitor.quota}, is used up: {opened} sessions are open; "
                "close one, or raise `sessions` in the daemon's `quotas`"
            )
        free = limits.total - kept - self._taken
        for key, who, taken, most in (
            ("identity", visitor.identity, self._by_identity, limits.per_identity),
            ("address", visitor.address, self._by_address, limits.per_address),
        ):
            if who and most is not None and taken[who] >= most:
                raise BudgetExceededError(
                    f"max_sessions_per_{key} = {most}: {who} has {taken[who]} sessions open; close some, or raise "
                    f"max_sessions_per_{key}"
                )
            if who and most is None and free <= limits.kept_for_others <= taken[who]:
                raise BudgetExceededError(
                    f"max_sessions = {limits.total}: {who} has {taken[who]} sessions open, and the {free} that are "
                    f"left are kept for other clients; close some, raise max_sessions, or set max_sessions_per_{key}"
                )
        self._count(visitor, 1)

    def release(self, visitor: Visitor) -> None:
        """Release a seat. Call this once for each seat, with the visitor that took it."""
        self._count(visitor, -1)

    def _kept_from(self, standing: ClientStanding) -> int:
        return {ClientStanding.OPERATOR: 0, ClientStanding.LOCAL: 1, ClientStanding.REMOTE: 2}[
            standing
        ] * self._limits.reserved

    def _count(self, visitor: Visitor, change: int) -> None:
        self._taken += change
        for who, taken in ((visitor.identity, self._by_identity), (visitor.address, self._by_address)):
            taken[who] += change
            if not taken[who]:
                del taken[who]
