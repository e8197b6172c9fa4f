"""The reporter, which makes the report of each step and logs a line about it.

A report needs the counters of the store, which are requested when the step ends and arrive while the next step runs.
This module owns the last report and that request. It must never make a step wait; only a caller that asks for a report
waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.log_context import carried
from trainer_client.base.recorder import Recorder, StepSums
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.training.report.step_export import StepExport
from trainer_client.training.report.step_report import RankPlace, Roofline, StepReport, StoreWork, make_report
from trainer_client.training.report.step_trace import StepTrace
from trainer_client.training.step.gather_counters import GatherCounters, UnitGathers

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _ReportedStep:
    """A step that has ended.

    Attributes:
        number: number of the step in the job.
        sums: the times and counts that this rank has recorded in the step.
        gathers: counts of this rank's gathers.
        line: called with the report, to log a line; None: nothing is logged.
        answered: set when the store has answered, or failed to.
        report: the report; None before `answered` is set, or if it could not be made.
    """

    number: int
    sums: StepSums
    gathers: UnitGathers
    line: Callable[[StepReport], None] | None
    answered: threading.Event
    report: StepReport | None = None


class Reporter:
    """The reporter of one rank. The training thread calls `end_step`."""

    def __init__(
        self,
        recorder: Recorder,
        gathers: GatherCounters,
        store: RankStore,
        place: RankPlace,
        traces: Sequence[StepTrace | StepExport] = (),
    ) -> None:
        """Request the store's counters from before the first step. It does not wait.

        Args:
            recorder: records the times and counts of this rank.
            gathers: counts this rank's gathers.
            store: gives its counters.
            place: this rank's place in the job.
            traces: objects that get each step that ends.
        """
        self._recorder = recorder
        self._gathers = gathers
        self._store = store
        self._place = place
        self._traces = traces
        self._roofline = Roofline()
        # The times and counts that were recorded before the first step belong to no report.
        recorder.end_step()
        gathers.reset()
        self._before = pb.ReadCountersResponse()
        self._last: _ReportedStep | None = None
        store.read_counters().add_done_callback(self._begin)

    def end_step(self, number: int, line: Callable[[StepReport], None] | None = None) -> None:
        """End step `number`, and begin to make its report. It does not wait.

        Args:
            number: number of the step in the job.
            line: called with the report when it is made, on another thread.
        """
        sums = self._recorder.end_step()
        gathers = self._gathers.snapshot().total
        self._gathers.reset()
        line = None if line is None else carried(line, number)
        step = _ReportedStep(number=number, sums=sums, gathers=gathers, line=line, answered=threading.Event())
        self._last = step
        self._store.read_counters().add_done_callback(lambda future: self._answer(step, future))
        for trace in self._traces:
            trace.end_step(number, sums)

    def last(self) -> StepReport | None:
        """Return the report of the newest step, after waiting for the store's quick answer; None before the first."""
        step = self._last
        if step is None:
            return None
        step.answered.wait()
        return step.report

    def _begin(self, future: Future[pb.ReadCountersResponse]) -> None:
        if (reading := _reading(future)) is not None:
            self._before = reading

    def _answer(self, step: _ReportedStep, future: Future[pb.ReadCountersResponse]) -> None:
        """Make the report of `step`; runs on a thread of gRPC, once for each step and in their order."""
        try:
            work, reading = StoreWork(), _reading(future)
            if reading is not None and self._before.tiers:
                work = StoreWork.between(self._before, reading, restarts=step.sums.restarts)
            self._before = reading or self._before
            step.report = make_report(step.number, step.sums, step.gathers, work, self._place, self._roofline)
            if step.line is not None:
                step.line(step.report)
        except Exception:
            # The error is logged here, because no thread waits for this method to return. Training goes on without the
            # report.
            log.exception("the report of step %d could not be made", step.number)
        finally:
            step.answered.set()


def _reading(future: Future[pb.ReadCountersResponse]) -> pb.ReadCountersResponse | None:
    """Return the counters; None if the store did not answer.

    The next call that needs the store then raises the error.
    """
    try:
        return future.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        log.debug("the store's counters could not be read: %s", error)
        return None
