"""The numbered calls of a session: each is made once, and its answer is kept until the client has it.

A client whose connection broke resumes its session and makes the calls again that were not answered. The store has made
some of them, and others are under way. So a numbered call is a task of its own, which goes on when its connection
breaks. A repetition waits for that task, or gets the answer that is kept.

This module owns these tasks and answers. It must never make two calls with one number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from paramserver.contract.repeated_calls import MOST_ANSWERED, CallMark
from paramserver.errors import StaleCallError
from storage.base.errors import BudgetExceededError, InvalidRequestError
from storage.base.waiting import unlogged

# The most calls of a session of which the answers are not known to have arrived. A trainer has some hundreds.
MOST_CALLS = 4096


@dataclass(slots=True)
class _Call:
    """A numbered call, and the number of requests that wait for it."""

    task: asyncio.Task[Any]
    waiting: int = 0


class Answers:
    """The numbered calls of one session."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    async def answer(self, mark: CallMark, newest_stream: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return what `work` returns, or what it has returned for an earlier request with the same number.

        Args:
            mark: the mark of the call.
            newest_stream: the number of the session's present stream.
            work: makes the call.

        Raises:
            StaleCallError: the request came over an earlier stream, and the call was not begun before.
            InvalidRequestError, BudgetExceededError: the client breaks the rules of the marks.
            Exception: the error that `work` raises, or has raised.
        """
        self._forget(mark.answered)
        call = self._calls.get(mark.number)
        if call is None:
            if mark.stream < newest_stream:
                raise StaleCallError("this call was made on an earlier stream of the session; make it again")
            if len(self._calls) >= MOST_CALLS:
                raise BudgetExceededError(
                    f"{MOST_CALLS} numbered calls of this session are under way, or have answers that are not known "
                    "to have arrived; name those that have"
                )
            call = self._calls[mark.number] = _Call(unlogged(asyncio.ensure_future(work())))
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiting -= 1
            if self._is_closed and not call.waiting:
                call.task.cancel()

    def _forget(self, answered: Sequence[int]) -> None:
        if len(answered) > MOST_ANSWERED:
            raise InvalidRequestError(f"a call names {len(answered)} answered calls; {MOST_ANSWERED} are allowed")
        for number in answered:
            if (call := self._calls.get(number)) is not None and call.task.done():
                del self._calls[number]

    def close(self) -> None:
        """Cancel the calls for which no request waits, and forget the answers, because the session has ended.

        The other calls are cancelled when their last request goes.
        """
        self._is_closed = True
        for call in self._calls.values():
            if not call.waiting:
                call.task.cancel()
        self._calls.clear()
