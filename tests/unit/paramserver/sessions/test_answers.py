"""Each numbered call of a session is made once, whichever connections break meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from paramserver.contract.repeated_calls import MOST_ANSWERED, CallMark
from paramserver.errors import StaleCallError
from paramserver.sessions.answers import MOST_CALLS, Answers
from storage.base.errors import BudgetExceededError, ConflictError, InvalidRequestError


class Work:
    """A call that ends when it is allowed to, and counts how often it was made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self.goes_on = asyncio.Event()
        self._error = error

    async def __call__(self) -> str:
        self.made += 1
        await self.goes_on.wait()
        if self._error is not None:
            raise self._error
        return "the answer"


def begun(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(call)


def mark(number: int, stream: int = 0, answered: list[int] | None = None) -> CallMark:
    return CallMark(stream=stream, number=number, answered=answered or [])


async def test_a_call_whose_connection_breaks_goes_on_and_its_repetition_gets_the_answer() -> None:
    answers, work = Answers(), Work()
    first = begun(answers.answer(mark(1), 0, work))
    await asyncio.sleep(0)
    first.cancel()
    repeated = begun(answers.answer(mark(1, stream=1), 1, work))
    await asyncio.sleep(0)
    work.goes_on.set()

    assert await repeated == "the answer"
    assert await answers.answer(mark(1, stream=2), 2, work) == "the answer"
    assert work.made == 1


async def test_an_error_is_an_answer() -> None:
    answers, work = Answers(), Work(ConflictError("no"))
    work.goes_on.set()
    for stream in range(2):
        with pytest.raises(ConflictError, match="no"):
            await answers.answer(mark(1, stream), stream, work)
    assert work.made == 1


async def test_an_answer_is_forgotten_when_it_has_arrived_and_a_late_request_of_an_earlier_stream_is_not_made() -> None:
    answers, work = Answers(), Work()
    work.goes_on.set()
    await answers.answer(mark(1, stream=1), 1, work)
    await answers.answer(mark(2, stream=1, answered=[1]), 1, work)
    assert len(answers) == 1

    with pytest.raises(StaleCallError):
        await answers.answer(mark(1, stream=0), 1, work)
    assert work.made == 2


async def test_the_end_of_the_session_ends_the_calls_for_which_no_request_waits() -> None:
    answers, left, awaited = Answers(), Work(), Work()
    gone = begun(answers.answer(mark(1), 0, left))
    waiting = begun(answers.answer(mark(2), 0, awaited))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task(), waiting}
    answers.close()
    await asyncio.sleep(0.01)
    assert sum(task.cancelled() for task in others) == 1

    awaited.goes_on.set()
    assert await waiting == "the answer"


async def test_a_client_cannot_have_the_store_keep_answers_without_end() -> None:
    answers, work = Answers(), Work()
    work.goes_on.set()
    for number in range(MOST_CALLS):
        await answers.answer(mark(number), 0, work)
    with pytest.raises(BudgetExceededError, match="numbered calls of this session"):
        await answers.answer(mark(MOST_CALLS), 0, work)
    with pytest.raises(InvalidRequestError, match="answered calls"):
        await answers.answer(mark(0, answered=list(range(MOST_ANSWERED + 1))), 0, work)


@pytest.mark.parametrize("text", ["", "1", "1 2", "one 2 ", "1 2 3,", "1 2 " + "3," * 10_000])
def test_a_mark_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CallMark.of([("paramserver-call", text)])


def test_a_mark_comes_back_from_its_metadata() -> None:
    for one in (mark(7), mark(3, 2, [1, 2])):
        assert CallMark.of(one.to_metadata()) == one
    assert CallMark.of([("authorization", "Bearer x")]) is None
