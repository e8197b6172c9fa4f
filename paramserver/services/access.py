"""The check of whether a call's caller has the right that the called method declares (rpc/rights.py).

This module owns nothing. It must never remember an answer, because tokens are withdrawn and sessions end between two
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from paramserver.contract.repeated_calls import KEY, CallMark
from paramserver.rpc.checked_server import Admit
from paramserver.rpc.rights import Right
from paramserver.security.gate import Context, Gate, check_no_borrower, check_owner
from paramserver.security.principals import Principal
from paramserver.sessions.log_context import note_in_logs
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import Sessions
from storage.base.errors import InvalidRequestError

OnSession = Callable[[Session, Context], None]


class Access:
    """The checks whether a caller has a right, one for each right that a method can declare."""

    def __init__(self, gate: Gate, sessions: Sessions, on_session: OnSession | None = None) -> None:
        """Make the checks, which look tokens up in `gate` and sessions in `sessions`.

        `on_session` is called for each admitted call of a session, with the session and gRPC's context of the call.
        """
        self._gate = gate
        self._sessions = sessions
        self._on_session = on_session

    def admission(self, right: Right) -> Admit:
        """Return the function that checks whether a call has a right.

        The function raises RefusedError or NotFoundError if the caller lacks the right.
        """
        match right:
            case Right.NOTHING:
                return _admit_everyone
            case Right.TOKEN:
                return self._admit_principal
            case Right.SESSION:
                return lambda request, context: self.session(request.session_id, context)
            case Right.BORROWER:
                return lambda _, context: self._gate.require_borrower(context)
            case Right.ADMIN:
                return self._admit_admin

    def session(self, session_id: str, context: Context) -> Session:
        """Return the session with an id.

        Raises:
            UnauthenticatedError: the call carries no token, an unknown one or an expired one.
            NotFoundError: the session has ended, or there never was one with this id.
            ForeignSessionError: another principal opened it.
        """
        caller = self._gate.principal(context)
        session = self._sessions.get(session_id)
        check_owner(caller, session.owner)
        note_in_logs(session)
        if self._on_session is not None:
            self._on_session(session, context)
        return session

    def _admit_principal(self, _: Any, context: Context) -> Principal:
        principal = self._gate.principal(context)
        check_no_borrower(principal)
        return principal

    def _admit_admin(self, _: Any, context: Context) -> Principal:
        return self._gate.require_admin(context)


async def answer_once(session: Session, context: Context, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Make a call of a session, unless it repeats one that was made; see sessions/answers.py. Return the answer.

    Raises:
        InvalidRequestError: the mark of the call is malformed.
    """
    try:
        mark = CallMark.of(context.invocation_metadata())
    except ValueError as error:
        raise InvalidRequestError(f"the metadata {KEY} are malformed: {error}") from error
    return await (work() if mark is None else session.answers.answer(mark, session.stream_number, work))


def _admit_everyone(_: Any, __: Context) -> None:
    """Admit a call to a method that demands no right."""
