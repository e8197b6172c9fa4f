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
    """The three kinds of clients. They differ in which of the seats that are kept free they may take."""

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
        quota: how many sessions the quota of the client's token allows; None if it has no such quota.
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
        """The UNIX socket, or the remote address and port, from which the client connects, for logs."""
        return "the UNIX socket" if self.is_local else self.peer

    @property
    def standing(self) -> ClientStanding:
        """The kind of client; the daemon keeps some seats free for operators, and some for clients of its node."""
        if self.owner.role is Role.ADMIN and (self.owner is not ANYONE or self.is_local):
            return ClientStanding.OPERATOR
        return ClientStanding.LOCAL if self.is_local else ClientStanding.REMOTE

    @property
    def identity(self) -> str:
        """The name of the client's token or certificate, by which its sessions are counted for `per_identity`.

        It is "" for the operator, and for a client without a token and a certificate. Their sessions are not counted.
        """
        if self.standing is ClientStanding.OPERATOR:
            return ""
        if self.owner is not ANYONE:
            return f"token {self.owner.name}"
        return f"certificate {self.certificate!r}" if self.certificate else ""

    @property
    def address(self) -> str:
        """The remote machine's address without the port, by which its sessions are counted for `per_address`.

        It is "" for local clients and for the operator, whose sessions are not counted.
        """
        return (
            self.peer.rpartition(":")[0] if not self.is_local and self.standing is not ClientStanding.OPERATOR else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLimits:
    """The limits on the number of sessions that the configuration sets; config.py explains the keys.

    Attributes:
        total: the number of seats.
        reserved: seats that only the operator may take; as many more are for clients of this node and the operator.
        per_identity, per_address: the most seats of one identity and of one address; None if only
            `kept_for_others` limits them.
    """

    total: int
    reserved: int
    per_identity: int | None = None
    per_address: int | None = None

    @property
    def kept_for_others(self) -> int:
        """A quarter of all seats: one client with that many gets no more when so few are free.

        This holds for clients whose identity or address has no limit of its own, so that none takes the last seats.
        """
        return max(1, self.total // 4)


class Seats:
    """The count of the seats that are taken. `Sessions` takes one for each session that it opens."""

    def __init__(self, limits: SeatLimits) -> None:
        self._limits = limits
        self._taken = 0
        self._by_identity: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()

    def take(self, visitor: Visitor) -> None:
        """Take a seat for a session of a client, or refuse it.

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
