"""Histograms of the durations of the daemon's work: its RPCs, and the operations that the engine traces.

The histograms are updated while the daemon works, on any thread. This module owns their counts.
"""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from paramserver.metrics.families import PREFIX
from storage.base.tracing import Activity, Span

# The upper limits of the histograms' buckets, in seconds. The shortest durations are leases that the store grants from
# host memory (some 0.3 ms), and the longest are waits for room in host memory (60 s, the default of
# admission_timeout_seconds).
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Durations:
    """The histograms and counters of the daemon's calls and operations, which `note_call` and `note_span` update."""

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
        # The time series of all activities are made at the start and not at the first operation of each, so that
        # Prometheus sees them at 0 and can compute rates that include the first operation.
        self._of_activity = {
            activity: (self._activities.labels(_word(activity)), self._moved.labels(_word(activity)))
            for activity in Activity
        }

    def note_call(self, method: str, code: grpc.StatusCode, seconds: float, is_stream: bool) -> None:
        """Count an ended call by method and status code. The duration is added only if the call has one answer."""
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
