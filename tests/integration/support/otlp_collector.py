"""A collector for OpenTelemetry's spans in this process: a gRPC server that keeps what is exported to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A span as it was received; ids are in hexadecimal digits, times in nanoseconds since 1970."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector:
    """The collector: its address, and what it has received so far."""

    endpoint: str = ""
    lock: Lock = field(default_factory=Lock)
    kept: list[Received] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)

    @property
    def spans(self) -> Sequence[Received]:
        """The spans received so far."""
        with self.lock:
            return list(self.kept)

    def of(self, service: str) -> Sequence[Received]:
        """Return the spans of one service."""
        return [span for span in self.spans if span.service == service]

    def Export(self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Take spans; the method that the protocol names."""
        with self.lock:
            self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
            for of_process in request.resource_spans:
                resource = _values(of_process.resource.attributes)
                for scope in of_process.scope_spans:
                    self.kept += [_received(str(resource["service.name"]), span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes=_values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Yield a collector that listens on the loopback within the block."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()
