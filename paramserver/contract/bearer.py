"""The interceptor by which a client sends its token in the metadata of every call, as the contract demands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import grpc


class _CallDetails(NamedTuple):
    """The description of a call, in the form that gRPC's interceptors pass on."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class TokenBearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """An interceptor that adds the token to the metadata of every call."""

    def __init__(self, token: str) -> None:
        self._added = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(self._with_token(client_call_details), request_iterator)

    def _with_token(self, details: Any) -> _CallDetails:
        return _CallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=[*(details.metadata or ()), self._added],
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )
