"""Registers a service's methods so that bytes which are no message of theirs are refused like any other bad request.

grpc.aio parses requests before the method is called: what cannot be parsed ends with UNKNOWN there, and with a stack in
the log. Here it is the method's caller that parses.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paramserver.rpc.status import answering_errors, answering_in_time
from storage.errors import InvalidRequestError

Parse = Callable[[bytes], Any]
Behaviour = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


class CheckingServer:
    """Stands in for `server` where generated code adds a servicer to it."""

    def __init__(self, server: grpc.aio.Server, describe_waits: Callable[[], str]) -> None:
        """`describe_waits` says what requests wait for now, for those whose clients are about to give up."""
        self._server = server
        self._describe_waits = describe_waits

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Nothing: the generated code then gives the same methods by their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds the methods of a service to the server."""
        checking = {name: _checking(handler, self._describe_waits) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, checking)


def _checking(handler: Any, describe_waits: Callable[[], str]) -> Any:
    parse, serialize = _refusing(handler.request_deserializer), handler.response_serializer
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            behaviour = _unary(parse, handler.unary_unary, describe_waits)
            return grpc.unary_unary_rpc_method_handler(behaviour, response_serializer=serialize)
        case False, True:
            behaviour = _unary_stream(parse, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        case True, True:
            behaviour = _answering(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(behaviour, parse, serialize)
        case _:
            raise NotImplementedError("no method of ours takes a stream and gives one answer")


def _unary(parse: Parse, behaviour: Behaviour, describe_waits: Callable[[], str]) -> Behaviour:
    async def call(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with answering_errors(context):
            request = parse(data)
            try:
                async with answering_in_time(context, describe_waits):
                    return await behaviour(request, context)
            except NotImplementedError:
                # Methods that the health service's package declares and does not have.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have that method")

    return call


def _unary_stream(parse: Parse, behaviour: Behaviour) -> Behaviour:
    async def call(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with answering_errors(context):
            request = parse(data)
        async for response in behaviour(request, context):
            yield response

    async def call_once(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with answering_errors(context):
            request = parse(data)
        return await behaviour(request, context)

    return call if inspect.isasyncgenfunction(behaviour) else call_once


def _answering(behaviour: Behaviour) -> Behaviour:
    """The messages of a stream are parsed where the method takes them; what that raises is answered here."""

    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with answering_errors(context):
            await behaviour(requests, context)

    async def call_stream(
        requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        async with answering_errors(context):
            async for response in behaviour(requests, context):
                yield response

    return call_stream if inspect.isasyncgenfunction(behaviour) else call


def _refusing(parse: Parse) -> Parse:
    def call(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise InvalidRequestError(f"the request is no valid message: {error}") from error

    return call
