"""Who may open one more session: limits on all together, on one identity and on one address, and seats kept free.

Sessions are few, so each one that a client holds is one that others cannot have. The last seats are kept for clients of
the daemon's node, and the very last ones for the operator, so that no holder of a job's token can keep either out. Owns
the counts. Must never look into a session.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from paramserver.security.principals import ANYONE, Principal, Role
from storage.errors import BudgetExceededError


class Standing(enum.Enum):
    """How far into the kept seats a client may go."""

    OPERATOR = enum.auto()
    """The holder of an admin's token; without a token file, the user whose UNIX socket it is. May have every seat."""

    LOCAL = enum.auto()
    """A client of this node. Leaves the operator's seats free."""

    REMOTE = enum.auto()
    """Everybody else. Leaves the operator's and the local clients' seats free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Who asks for a session.

    Attributes:
        owner: the principal behind the call's token.
        peer: the address as gRPC names it: "unix:", "ipv4:10.0.0.7:41318", "ipv6:%5B::1%5D:41318".
        certificate: the common name of the client's certificate; empty where it showed none.
        quota: most sessions of the identity, where a quota says so.
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
    def standing(self) -> Standing:
        """How far into the kept seats the client may go."""
        if self.owner.role is Role.ADMIN and (self.owner is not ANYONE or self.is_local):
            return Standing.OPERATOR
        return Standing.LOCAL if self.is_local else Standing.REMOTE

    @property
    def identity(self) -> str:
        """Who the client is, for people; empty where it is the operator, or has shown neither token nor certificate."""
        if self.standing is Standing.OPERATOR:
            return ""
        if self.owner is not ANYONE:
            return f"token {self.owner.name}"
        return f"certificate {self.certificate!r}" if self.certificate else ""

    @property
    def address(self) -> str:
        """The remote machine, without its port; empty for local clients and for the operator."""
        return self.peer.rpartition(":")[0] if not self.is_local and self.standing is not Standing.OPERATOR else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLimits:
    """The configuration of seats; see config.py."""

    total: int
    reserved: int
    per_identity: int
    per_address: int


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
            BudgetExceededError: naming the limit, its value and what is taken.
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
        for key, who, taken, most in (
            ("identity", visitor.identity, self._by_identity, limits.per_identity),
            ("address", visitor.address, self._by_address, limits.per_address),
        ):
            if who and taken[who] >= most:
                raise BudgetExceededError(
                    f"max_sessions_per_{key} = {most}: {who} has {taken[who]} sessions open; close some, or raise "
                    f"max_sessions_per_{key}"
                )
        self._count(visitor, 1)

    def give_back(self, visitor: Visitor) -> None:
        """Give a seat back, once, with the visitor that took it."""
        self._count(visitor, -1)

    def _kept_from(self, standing: Standing) -> int:
        return {Standing.OPERATOR: 0, Standing.LOCAL: 1, Standing.REMOTE: 2}[standing] * self._limits.reserved

    def _count(self, visitor: Visitor, change: int) -> None:
        self._taken += change
        for who, taken in ((visitor.identity, self._by_identity), (visitor.address, self._by_address)):
            taken[who] += change
            if not taken[who]:
                del taken[who]
