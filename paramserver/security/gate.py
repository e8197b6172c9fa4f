"""The gate that every call passes. It finds the principal behind the token, and refuses calls that it has no right to.

This module owns the texts of refusals. They are constant, so that they tell a stranger neither which jobs and sessions
exist nor how close a wrong token was. The operator finds the rest in the log: which method was refused, to which
address, and why. This module must never log a token.
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
    """The caller has no right to make the call. The client gets `code` and `text`; the message is for the log only."""

    code: grpc.StatusCode
    text: str


class UnauthenticatedError(RefusedError):
    """The call carries no token, an unknown one or an expired one."""

    code = grpc.StatusCode.UNAUTHENTICATED
    text = "the call needs a token that this daemon accepts, as metadata `authorization: Bearer TOKEN`"


class ForbiddenError(RefusedError):
    """The token does not allow the call. The answer is the same whether or not the job exists."""

    code = grpc.StatusCode.PERMISSION_DENIED
    text = "the token does not allow this"


class ForeignSessionError(RefusedError):
    """The session was opened with another token, or with other rights than the token has now."""

    code = grpc.StatusCode.NOT_FOUND
    text = "the session is unknown or has ended; open a new one"


class ForeignLoanError(RefusedError):
    """The loan was granted to another token or certificate, or to other rights than the token has now."""

    code = grpc.StatusCode.NOT_FOUND
    text = "the loan is unknown or has ended; borrow anew"


class Gate:
    """The check of the token that a call carries: whether it is valid, and which rights its principal has."""

    def __init__(self, tokens: TokenFile | None) -> None:
        """Make a gate that knows the given tokens.

        Args:
            tokens: the valid tokens. None if the gate demands no token, so that every client that reaches the daemon
                has all rights.
        """
        self._tokens = tokens

    def principal(self, context: Context) -> Principal:
        """Return the principal behind the call's token.

        Raises:
            UnauthenticatedError: the call carries no token, an unknown one or an expired one.
        """
        return self.principal_of(next((v for k, v in context.invocation_metadata() or () if k == AUTHORIZATION), None))

    def principal_of(self, given: str | bytes | None) -> Principal:
        """Return the principal behind the value of an authorization header, which is None if the call has no header.

        Any thread may call this.

        Raises:
            UnauthenticatedError: the header has no token, an unknown one or an expired one.
        """
        if self._tokens is None:
            return ANYONE
        if not isinstance(given, str) or given[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("no token")
        entry = self._tokens.find(given[len(_SCHEME) :])
        if entry is None:
            raise UnauthenticatedError("an unknown token")
        if entry.expired:
            raise UnauthenticatedError(f"token {entry.name} has expired")
        return entry.principal

    def require_admin(self, context: Context) -> Principal:
        """Check that the call's token is an admin's, and return its principal.

        Raises:
            UnauthenticatedError: the call carries no token, an unknown one or an expired one.
            ForbiddenError: the token does not have the role of an admin.
        """
        principal = self.principal(context)
        check_admin(principal)
        return principal

    def require_borrower(self, context: Context) -> Principal:
        """Check that the call's token allows to borrow memory, and return its principal.

        Raises:
            UnauthenticatedError: the call carries no token, an unknown one or an expired one.
            ForbiddenError: the token has neither the role of a borrower nor that of an admin.
        """
        principal = self.principal(context)
        if principal.role is Role.JOB:
            raise ForbiddenError(f"token {principal.name} is neither a borrower's nor an admin's")
        return principal


def check_no_borrower(principal: Principal) -> None:
    """Check that the principal may do more than borrow memory. Raise ForbiddenError if it may not."""
    if principal.role is Role.BORROWER:
        raise ForbiddenError(f"token {principal.name} is a borrower's")


def check_admin(principal: Principal) -> None:
    """Check that the principal is an admin. Raise ForbiddenError if it is not."""
    if principal.role is not Role.ADMIN:
        raise ForbiddenError(f"token {principal.name} is no admin's")


def certificate_name(context: Context) -> str:
    """Return the common name of the certificate that the client showed, or "" if the client showed none."""
    names = context.auth_context().get("x509_common_name", ())
    return next((printable(name.decode(errors="replace")) for name in names), "")


def check_job(principal: Principal, job: str) -> None:
    """Check that the principal may see and use a job, whether or not there is one of that name.

    Raises:
        ForbiddenError: the principal's token does not allow that job.
    """
    if not principal.allows(job):
        raise ForbiddenError(f"token {principal.name} does not allow job {job[:_MAX_NAME_LOGGED]!r}")


def check_deletion(principal: Principal, job: str) -> None:
    """Check that the principal may delete a job, whether or not there is one of that name.

    Raises:
        ForbiddenError: the principal's token does not allow the deletion.
    """
    if principal.allows_deletion(job):
        return
    if not principal.may_delete:
        raise ForbiddenError(f"token {principal.name} is no admin's, and may not delete jobs")
    raise ForbiddenError(f"token {principal.name} may delete its jobs, not job {job[:_MAX_NAME_LOGGED]!r}")


def check_owner(principal: Principal, owner: Principal) -> None:
    """Check that the principal is the one that opened a session, with the same rights as then.

    Raises:
        ForeignSessionError: the session is another principal's, or the token's rights have changed since.
    """
    if principal is not owner and principal != owner:
        raise ForeignSessionError(f"token {principal.name} asks for a session that {owner.name} has opened")


class RefusalLog:
    """A log of refusals that a client cannot use to fill the disk: of many refusals at once it logs only the number."""

    def __init__(self) -> None:
        self._logged = 0
        self._suppressed = 0

    def note(self, context: Context, method: str, error: RefusedError) -> None:
        """Log which method was refused to which address, and why. Call this on the event loop."""
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
