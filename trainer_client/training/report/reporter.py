"""The reporter, which makes the report of each step and logs a line about it.

A report needs the counters of the store, which are requested when the step ends and arrive while the next step runs.
This module owns the last report and the request of the counters. It must never make a step wait. Only a caller that
asks for a report waits until the counters have come.
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
    """A step that has ended, with its report as soon as the report is made.

    Attributes:
        number: number of the step in the job.
        sums: the times and counts that this rank has recorded in the step.
        gathers: counts of this rank's gathers.
        line: called with the report, to log a line; None: nothing is logged.
        answered: set when the store's counters have come or the request for them has failed, and the report is made.
        report: the report; None before `answered` is set, or if it could not be made.
    """

    number: int
    sums: StepSums
    gathers: UnitGathers
    line: Callable[[StepReport], None] | None
    answered: threading.Event
    report: StepReport | None = None


class Reporter:
    """Makes one rank's report of each step, and has a line about the step logged.

    The training thread calls `end_step`. `last` returns the newest report.
    """

    def __init__(
        self,
        recorder: Recorder,
        gathers: GatherCounters,
        store: RankStore,
        place: RankPlace,
        traces: Sequence[StepTrace | StepExport] = (),
    ) -> None:
        """Request the store's counters before the first step, as the first report needs them. It does not wait.

        Args:
            recorder: records the times and counts of this rank.
            gathers: counts this rank's gathers.
            store: this rank's store, which gives the daemon's counters.
            place: the sizes of the model and of the job, as the report needs them.
            traces: the traces of this rank, whose `end_step` is called for each step that ends.
        """
        self._recorder = recorder
        self._gathers = gathers
        self._store = store
        self._place = place
        self._traces = traces
        self._roofline = Roofline()
        # No report may contain the times and counts that were recorded before the first step, so they are dropped now.
        recorder.end_step()
        gathers.reset()
        self._before = pb.ReadCountersResponse()
        self._last: _ReportedStep | None = None
        store.read_counters().add_done_callback(self._begin)

    def end_step(self, number: int, line: Callable[[StepReport], None] | None = None) -> None:
        """End step `number`, and request the counters for its report. The call does not wait.

        Args:
            number: number of the step in the job.
            line: called on another thread with the report, when it is made; None: no line is logged.
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
        """Wait for the store's counters, and return the report of the newest step; None before the first step."""
        step = self._last
        if step is None:
            return None
        step.answered.wait()
        return step.report

    def _begin(self, future: Future[pb.ReadCountersResponse]) -> None:
        if (reading := _reading(future)) is not None:
            self._before = reading

    def _answer(self, step: _ReportedStep, future: Future[pb.ReadCountersResponse]) -> None:
        """Make the report of `step` from the counters that `future` has.

        gRPC calls this on a thread of its own, once for each step and in the order of the steps.
        """
        try:
            work, reading = StoreWork(), _reading(future)
            if reading is not None and self._before.tiers:
                work = StoreWork.between(self._before, reading, restarts=step.sums.restarts)
            self._before = reading or self._before
            step.report = make_report(step.number, step.sums, step.gathers, work, self._place, self._roofline)
            if step.line is not None:
                step.line(step.report)
        except Exception:
            # An error of a report is logged and not raised, because no thread waits for the report. Training goes on
            # without it.
            log.exception("the report of step %d could not be made", step.number)
        finally:
            step.answered.set()


def _reading(future: Future[pb.ReadCountersResponse]) -> pb.ReadCountersResponse | None:
    """Return the store's counters that `future` has; None if the store did not answer.

    The error is logged and not raised here, because the next call of the training to the store raises one.
    """
    try:
        return future.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        log.debug("the store's counters could not be read: %s", error)
        return None
