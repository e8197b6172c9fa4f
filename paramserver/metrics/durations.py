"""Histograms of the durations of the daemon's work: its RPCs, and the operations that the engine traces.

They are updated while the daemon works, on any thread. This module owns their counts.
"""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from paramserver.metrics.families import PREFIX
from storage.base.tracing import Activity, Span

# The upper limits of the histograms' buckets, in seconds: from a lease that is granted from host memory (some 0.3 ms)
# to a wait for room in it (60 s, the default of admission_timeout_seconds).
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Durations:
    """The histograms of one daemon."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rpcs = Histogram(
            f"{PREFIX}rpc_seconds",
            "Duration of calls with one answer, by method and status code.",
            ("method", "code"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._streams = Counter(
            f"{PREFIX}streams",
            "Ended calls that stream, by method and status code.",
            ("method", "code"),
            registry=registry,
        )
        self._activities = Histogram(
            f"{PREFIX}operation_seconds",
            "Duration of the engine's operations.",
            ("operation",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._moved = Counter(
            f"{PREFIX}operation_bytes", "Bytes moved by the engine's operations.", ("operation",), registry=registry
        )
        # The label values exist from the beginning, so that a rate is known from the first operation on.
        self._of_activity = {
            activity: (self._activities.labels(_word(activity)), self._moved.labels(_word(activity)))
            for activity in Activity
        }

    def note_call(self, method: str, code: grpc.StatusCode, seconds: float, is_stream: bool) -> None:
        """Count an ended call."""
        if is_stream:
            self._streams.labels(method, code.name).inc()
        else:
            self._rpcs.labels(method, code.name).observe(seconds)

    def note_span(self, span: Span) -> None:
        """Count an operation of the engine that has ended."""
        seconds, moved = self._of_activity[span.activity]
        seconds.observe(span.ended_seconds - span.began_seconds)
        if span.nbytes:
            moved.inc(span.nbytes)


def _word(activity: Activity) -> str:
    return activity.value.replace(" ", "_")
