"""A session collects the spans of its own job from its first call on, until its last call or its own end.

The number of spans that the daemon keeps is bounded.
"""

from __future__ import annotations

import pytest

from paramserver.services import tracing
from paramserver.services.tracing import Traces
from storage.base.tracing import Activity, Tracer


def note(tracer: Tracer, job: str, count: int = 1) -> None:
    for number in range(count):
        with tracer.span(Activity.NVME_WRITE, f"{job}/block.0/param at step {number}", 4096):
            pass


def test_a_session_gets_what_was_done_for_its_job_since_its_last_call() -> None:
    tracer = Tracer()
    traces = Traces(tracer)
    note(tracer, "mine")
    assert not traces.collect("session", "mine", ends=False).spans
    traces.collect("other session", "theirs", ends=False)
    note(tracer, "mine", 2)
    note(tracer, "theirs", 3)

    answer = traces.collect("session", "mine", ends=False)
    assert [span.subject for span in answer.spans] == [f"block.0/param at step {number}" for number in (0, 1)]
    assert {(span.activity, span.size_bytes) for span in answer.spans} == {("nvme write", 4096)}
    assert all(span.began_seconds <= span.ended_seconds <= answer.monotonic_seconds for span in answer.spans)
    assert not traces.collect("session", "mine", ends=False).spans, "each is told once"
    assert len(traces.collect("other session", "theirs", ends=True).spans) == 3


def test_nothing_is_kept_once_no_session_wants_it() -> None:
    tracer = Tracer()
    traces = Traces(tracer)
    for end in (lambda: traces.collect("session", "job", ends=True), lambda: traces.end_session("session")):
        assert not tracer.is_on
        traces.collect("session", "job", ends=False)
        assert tracer.is_on
        end()
    assert not tracer.is_on
    traces.end_session("session")
    assert not traces.collect("session", "job", ends=True).spans


def test_spans_that_there_is_no_room_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS", 2)
    tracer = Tracer()
    traces = Traces(tracer)
    traces.collect("session", "job", ends=False)
    note(tracer, "job", 5)

    answer = traces.collect("session", "job", ends=False)
    assert (len(answer.spans), answer.dropped) == (2, 3)
    note(tracer, "job")
    answer = traces.collect("session", "job", ends=True)
    assert (len(answer.spans), answer.dropped) == (1, 0)


def test_many_sessions_together_keep_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_SPANS_OF_ALL", 3)
    tracer = Tracer()
    traces = Traces(tracer)
    for session in range(3):
        traces.collect(str(session), "job", ends=False)
    note(tracer, "job", 5)

    answers = [traces.collect(str(session), "job", ends=True) for session in range(3)]
    assert sum(len(answer.spans) for answer in answers) == 3
    assert sum(answer.dropped for answer in answers) == 12
