"""Who may make a call: finds the principal behind a token, and refuses what it may not do.

Owns the texts of refusals, which are constant: they tell a stranger neither what exists nor how near he was. What the
operator needs to know goes to the log instead: who asked for what, and why it was refused. Must never log a token.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeAlias

import grpc
import grpc.aio

from paramserver.contract.printable import printable
from paramserver.security.principals import ANYONE, Principal, Role
from paramserver.security.tokens import TokenFile

log = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

AUTHORIZATION = "authorization"
_SCHEME = "bearer "

MAX_REFUSALS_LOGGED = 10
REFUSAL_WINDOW_SECONDS = 1.0
_MAX_NAME_LOGGED = 80


class RefusedError(Exception):
    """A call that its caller may not make: `code` and `text` are the answer, the message is for the log."""

    code: grpc.StatusCode
    text: str


class UnauthenticatedError(RefusedError):
    """The call carries no token that counts."""

    code = grpc.StatusCode.UNAUTHENTICATED
    text = "the call needs a token that this daemon accepts, as metadata `authorization: Bearer TOKEN`"


class ForbiddenError(RefusedError):
    """The token does not allow the call, whether or not what it is about exists."""

    code = grpc.StatusCode.PERMISSION_DENIED
    text = "the token does not allow this"


class ForeignSessionError(RefusedError):
    """The session was opened with another token, or with other rights than the token has now."""

    code = grpc.StatusCode.NOT_FOUND
    text = "the session is unknown or has ended; open a new one"


class Gate:
    """What every call passes before it does anything."""

    def __init__(self, tokens: TokenFile | None) -> None:
        """None: no tokens are asked for, and whoever reaches the daemon may do everything."""
        self._tokens = tokens

    def principal(self, context: Context) -> Principal:
        """Who calls.

        Raises:
            UnauthenticatedError: the call carries no token that counts now.
        """
        if self._tokens is None:
            return ANYONE
        given = next((v for k, v in context.invocation_metadata() or () if k == AUTHORIZATION), None)
        if not isinstance(given, str) or given[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("no token")
        entry = self._tokens.find(given[len(_SCHEME) :])
        if entry is None:
            raise UnauthenticatedError("an unknown token")
        if entry.expired:
            raise UnauthenticatedError(f"token {entry.name} has expired")
        return entry.principal

    def require_admin(self, context: Context) -> None:
        """Raises UnauthenticatedError or ForbiddenError unless an admin calls."""
        principal = self.principal(context)
        if principal.role is not Role.ADMIN:
            raise ForbiddenError(f"token {principal.name} is no admin's")


def certificate_name(context: Context) -> str:
    """Return the common name of the certificate that the client showed; empty where it showed none."""
    names = context.auth_context().get("x509_common_name", ())
    return next((printable(name.decode(errors="replace")) for name in names), "")


def check_job(principal: Principal, job: str) -> None:
    """Raises ForbiddenError unless the principal may see and use a job, whether or not there is one of that name."""
    if not principal.allows(job):
        raise ForbiddenError(f"token {principal.name} does not allow job {job[:_MAX_NAME_LOGGED]!r}")


def check_deletion(principal: Principal, job: str) -> None:
    """Raises ForbiddenError unless the principal may delete a job, whether or not there is one of that name."""
    if principal.allows_deletion(job):
        return
    if not principal.may_delete:
        raise ForbiddenError(f"token {principal.name} is no admin's, and may not delete jobs")
    raise ForbiddenError(f"token {principal.name} may delete its jobs, not job {job[:_MAX_NAME_LOGGED]!r}")


def check_owner(principal: Principal, owner: Principal) -> None:
    """Raises ForeignSessionError unless the principal has the very rights with which a session was opened."""
    if principal is not owner and principal != owner:
        raise ForeignSessionError(f"token {principal.name} asks for a session that {owner.name} has opened")


class RefusalLog:
    """Logs refusals, but a flood of them only as a number: whoever floods must not fill the disk."""

    def __init__(self) -> None:
        self._logged = 0
        self._suppressed = 0

    def note(self, context: Context, method: str, error: RefusedError) -> None:
        """Logs who was refused which method, and why. Called on the event loop."""
        if self._logged == 0:
            asyncio.get_running_loop().call_later(REFUSAL_WINDOW_SECONDS, self._end_window)
        if self._logged == MAX_REFUSALS_LOGGED:
            self._suppressed += 1
            return
        self._logged += 1
        log.warning("refused %s from %s: %s", method, context.peer(), error)

    def _end_window(self) -> None:
        if self._suppressed:
            log.warning("refused %d more calls in the last second", self._suppressed)
        self._logged = self._suppressed = 0
