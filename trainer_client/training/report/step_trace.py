"""A trace of some steps of a run: one file with the operations of this rank and of the store, and their times.

This module owns the choice of the steps, the spans that the store has sent, and the thread that writes the file. It
must never make a step wait, nor end the training because the trace cannot be written.

[Note: two clocks] The daemon's spans are on the clock of its node. Each response of the daemon has the reading of that
clock at the moment when it was sent. As with NTP, this rank assumes that this moment is half-way between its request
and the response, with an error of at most half the round trip. It uses the measurement with the shortest round trip. If
the two clocks differ by less than the error of this measurement, rank and daemon are taken to be on one node and to use
the same clock, so the difference is taken as 0.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.log_context import carried
from trainer_client.base.recorder import (
    COMPUTE_ROW,
    FETCHES_ROW,
    GATHERS_ROW,
    MAX_SPANS,
    PHASES_ROW,
    Recorder,
    StepSums,
    TraceSpan,
)
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.paramserver import TraceSection
from trainer_client.errors import ConfigError
from trainer_client.training.report.perfetto import Process, write_trace

log = logging.getLogger(__name__)

STEPS_ROW = "steps"
_ROWS = (STEPS_ROW, PHASES_ROW, COMPUTE_ROW, GATHERS_ROW, FETCHES_ROW)
# The most seconds that the run waits at its end for the store's last spans and until the trace's file is written.
_CLOSE_SECONDS = 10.0


class _State(enum.Enum):
    BEFORE = enum.auto()
    """The first step to be traced has not begun."""

    TRACING = enum.auto()
    """Spans are recorded, by this rank and by the store."""

    DRAINING = enum.auto()
    """The traced steps are over. Only the store still records, because its work for these steps may still go on."""

    OVER = enum.auto()
    """No spans are recorded any more. The file is being written, was written, or will not be written."""


@dataclass(frozen=True, slots=True)
class _ClockSample:
    """One measurement of the daemon's clock, in seconds.

    The daemon's clock is `offset` ahead of the clock of this process, with an error of at most `round_trip / 2`.
    """

    round_trip: float
    offset: float


class StepTrace:
    """Writes the trace of one rank: records the spans of the chosen steps, and then writes them to a file.

    The training thread calls `end_step`.

    Args:
        section: the config's section, which names the file and the steps.
        recorder: records the spans of this rank.
        store: this rank's store, which is asked for the daemon's spans.
        rank: number of this rank. Each rank but 0 adds its number to the name of its file.

    Raises:
        ConfigError: the directory for the file does not exist.
    """

    def __init__(self, section: TraceSection, recorder: Recorder, store: RankStore, rank: int) -> None:
        self._path = section.file.absolute()
        if rank:
            self._path = self._path.with_name(f"{self._path.stem}.rank{rank}{self._path.suffix}")
        if not self._path.parent.is_dir():
            raise ConfigError(f"paramserver.trace.file = {str(section.file)!r}: there is no directory for it: make it")
        self._section = section
        self._recorder = recorder
        self._store = store
        self._rank = rank
        self._state = _State.BEFORE
        # The number of steps that this run has made or skipped. By this number, the trace begins and ends at the
        # configured steps.
        self._made = 0
        self._steps: list[TraceSpan] = []
        self._spans: list[TraceSpan] = []
        self._answers: list[Future[pb.CollectSpansResponse]] = []
        self._clock: list[_ClockSample] = []
        self._writer: threading.Thread | None = None
        self._begin_if_due()

    def end_step(self, number: int, sums: StepSums) -> None:
        """End step `number` of the job, and begin or end the trace if that is due. The call does not wait."""
        self._made += 1
        if self._state is _State.DRAINING:
            self._finish()
        if self._state is _State.TRACING:
            self._steps.append(TraceSpan(row=STEPS_ROW, name=f"step {number}", began=sums.began, ended=sums.ended))
            if len(self._steps) < self._section.steps:
                self._collect(ends=False)
            else:
                self._recorder.stop_trace(self._spans)
                self._state = _State.DRAINING
        self._begin_if_due()

    def close(self) -> None:
        """End the trace because the run ends, and wait until the file with the steps traced so far is written."""
        if self._state is _State.TRACING:
            self._recorder.stop_trace(self._spans)
        if self._state in (_State.TRACING, _State.DRAINING):
            self._finish()
        elif self._state is _State.BEFORE:
            log.warning(
                "no trace was written: the run made %d steps, and paramserver.trace.first_step is %d",
                *(self._made, self._section.first_step),
            )
            self._state = _State.OVER
        if self._writer is not None:
            self._writer.join(_CLOSE_SECONDS)

    def _begin_if_due(self) -> None:
        if self._state is _State.BEFORE and self._made == self._section.first_step - 1:
            self._state = _State.TRACING
            self._spans = self._recorder.start_trace()
            self._collect(ends=False)

    def _collect(self, *, ends: bool) -> None:
        asked = time.monotonic()
        answer = self._store.collect_spans(ends=ends)
        self._answers.append(answer)
        answer.add_done_callback(partial(self._on_answer, asked))

    def _on_answer(self, asked: float, answer: Future[pb.CollectSpansResponse]) -> None:
        came = time.monotonic()
        if answer.exception() is None:
            offset = answer.result().monotonic_seconds - (asked + came) / 2
            self._clock.append(_ClockSample(came - asked, offset))

    def _finish(self) -> None:
        self._state = _State.OVER
        self._collect(ends=True)
        # A separate thread writes the trace's file, because that takes some tenths of a second, for which training must
        # not wait.
        self._writer = threading.Thread(target=carried(self._write), name="paramserver-trace", daemon=True)
        self._writer.start()

    def _write(self) -> None:
        if not self._steps:
            log.warning("no trace was written: the run ended within the first step to be traced")
            return
        answers = list(self._responses())
        offset = _offset(self._clock)
        store = [_from_store(span, offset) for answer in answers for span in answer.spans]
        began, ended = self._steps[0].began, self._steps[-1].ended
        processes = [
            Process(name=f"rank {self._rank}", spans=[*self._steps, *_within(self._spans, began, ended)]),
            Process(name=f"store daemon at {self._store.address}", spans=_within(store, began, ended)),
        ]
        try:
            write_trace(self._path, processes, began, _ROWS)
        except OSError as error:
            log.error("the trace of %s could not be written to %s: %s", self._named_steps, self._path, error)
            return
        log.info("the trace of %s is in %s: open it at https://ui.perfetto.dev", self._named_steps, self._path)
        dropped = sum(answer.dropped for answer in answers)
        if dropped or len(self._spans) >= MAX_SPANS:
            log.warning("%s lacks the last spans, because there were too many: trace fewer steps", self._path)

    def _responses(self) -> Iterator[pb.CollectSpansResponse]:
        for answer in self._answers:
            try:
                yield answer.result(_CLOSE_SECONDS)
            except (grpc.RpcError, grpc.FutureCancelledError, TimeoutError) as error:
                log.warning("the trace lacks a part of what the store did, because it did not answer: %s", error)

    @property
    def _named_steps(self) -> str:
        first, last = self._steps[0].name, self._steps[-1].name
        return first if first == last else f"{first} to {last}"


def _offset(samples: Iterable[_ClockSample]) -> float:
    """Return by how many seconds the daemon's clock is ahead of this process's; see [Note: two clocks]."""
    best = min(samples, key=lambda sample: sample.round_trip, default=_ClockSample(0.0, 0.0))
    return 0.0 if abs(best.offset) <= best.round_trip / 2 else best.offset


def _from_store(span: pb.CollectSpansResponse.Span, offset: float) -> TraceSpan:
    return TraceSpan(
        row=span.activity,
        name=span.subject,
        began=span.began_seconds - offset,
        ended=span.ended_seconds - offset,
        nbytes=span.size_bytes,
    )


def _within(spans: Iterable[TraceSpan], began: float, ended: float) -> list[TraceSpan]:
    """Return the parts of the spans that lie between `began` and `ended`, in seconds of the spans' clock."""
    return [
        replace(span, began=max(span.began, began), ended=min(span.ended, ended))
        for span in spans
        if span.began < ended and span.ended > began
    ]
