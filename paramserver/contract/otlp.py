"""Spans sent to an OpenTelemetry collector over OTLP (gRPC), by the daemon and by trainers alike.

This module owns the queue of spans, the thread that sends them, and the channel to the collector. OpenTelemetry's
packages are an optional extra, so they are imported when a sender is made, and never before. This module must never
make the caller wait for the collector, nor raise because it does not answer: spans that it does not take are dropped,
and the log says so.

This module must never draw from Python's global random generator, because that belongs to the user's training, and a
trace must not change its numbers. So this module has its own ids and exporter; those of OpenTelemetry's SDK draw from
it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from paramserver.contract.bearer import TRACEPARENT
from paramserver.contract.channel import collector_channel

log = logging.getLogger(__name__)

# The type of a parent span, from this process or another one. The spans that this process sends become its children.
Parent: TypeAlias = Any

# The names of three environment variables of OpenTelemetry. HEADERS_VARIABLE has further metadata for the collector,
# such as a key. AUTHORITIES_VARIABLE has the PEM file of the authorities that sign the collector's certificate. If
# DISABLED_VARIABLE is "true", the process sends no spans.
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
AUTHORITIES_VARIABLE = "OTEL_EXPORTER_OTLP_CERTIFICATE"
DISABLED_VARIABLE = "OTEL_SDK_DISABLED"

# The most spans that this process queues for the collector; they take some 40 MB. While the queue is full, it drops
# further spans.
_QUEUED_SPANS = 50_000
_BATCH_SPANS = 512
_BATCH_DELAY_MILLIS = 1000
_EXPORT_SECONDS = 5.0
# The most seconds that a process waits at its end for a collector that does not answer.
_CLOSE_SECONDS = 5.0
# The least time between two log lines about a collector that does not answer, because it may be away for hours and must
# not fill the disk with log lines.
_LOG_INTERVAL_SECONDS = 60.0


class OtlpError(Exception):
    """Spans cannot be exported: packages are missing, or a file cannot be read."""


def is_disabled() -> bool:
    """Return whether OpenTelemetry is turned off in this process.

    The SDK's tracer makes no spans then, so no SpanSender can be used.
    """
    return os.environ.get(DISABLED_VARIABLE, "").strip().lower() == "true"


class SpanSender:
    """The object by which a process sends spans to the collector. Its methods may be called on any thread.

    No method but `close` waits: a thread of this object sends the queued spans.

    All times are those of time.monotonic(), in seconds.
    """

    def __init__(self, endpoint: str, attributes: Mapping[str, str]) -> None:
        """Connect to the collector, and start the thread that sends the queued spans to it.

        Args:
            endpoint: the address of the collector, which `check_collector` has accepted.
            attributes: a description of the process, with OpenTelemetry's names (`service.name` and so on).

        Raises:
            OtlpError: OpenTelemetry's packages are not installed, or the authorities' file cannot be read.
        """
        try:
            from opentelemetry import trace  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

            self._exporter = _Exporter(endpoint)
        except ImportError as error:
            raise OtlpError(
                f"OpenTelemetry's packages are not installed ({error}): pip install 'paramserver[telemetry]'"
            ) from error
        self._api: Any = trace
        self._propagator: Any = TraceContextTextMapPropagator()
        self._ids = _Ids()
        # The sampler keeps every span, because the caller decides which steps are traced, and makes no spans for other
        # steps.
        self._provider: Any = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(dict(attributes)),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=_QUEUED_SPANS,
            schedule_delay_millis=_BATCH_DELAY_MILLIS,
            max_export_batch_size=_BATCH_SPANS,
        )
        self._provider.add_span_processor(processor)
        self._tracer: Any = self._provider.get_tracer("paramserver")

    def begin(self, name: str, began: float, parent: Parent | None = None) -> Any:
        """Return a span that has begun; the caller passes it to `end`. Without a parent the span begins a trace."""
        context = self._api.set_span_in_context(self._api.NonRecordingSpan(parent or self._api.INVALID_SPAN_CONTEXT))
        return self._tracer.start_span(name, context=context, start_time=_unix_nanoseconds(began))

    def begin_shared(self, name: str, began: float, trace_id: bytes, *, is_root: bool) -> Any:
        """Return a span that has begun, in a trace that several processes share without asking each other.

        Args:
            name: the span's name.
            began: the time at which the span began.
            trace_id: 16 random bytes, the same in all of these processes.
            is_root: whether this process has the root of the trace. The spans of the other processes lie below the
                root.
        """
        trace, root = int.from_bytes(trace_id, "big") or 1, int.from_bytes(trace_id[:8], "big") or 1
        if is_root:
            self._ids.of_this_thread.next = (trace, root)
            return self.begin(name, began)
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self.begin(name, began, self._api.SpanContext(trace, root, is_remote=True, trace_flags=flags))

    def end(self, span: Any, ended: float, attributes: Mapping[str, str | int]) -> None:
        """End a span that was begun, and queue it for the collector."""
        span.set_attributes(dict(attributes))
        # `began` and `ended` are converted one after the other. Between the two conversions, the difference of the two
        # clocks may change by some hundred nanoseconds, so a shorter span could end before it begins. `max` prevents
        # that.
        span.end(max(span.start_time, _unix_nanoseconds(ended)))

    def add(self, parent: Parent, name: str, began: float, ended: float, attributes: Mapping[str, str | int]) -> None:
        """Queue a span that has both begun and ended, below `parent`."""
        self.end(self.begin(name, began, parent), ended, attributes)

    def parent_of(self, traceparent: str) -> Parent | None:
        """Return the span that a header names; None if the header is malformed, or the span's trace is not sampled."""
        context = self._propagator.extract({TRACEPARENT: traceparent})
        span = self._api.get_current_span(context).get_span_context()
        return span if span.is_valid and span.trace_flags.sampled else None

    def traceparent_of(self, span: Any) -> str:
        """Return the header that names a span."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._api.set_span_in_context(span))
        return headers[TRACEPARENT]

    def close(self) -> None:
        """Send the queued spans, as far as the collector takes them within some seconds, and drop all others."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        # The exporter's shutdown ends its attempts to send spans that the collector has not taken, so the thread can
        # end.
        self._exporter.shutdown()
        closing.join(_CLOSE_SECONDS)


