"""The recorder adds up phases, stalls, gathers and bytes of a step, and keeps single spans only for a trace."""

from __future__ import annotations

import time

import pytest

from trainer_client.base import recorder as recorder_module
from trainer_client.base.recorder import Cause, Link, Recorder, StallKey


def test_the_phases_of_a_step_are_all_of_its_time() -> None:
    recorder = Recorder()
    for phase in ("forward", "backward", "idle", "step", "idle"):
        recorder.enter_phase(phase)
    first = recorder.end_step()
    recorder.enter_phase("forward")
    second = recorder.end_step()

    assert set(first.phases) == {"idle", "forward", "backward", "step"}
    assert sum(first.phases.values()) == pytest.approx(first.ended - first.began)
    assert set(second.phases) == {"idle", "forward"}
    assert second.began == first.ended


def test_stalls_are_added_up_by_phase_cause_and_place() -> None:
    recorder = Recorder()
    recorder.enter_phase("forward")
    recorder.stalled(Cause.FETCH, "blocks.0", 1.0, 1.5)
    recorder.stalled(Cause.FETCH, "blocks.0", 2.0, 2.25)
    recorder.stalled(Cause.UPDATE, "blocks.0", 3.0, 3.0)
    with recorder.waiting(Cause.RANKS, "a barrier"):
        pass
    sums = recorder.end_step()

    assert sums.stalls.pop(StallKey("forward", Cause.RANKS, "a barrier")) > 0
    assert sums.stalls == {StallKey("forward", Cause.FETCH, "blocks.0"): 0.75}, "no wait is no stall"
    assert recorder.end_step().stalls == {}


def test_a_gather_counts_without_its_waits() -> None:
    recorder = Recorder()
    with recorder.gathering("blocks.0"):
        began = time.monotonic()
        time.sleep(0.02)
        recorder.stalled(Cause.FETCH, "blocks.0", began, time.monotonic())
    (seconds,) = recorder.end_step().gather_seconds.values()

    assert 0 <= seconds < 0.02


def test_bytes_are_added_up_by_link() -> None:
    recorder = Recorder()
    recorder.moved(Link.FROM_STORE, "blocks.0", 100, time.monotonic())
    recorder.moved(Link.FROM_STORE, "blocks.1", 10, time.monotonic())
    sums = recorder.end_step()

    assert sums.link_bytes == {Link.FROM_STORE: 110}
    assert sums.link_seconds[Link.FROM_STORE] > 0


def test_spans_are_kept_only_while_a_trace_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    recorder.compute("forward", "blocks.0")
    recorder.stalled(Cause.FETCH, "blocks.0", 1.0, 2.0)
    trace = recorder.start_trace()
    assert recorder.is_tracing
    recorder.compute("forward", "")
    recorder.compute("backward", "blocks.0")
    recorder.stalled(Cause.COMMIT, "step 1", 3.0, 4.0)
    recorder.fetched("blocks.1", 5.0)
    spans = recorder.stop_trace(trace)

    assert [(span.row, span.name) for span in spans] == [
        ("compute", "forward (root)"),
        ("wait: commit", "step 1"),
        ("fetches", "blocks.1"),
        ("compute", "backward blocks.0"),
    ]
    assert not recorder.is_tracing
    recorder.fetched("blocks.2", 5.0)
    assert len(spans) == 4

    monkeypatch.setattr(recorder_module, "MAX_SPANS", 1)
    trace = recorder.start_trace()
    for _ in range(3):
        recorder.fetched("blocks.1", 5.0)
    assert len(recorder.stop_trace(trace)) == 1


def test_two_traces_at_once_have_each_their_own_spans() -> None:
    recorder = Recorder()
    first = recorder.start_trace()
    recorder.compute("forward", "blocks.0")
    second = recorder.start_trace()
    recorder.fetched("blocks.1", 5.0)
    recorder.stop_trace(first)
    recorder.compute("forward", "blocks.1")
    recorder.stop_trace(second)

    assert [span.name for span in first] == ["blocks.1", "forward blocks.0"]
    assert [span.name for span in second] == ["blocks.1", "forward blocks.0", "forward blocks.0", "forward blocks.1"]
    assert second[1].ended <= second[2].began, "what runs when the first trace ends is cut in two for the second"
