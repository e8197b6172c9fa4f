"""A step trace: which steps it has, when its file is written, and how it converts times of the store's clock."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Recorder
from trainer_client.config.paramserver import TraceSection
from trainer_client.errors import ConfigError
from trainer_client.training.report.step_trace import StepTrace

WRITE_SECONDS = 10.0


class Store:
    """Stands in for a RankStore: answers at once, by a clock that is `ahead` seconds ahead of the trainer's.

    Each answer has one span, which lasts from the answer before it until now.
    """

    address = "unix:/nowhere"

    def __init__(self, ahead: float = 0.0, failure: Exception | None = None) -> None:
        self.ends: list[bool] = []
        self._ahead = ahead
        self._failure = failure
        self._last = self._now()

    def collect_spans(self, *, ends: bool) -> Future[pb.CollectSpansResponse]:
        self.ends.append(ends)
        answer: Future[pb.CollectSpansResponse] = Future()
        if self._failure is not None:
            answer.set_exception(self._failure)
            return answer
        now = self._now()
        span = pb.CollectSpansResponse.Span(
            activity="nvme read", subject="block.0", began_seconds=self._last, ended_seconds=now
        )
        self._last = now
        answer.set_result(pb.CollectSpansResponse(spans=[span], monotonic_seconds=now, dropped=int(ends)))
        return answer

    def _now(self) -> float:
        return time.monotonic() + self._ahead


class Steps:
    """Makes training steps, and reports the end of each to a StepTrace."""

    def __init__(self, path: Path, store: Store, *, rank: int = 0, **section: int) -> None:
        self.recorder = Recorder()
        made: Any = StepTrace(TraceSection(file=path, **section), self.recorder, store, rank)  # type: ignore[arg-type]
        self.trace: StepTrace = made
        self.made = 0

    def make(self, count: int) -> None:
        for _ in range(count):
            self.made += 1
            with self.recorder.waiting(Cause.FETCH, f"step {self.made}"):
                time.sleep(0.002)
            self.trace.end_step(100 + self.made, self.recorder.end_step())


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


def names(path: Path, row: str) -> list[str]:
    return [event["name"] for event in events(path) if event["cat"] == row]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WRITE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_steps_that_were_asked_for_are_written_one_step_later(tmp_path: Path) -> None:
    path, store = tmp_path / "step.json", Store()
    steps = Steps(path, store, first_step=2, steps=2)
    steps.make(1)
    assert store.ends == [False], "what the store does in the second step is wanted"
    steps.make(2)
    assert not path.exists(), "the store may still be at work for the third"
    steps.make(1)
    assert store.ends == [False, False, True]
    wait_for(path)
    steps.make(2)
    steps.trace.close()

    assert store.ends == [False, False, True]
    assert names(path, "steps") == ["step 102", "step 103"]
    assert names(path, "wait: fetch") == ["step 2", "step 3"]


def test_a_run_that_ends_writes_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "step.json"
    steps = Steps(path, Store(), rank=2, first_step=1, steps=5)
    steps.make(2)
    steps.trace.close()

    assert names(tmp_path / "step.rank2.json", "steps") == ["step 101", "step 102"]
    assert "lacks the last spans" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize("ahead", [0.0, 5_000.0, -5_000.0])
def test_the_stores_spans_are_on_our_clock(tmp_path: Path, ahead: float) -> None:
    path = tmp_path / "step.json"
    steps = Steps(path, Store(ahead), first_step=2, steps=2)
    steps.make(4)
    steps.trace.close()

    last = [event for event in events(path) if event["cat"] == "steps"][-1]
    reads = [event for event in events(path) if event["cat"] == "nvme read"]
    # The trace leaves out spans that are not within its steps, so spans whose clock was not converted would be missing.
    assert len(reads) >= 2
    assert all(event["ts"] >= -1 and event["ts"] + event["dur"] <= last["ts"] + last["dur"] + 1 for event in reads)


def test_a_store_that_does_not_answer_leaves_a_trace_of_the_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step.json"
    steps = Steps(path, Store(failure=grpc.FutureCancelledError()), first_step=1, steps=1)
    steps.make(2)
    steps.trace.close()

    assert names(path, "steps") == ["step 101"]
    assert "the trace lacks a part of what the store did" in caplog.text


def test_a_file_that_cannot_be_written_is_no_failure_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step.json"
    path.mkdir()
    steps = Steps(path, Store(), first_step=1, steps=1)
    steps.make(2)
    steps.trace.close()

    assert "could not be written" in caplog.text
    with pytest.raises(ConfigError, match="there is no directory for it"):
        Steps(tmp_path / "nowhere" / "step.json", Store())
