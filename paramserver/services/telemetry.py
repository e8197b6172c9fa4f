"""The store's part of the traces that trainers take for an OpenTelemetry collector.

A trainer names the span of its step in the metadata of its calls (W3C's `traceparent`). The engine's spans that belong
to the trainer's job, and that begin while that step is under way, become children of the step's span. This module owns
the sender of the spans, and which step of which job is traced. It must never send spans of a job whose trainer takes no
trace.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from paramserver.contract.bearer import TRACEPARENT
from paramserver.contract.otlp import Parent, SpanSender
from paramserver.security.gate import Context
from paramserver.sessions.session import Session
from storage.base.shard import LAYOUT_SEPARATOR
from storage.base.tracing import Activity, Span

# The most jobs of which the daemon remembers the trace's steps, and the most steps of each job. Several steps are
# needed, because an operation of the engine may end some steps after the one in which it began.
_MOST_JOBS = 256
_MOST_STEPS = 16


@dataclass(slots=True, eq=False)
class _Traced:
    """The last steps of one job, oldest first: the id of each step's trace, its begin, and its span.

    The id is "" and the span None for steps without a trace. Times are those of time.monotonic().

    Attributes:
        run_id: the run that has made the newest step.
        sessions: the ids of the sessions that have made a call of the newest step.
    """

    steps: deque[tuple[str, float, Parent | None]] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    run_id: str = ""
    sessions: set[str] = field(default_factory=set)

    def is_of_new_step(self, run_id: str, session_id: str, trace_id: str) -> bool:
        """Return whether a session's call is the first one of a step.

        A rank that is behind the others still makes calls of an earlier step, which must not begin that step anew. If
        such a call has no trace, it differs from one of a new step in this: its session has made no call of the newest
        step yet.
        """
        if run_id != self.run_id:
            self.run_id = run_id
            return True
        if trace_id == self.steps[-1][0]:
            self.sessions.add(session_id)
            return False
        if trace_id:
            return all(trace_id != known for known, _, _ in self.steps)
        return session_id in self.sessions

    def at(self, began: float) -> Parent | None:
        """Return the span of the step that was under way at a time; None if that step is not known, or had no trace."""
        return next((parent for _, since, parent in reversed(self.steps) if since <= began), None)


class Telemetry:
    """The object that sends the engine's spans of traced steps to the collector, below the trainers' spans.

    `note_call` is called on the event loop, `note_span` on any thread.
    """

    def __init__(self, sender: SpanSender) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _Traced] = OrderedDict()

    def note_call(self, session: Session, context: Context) -> None:
        """Keep the trace that a rank's call names in its metadata, if the call is the first one of a step."""
        if session.run is None:
            return
        given = next((value for key, value in context.invocation_metadata() or () if key == TRACEPARENT), "")
        header = str(given)
        name, now = session.run.spec.name, time.monotonic()
        with self._lock:
            traced = self._jobs.get(name)
            if traced is None:
                if not header:
                    return
                traced = self._jobs[name] = _Traced()
                if len(self._jobs) > _MOST_JOBS:
                    self._jobs.popitem(last=False)
            # All ranks send the same trace for a step. The first call of a rank for the step has a span, and the spans
            # of the engine's operations become children of that one.
            trace_id = _trace_id(header)
            if traced.is_of_new_step(session.run.run_id, session.session_id, trace_id):
                parent = self._sender.parent_of(header) if header else None
                traced.steps.append((trace_id, now, parent))
                traced.sessions = {session.session_id}
                self._jobs.move_to_end(name)

    def note_span(self, span: Span) -> None:
        """Send the span of an operation that has ended, if the step in which the operation began is traced."""
        # The spans of the background verification (scrub) are not sent, because it reads a job's bytes at any time, so
        # its spans belong to no step.
        if span.activity is Activity.SCRUB:
            return
        name = span.job.partition(LAYOUT_SEPARATOR)[0]
        with self._lock:
            traced = self._jobs.get(name)
            parent = None if traced is None else traced.at(span.began_seconds)
        if parent is not None:
            attributes: dict[str, str | int] = {"paramserver.job": name, "paramserver.subject": span.subject}
            if span.nbytes:
                attributes["paramserver.bytes"] = span.nbytes
            self._sender.add(parent, span.activity.value, span.began_seconds, span.ended_seconds, attributes)


def _trace_id(header: str) -> str:
    """Return the part of a `traceparent` that names the trace; "" for an empty header."""
    return header[3:35]
