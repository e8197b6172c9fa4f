"""Makes the report of each step, with what the store says of its part, and the line of the log about it.

Owns the last report and the question to the store that is under way. Must never make a step wait: the answer comes
while the next one runs, and only who asks for a report waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.recorder import Recorder, StepSums
from trainer_client.report.step_report import Part, Roofline, StepReport, StoreWork, make_report
from trainer_client.report.step_trace import StepTrace
from trainer_client.step.gather_counters import GatherCounters, UnitGathers
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Step:
    """A step that has ended; `report` is there when the store has answered."""

    number: int
    sums: StepSums
    gathers: UnitGathers
    line: Callable[[StepReport], None] | None
    answered: threading.Event
    report: StepReport | None = None


class Reporter:
    """One for each rank; steps end on the thread that trains."""

    def __init__(
        self,
        recorder: Recorder,
        gathers: GatherCounters,
        store: RankStore,
        part: Part,
        trace: StepTrace | None = None,
    ) -> None:
        """Asks the store for its counters as they are before the first step. Does not wait.

        Args:
            trace: is told the steps.
        """
        self._recorder = recorder
        self._gathers = gathers
        self._store = store
        self._part = part
        self._trace = trace
        self._roofline = Roofline()
        # What came before is no step's.
        recorder.end_step()
        gathers.reset()
        self._before = pb.ReadCountersResponse()
        self._last: _Step | None = None
        store.read_counters().add_done_callback(self._begin)

    def end_step(self, number: int, line: Callable[[StepReport], None] | None = None) -> None:
        """A step is made.

        Args:
            line: is given the report when it is there, on another thread.
        """
        sums = self._recorder.end_step()
        gathers = self._gathers.snapshot().total
        self._gathers.reset()
        step = _Step(number=number, sums=sums, gathers=gathers, line=line, answered=threading.Event())
        self._last = step
        self._store.read_counters().add_done_callback(lambda future: self._answer(step, future))
        if self._trace is not None:
            self._trace.end_step(number, sums)

    def last(self) -> StepReport | None:
        """The report of the newest step; None before the first. Waits for the store's answer, which is quick."""
        step = self._last
        if step is None:
            return None
        step.answered.wait()
        return step.report

    def _begin(self, future: Future[pb.ReadCountersResponse]) -> None:
        if (reading := _reading(future)) is not None:
            self._before = reading

    def _answer(self, step: _Step, future: Future[pb.ReadCountersResponse]) -> None:
        """On the thread of gRPC; answers come in the order of the questions."""
        try:
            work, reading = StoreWork(), _reading(future)
            if reading is not None and self._before.tiers:
                work = StoreWork.between(self._before, reading)
            self._before = reading or self._before
            step.report = make_report(step.number, step.sums, step.gathers, work, self._part, self._roofline)
            if step.line is not None:
                step.line(step.report)
        except Exception:
            # Nobody else would hear of it: training goes on without the report.
            log.exception("the report of step %d could not be made", step.number)
        finally:
            step.answered.set()


def _reading(future: Future[pb.ReadCountersResponse]) -> pb.ReadCountersResponse | None:
    """None where the store did not answer: whoever needs it is told so by the next call that matters."""
    try:
        return future.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        log.debug("the store's counters could not be read: %s", error)
        return None
