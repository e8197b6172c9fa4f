"""The interceptors by which a client adds metadata to its calls: its token, as the contract demands, and its trace."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

# The key of the gRPC metadata by which a client sends its trace to the daemon: the header of W3C Trace Context.
TRACEPARENT = "traceparent"


class _CallDetails(NamedTuple):
    """The description of a call, in the form that gRPC's interceptors pass on."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """The base of interceptors that add metadata to every call; a subclass says which, in `added`."""

    @abstractmethod
    def added(self) -> tuple[tuple[str, str], ...]:
        """Return the pairs of key and value that are added to the metadata of a call that begins now."""

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_more(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_more(client_call_details), request)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._with_more(client_call_details), request_iterator)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._with_more(client_call_details), request_iterator)

    def _with_more(self, details: Any) -> _CallDetails:
        return _CallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=[*(details.metadata or ()), *self.added()],
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )


class TokenBearer(_Bearer):
    """An interceptor that adds the client's token to every call, as the header `authorization`."""

    def __init__(self, token: str) -> None:
        self._added = (("authorization", f"Bearer {token}"),)

    def added(self) -> tuple[tuple[str, str], ...]:
        return self._added


class TraceParent(_Bearer):
    """An interceptor that adds W3C's `traceparent` to the metadata of every call, while there is a trace.

    Attributes:
        value: the header that names the span within which calls are made now. None if no trace is taken. One thread
            writes the value, and any thread may read it.
    """

    def __init__(self) -> None:
        self.value: str | None = None

    def added(self) -> tuple[tuple[str, str], ...]:
        value = self.value
        return () if value is None else ((TRACEPARENT, value),)
