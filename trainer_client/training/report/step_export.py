"""Traces of steps for an OpenTelemetry collector: a span for each step of this rank, and below it its operations.

The spans of operations are those of the recorder, which `step_trace.py` writes to a file. The daemon sends its own
spans to the collector. So that they belong to the step, each call of this rank to the daemon carries the step's span
(W3C's `traceparent`). The spans of a step of all ranks are in one trace, whose root is the span of rank 0. This module
owns the sender and the choice of the steps. It must never make a step wait.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paramserver.contract.otlp import OtlpError, SpanSender
from trainer_client.base.recorder import MAX_SPANS, Recorder, StepSums, TraceSpan
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.paramserver import TelemetrySection
from trainer_client.errors import ConfigError

_TRACE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class _ExportedStep:
    """A step under way that is exported: its OpenTelemetry span, and the list of its operations' spans.

    The recorder adds each operation of the step to the list.
    """

    span: Any
    spans: list[TraceSpan]


class StepExport:
    """Sends the spans of one rank's steps to an OpenTelemetry collector. The training thread calls `end_step`.

    Args:
        section: the config's section, which names the collector and the steps.
        recorder: records the spans of this rank.
        store: this rank's store, made with a `trace_parent`, by which its calls carry the step's span. A trace's id
            follows from the store's `run_id` and the step, so it is the same on all ranks.
        job: name of the job.
        rank: number of this rank.

    Raises:
        ConfigError: OpenTelemetry's packages are not installed.
    """

    def __init__(
        self,
        section: TelemetrySection,
        recorder: Recorder,
        store: RankStore,
        *,
        job: str,
        rank: int,
    ) -> None:
        attributes = {
            "service.name": "paramserver-trainer",
            "service.instance.id": f"{job}, rank {rank}",
            "host.name": socket.gethostname(),
            "process.pid": str(os.getpid()),
        }
        try:
            self._sender = SpanSender(section.endpoint, attributes)
        except OtlpError as error:
            raise ConfigError(f"paramserver.telemetry.endpoint = {section.endpoint!r}: {error}") from None
        self._every_steps = section.every_steps
        self._recorder = recorder
        assert store.trace_parent is not None
        self._trace_parent = store.trace_parent
        self._run_id = store.job.run_id
        self._job = job
        self._rank = rank
        # The number of steps that this run has made or skipped, from which each rank knows whether a step's spans are
        # exported. It is the same on all ranks.
        self._made = 0
        self._began = recorder.step_began
        self._step: _ExportedStep | None = None
        # A separate thread gives the spans of a step to the sender, because that takes some hundredths of a second, for
        # which the training thread must not wait.
        self._thread = ThreadPoolExecutor(1, "paramserver-telemetry")
        self._begin_if_due()

    def end_step(self, number: int, sums: StepSums) -> None:
        """End the span of step `number` of the job, and begin the span of the next step. The call does not wait."""
        self._finish(f"step {number}", sums.began, sums.ended, number)
        self._began = sums.ended
        self._made += 1
        self._begin_if_due()

    def close(self) -> None:
        """Send the spans that are not sent yet, as far as the collector takes them within some seconds.

        The next step may have been begun as a traced one. Its span ends here under the name "end of the run". It is
        sent although it is no step, because the daemon may have sent spans that are below it.
        """
        self._finish("end of the run", self._began, time.monotonic(), None)
        self._thread.shutdown()
        self._sender.close()

    def _begin_if_due(self) -> None:
        if self._made % self._every_steps:
            return
        trace_id = hashlib.blake2b(f"{self._run_id} {self._made}".encode(), digest_size=_TRACE_ID_BYTES).digest()
        span = self._sender.begin_shared("step", self._began, trace_id, is_root=self._rank == 0)
        self._step = _ExportedStep(span, self._recorder.start_trace())
        self._trace_parent.value = self._sender.traceparent_of(span)

    def _finish(self, name: str, began: float, ended: float, number: int | None) -> None:
        if self._step is None:
            return
        step, self._step, self._trace_parent.value = self._step, None, None
        spans = self._recorder.stop_trace(step.spans)
        step.span.update_name(name)
        attributes: dict[str, str | int] = {"paramserver.job": self._job, "paramserver.rank": self._rank}
        if number is not None:
            attributes["paramserver.step"] = number
        if len(spans) >= MAX_SPANS:
            attributes["paramserver.spans"] = f"only the first {MAX_SPANS}"
        self._thread.submit(self._send, step.span, spans, began, ended, attributes)

    def _send(
        self, span: Any, spans: Sequence[TraceSpan], began: float, ended: float, attributes: dict[str, str | int]
    ) -> None:
        parent = span.get_span_context()
        for one in spans:
            more: dict[str, str | int] = {"paramserver.row": one.row}
            if one.nbytes:
                more["paramserver.bytes"] = one.nbytes
            # A wait or a transfer may have begun before this step, so its span is cut off at the step's begin and end.
            self._sender.add(parent, f"{one.row}: {one.name}", max(one.began, began), min(one.ended, ended), more)
        self._sender.end(span, ended, attributes)
