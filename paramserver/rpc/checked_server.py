"""The registration of services' methods with gRPC, and the work that every call needs around its method.

Around each method it puts, in this order: the answer to any error that is raised, the check of the caller's token, the
receiving and the parsing of the request, the check of the right that the method declares (rpc/rights.py), and, for a
call with one answer, the limit that lets the answer come before the client's deadline. Requests are parsed here because
grpc.aio would end a call that it cannot parse with UNKNOWN, and a stack in the log.

[Note: requests of strangers] gRPC collects the request of a method that takes one request before it calls the method.
So a client without a token could have the daemon hold 16 MiB for each of 1024 calls on a connection, until the client
ends them. All methods here are therefore registered as if they took a stream of requests, which gRPC collects when it
is asked to. The bytes of a call are the same.

This module must never register a method that declares no right.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from paramserver.rpc.rights import MethodRights, Right, declaration_of
from paramserver.rpc.status import answering_errors, answering_in_time
from paramserver.security.gate import Context
from storage.base.errors import InvalidRequestError

# A function that checks the right to make one call, and returns the Principal or the Session that the right is about.
# The request is None if the client sends a stream of requests.
Admit = Callable[[Any, Context], Any]
# A function that takes the requests that gRPC gives, parses the request and checks the right. It returns the request,
# or all of them where the client sends a stream, and the result of Admit.
_Enter = Callable[[Any, Context], Awaitable[tuple[Any, Any]]]
# A function that gets the name, the status and the seconds of each call that has ended, and whether the call streams.
NoteCall = Callable[[str, grpc.StatusCode, float, bool], None]
# A function that calls a method with those of these arguments that the method takes: the request, the result of Admit,
# and the context.
_Invoke = Callable[[Any, Any, Context], Any]
# A function that makes a call of a session, unless the call is the repetition of one that was made, and returns the
# answer. It gets the session, the context, and a function that makes the call.
AnswerOnce = Callable[[Any, Context, Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]]

# The right that a caller must have before its request is received, where the request tells whether it has the right.
_BEFORE_REQUEST = {Right.SESSION: Right.TOKEN}
# The time in which the request of a caller who needs no token must come. It is a few bytes.
_STRANGER_SECONDS = 5.0

_STATUS_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class CheckedServer:
    """A gRPC server that calls each method only for a caller who has the right that the method declares."""

    def __init__(
        self,
        server: grpc.aio.Server,
        admission: Callable[[Right], Admit],
        describe_waits: Callable[[], str],
        note_call: NoteCall | None = None,
        answer_once: AnswerOnce | None = None,
    ) -> None:
        """Wrap a server that has not been started yet.

        Args:
            server: gRPC's server.
            admission: returns the check of a right.
            describe_waits: returns a text that says what requests wait for now, for clients whose deadline is near.
            note_call: counts calls that have ended; None: they are not counted.
            answer_once: makes the calls of sessions that have one answer; None: each request is a call of its own.
        """
        self._server = server
        self._admission = admission
        self._describe_waits = describe_waits
        self._note_call = note_call
        self._answer_once = answer_once

    def add(self, service: ServiceDescriptor, servicer: object, *, library_right: Right | None = None) -> None:
        """Add a service to the server.

        Args:
            service: the service's descriptor, which is made from the .proto file.
            servicer: has a method for each RPC of the service.
            library_right: the right that every method of a library's servicer asks for. Such methods declare no right,
                and take the request and the context from gRPC.

        Raises:
            TypeError: an RPC has no method that declares its right, or declares one that the RPC cannot have.
        """
        library = library_right and MethodRights(right=library_right, takes_caller=False, takes_context=True)
        handlers = {}
        for rpc in service.methods:
            method = getattr(servicer, rpc.name, None)
            if method is None or (declared := library or declaration_of(method)) is None:
                raise TypeError(f"{rpc.full_name} has no method that declares the right it asks for; see rpc/rights.py")
            if declared.right is Right.SESSION and "session_id" not in rpc.input_type.fields_by_name:
                raise TypeError(f"{rpc.full_name} asks for a session, which its request does not name")
            handlers[rpc.name] = self._handler(rpc, method, declared)
        self._server.add_registered_method_handlers(service.full_name, handlers)

    def _handler(self, rpc: MethodDescriptor, method: Callable[..., Any], declared: MethodRights) -> Any:
        admit, invoke = self._admission(declared.right), _invoke(method, declared)
        # A raw method needs no parser and no serializer, because it takes bytes from gRPC and returns bytes.
        parse = None if declared.is_raw else _refusing(GetMessageClass(rpc.input_type).FromString)
        serialize = None if declared.is_raw else GetMessageClass(rpc.output_type).SerializeToString
        if rpc.client_streaming:

            async def enter_stream(requests: Any, context: Context) -> tuple[Any, Any]:
                return requests, admit(None, context)

            # gRPC parses each message when the method takes it from the stream.
            behaviour = _streaming(rpc.name, enter_stream, method, invoke)
            return grpc.stream_stream_rpc_method_handler(self._noted(rpc.name, behaviour), parse, serialize)
        assert parse is not None
        admit_before = self._admission(_BEFORE_REQUEST.get(declared.right, declared.right))
        seconds = _STRANGER_SECONDS if declared.right is Right.NOTHING else None
        enter = _entering(parse, admit_before, seconds, admit)
        if rpc.server_streaming:
            behaviour = self._noted(rpc.name, _streaming(rpc.name, enter, method, invoke))
            return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        answer_once = self._answer_once if declared.right is Right.SESSION else None
        behaviour = _unary(rpc.name, enter, invoke, self._describe_waits, answer_once)
        noted = self._noted(rpc.name, behaviour, is_stream=False)
        return grpc.stream_unary_rpc_method_handler(noted, response_serializer=serialize)

    def _noted(self, name: str, behaviour: Callable[..., Any], *, is_stream: bool = True) -> Callable[..., Any]:
        """Return the behaviour of a method, with a note of each call at its end."""
        if (note := self._note_call) is None:
            return behaviour

        async def call(requests: Any, context: Context) -> Any:
            with _noting(note, name, context, is_stream=is_stream):
                return await behaviour(requests, context)

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            with _noting(note, name, context, is_stream=is_stream):
                async for response in behaviour(requests, context):
                    yield response

        return generate if inspect.isasyncgenfunction(behaviour) else call


@contextmanager
def _noting(note: NoteCall, name: str, context: Context, *, is_stream: bool) -> Iterator[None]:
    began = time.perf_counter()
    ended_by_client = False
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        ended_by_client = True
        raise
    finally:
        # gRPC has the code with which a method was aborted as its enum or, in some versions, as a number. It has 0 for
        # a method that was not aborted.
        given: Any = context.code()
        code = given if isinstance(given, grpc.StatusCode) else _STATUS_BY_NUMBER[given or 0]
        code = grpc.StatusCode.CANCELLED if ended_by_client else code
        note(name, code, time.perf_counter() - began, is_stream)


def _invoke(method: Callable[..., Any], declared: MethodRights) -> _Invoke:
    match declared.takes_caller, declared.takes_context:
        case True, True:
            return method
        case True, False:
            return lambda request, caller, _: method(request, caller)
        case False, True:
            return lambda request, _, context: method(request, context)
        case _:
            return lambda request, _, __: method(request)


def _entering(parse: Callable[[bytes], Any], admit_before: Admit, most_seconds: float | None, admit: Admit) -> _Enter:
    """Return a function that receives the one request of a call, once its caller is known, and checks the right.

    See [Note: requests of strangers]. The request must come within `most_seconds`, if that is given.
    """

    async def enter(_: Any, context: Context) -> tuple[Any, Any]:
        admit_before(None, context)
        try:
            async with asyncio.timeout(most_seconds):
                data = await context.read()
        except TimeoutError:
            raise InvalidRequestError(f"the request did not come for {most_seconds:g} s") from None
        if not isinstance(data, bytes):
            raise InvalidRequestError("the call has no request")
        request = parse(data)
        return request, admit(request, context)

    return enter


def _unary(
    name: str, enter: _Enter, invoke: _Invoke, describe_waits: Callable[[], str], answer_once: AnswerOnce | None
) -> Callable[..., Any]:
    async def call(requests: Any, context: Context) -> Any:
        async with answering_errors(context, name):
            request, caller = await enter(requests, context)

            async def work() -> Any:
                async with answering_in_time(context, describe_waits):
                    return await invoke(request, caller, context)

            try:
                return await (work() if answer_once is None else answer_once(caller, context, work))
            except NotImplementedError:
                # The health service's package declares methods that it does not implement. They answer with this.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have that method")

    return call


def _streaming(name: str, enter: _Enter, method: Callable[..., Any], invoke: _Invoke) -> Callable[..., Any]:
    """Return the behaviour of a method that yields its answers, or that writes them to the context."""

    async def call(requests: Any, context: Context) -> None:
        async with answering_errors(context, name):
            request, caller = await enter(requests, context)
            await invoke(request, caller, context)

    async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
        async with answering_errors(context, name):
            request, caller = await enter(requests, context)
            async for response in invoke(request, caller, context):
                yield response

    return generate if inspect.isasyncgenfunction(method) else call


def _refusing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def call(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise InvalidRequestError(f"the request is no valid message: {error}") from error

    return call
