"""The right that each RPC demands of its caller, declared where the RPC's method is defined.

This module owns the declarations. It must never check a right: rpc/checked_server.py does, before the method runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_ATTRIBUTE = "declared_rights"


class Right(enum.Enum):
    """The right that a caller must have before a method runs.

    The right also decides what the method gets beside its request.
    """

    NOTHING = enum.auto()
    """Every client may call the method."""

    TOKEN = enum.auto()
    """The call carries a valid token, not a borrower's. The method gets the Principal, and checks what it may do."""

    SESSION = enum.auto()
    """The request's `session_id` names a session that the call's principal opened. The method gets the Session."""

    BORROWER = enum.auto()
    """The call's token is a borrower's or an admin's. The method gets the token's Principal."""

    ADMIN = enum.auto()
    """The call's token is an admin's. A method that declares `takes_caller` gets the Principal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRights:
    """The right that a method demands, and its arguments: `method(request[, principal or session][, context])`.

    Attributes:
        takes_context: the method gets gRPC's context as its last argument.
        is_raw: the method gets and returns messages as bytes, which are not parsed here.
        takes_caller: whether the method gets the Principal or the Session. A method that does not take it gets neither.
    """

    right: Right
    takes_context: bool = False
    is_raw: bool = False
    takes_caller: bool = True


def needs(
    right: Right, *, takes_context: bool = False, is_raw: bool = False, takes_caller: bool = False
) -> Callable[[MethodT], MethodT]:
    """Declare which right a method demands of its caller; see MethodRights for the other arguments.

    Methods with Right.TOKEN, Right.SESSION and Right.BORROWER always take their caller.

    Example:
        @needs(Right.SESSION)
        async def CloseReader(self, request: pb.CloseReaderRequest, session: Session) -> pb.CloseReaderResponse: ...
    """

    def declare(method: MethodT) -> MethodT:
        declaration = MethodRights(
            right=right,
            takes_context=takes_context,
            is_raw=is_raw,
            takes_caller=takes_caller or right in (Right.TOKEN, Right.SESSION, Right.BORROWER),
        )
        setattr(method, _ATTRIBUTE, declaration)
        return method

    return declare


def declaration_of(method: object) -> MethodRights | None:
    """Return the MethodRights that `needs` has attached to a method, or None."""
    return getattr(method, _ATTRIBUTE, None)
