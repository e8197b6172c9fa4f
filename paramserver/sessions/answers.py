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

# The most numbered calls of a session that are under way, or whose answers the client has not confirmed yet. A trainer
# has some hundreds. Further calls are refused.
MOST_CALLS = 4096


@dataclass(slots=True)
class _Call:
    """The task that makes a numbered call, and how many requests wait for its answer."""

    task: asyncio.Task[Any]
    waiting: int = 0


class Answers:
    """The calls of one session to which its client has given numbers, with their answers.

    A client repeats a call with the same number after its connection broke. This table finds the call by the number, so
    that the call is made only once, and the repetition gets its answer.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    async def answer(self, mark: CallMark, newest_stream: int, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the result of `work`; for a repeated request, the result that the first request's `work` has.

        Args:
            mark: the number of the call, the stream over which it came, and the numbers of calls whose answers have
                arrived at the client, so that their answers are forgotten now.
            newest_stream: the number of the session's present stream. A new call from an earlier stream is refused.
            work: makes the call. It is not used if a call with this number was begun before.

        Raises:
            StaleCallError: the request came over an earlier stream, and the call was not begun before.
            InvalidRequestError, BudgetExceededError: the mark names too many answered calls, or the session has
                MOST_CALLS other calls.
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

        A call for which requests wait is cancelled when the last of these requests is gone.
        """
        self._is_closed = True
        for call in self._calls.values():
            if not call.waiting:
                call.task.cancel()
        self._calls.clear()