class _Ids:
    """The generator of ids that the SDK asks for each new trace and span.

    Ids are random, unless this thread has set those of the next trace, which other processes share.
    """

    def __init__(self) -> None:
        self.of_this_thread = threading.local()

    def generate_trace_id(self) -> int:
        wanted: tuple[int, int] | None = getattr(self.of_this_thread, "next", None)
        return secrets.randbits(128) or 1 if wanted is None else wanted[0]

    def generate_span_id(self) -> int:
        # The tracer asks this generator for the trace's id first, and then for the root span's. So the ids that the
        # thread had set for its next trace are used up now, and are dropped.
        wanted: tuple[int, int] | None = getattr(self.of_this_thread, "next", None)
        self.of_this_thread.next = None
        return secrets.randbits(64) or 1 if wanted is None else wanted[1]

    def is_trace_id_random(self) -> bool:
        return True


class _Exporter:
    """The object that sends batches of spans to the collector. The SDK calls it on a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans  # noqa: PLC0415
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415
        from opentelemetry.util.re import parse_env_headers  # noqa: PLC0415

        self._encode: Any = encode_spans
        self._result: Any = SpanExportResult
        authorities = os.environ.get(AUTHORITIES_VARIABLE)
        try:
            self._channel = collector_channel(endpoint, Path(authorities) if authorities else None)
        except OSError as error:
            raise OtlpError(f"${AUTHORITIES_VARIABLE} = {authorities}: cannot be read: {error.strerror}") from error
        self._stub: Any = TraceServiceStub(self._channel)
        self._headers = tuple(parse_env_headers(os.environ.get(HEADERS_VARIABLE, ""), liberal=True).items())
        self._is_closed = False
        self._log_again_at = 0.0

    def export(self, spans: Sequence[Any]) -> Any:
        if self._is_closed:
            return self._result.FAILURE
        try:
            self._stub.Export(self._encode(spans), timeout=_EXPORT_SECONDS, metadata=self._headers)
        except (grpc.RpcError, ValueError) as error:
            # A call on a channel that another thread has closed raises ValueError, so that is logged like a failed
            # call.
            self._log(error, len(spans))
            return self._result.FAILURE
        return self._result.SUCCESS

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._channel.close()

    def _log(self, error: Exception, spans: int) -> None:
        if self._is_closed or time.monotonic() < self._log_again_at:
            return
        self._log_again_at = time.monotonic() + _LOG_INTERVAL_SECONDS
        reason = error.details() if isinstance(error, grpc.Call) else error
        log.warning("the OpenTelemetry collector did not take %d spans, which are dropped: %s", spans, reason)


def _unix_nanoseconds(at: float) -> int:
    """Return a time of time.monotonic() as nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)
