"""The registration of services' methods with gRPC, and the work that every call needs around its method.

Around each method this module puts, in this order: the answer to any error that is raised, the check of the caller's
token, the receiving and the parsing of the request, the check of the right that the method declares (rpc/rights.py),
and, for a call with one answer, the limit that lets the answer come before the client's deadline. Requests are parsed
here because grpc.aio would end a call that it cannot parse with UNKNOWN, and a stack in the log.

[Note: requests of strangers] gRPC collects the request of a method that takes one request before it calls the method.
So a client without a token could have the daemon hold 16 MiB for each of 1024 calls on a connection, until the client
ends them. All methods here are therefore registered as if they took a stream of requests, which gRPC collects when it
is asked to. The bytes of a call on the wire are the same, so clients notice no difference.

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

# A function that checks the right of the caller to make one call. It returns the Principal or the Session that has the
# right. The request that it gets is None if the client sends a stream of requests.
Admit = Callable[[Any, Context], Any]
# A function that runs before a method: it takes what gRPC gives as the request, parses it and checks the caller's
# right. It returns the parsed request, or the stream of requests, and the result of Admit.
_Enter = Callable[[Any, Context], Awaitable[tuple[Any, Any]]]
# A function that is called with the name, the status and the seconds of each call that has ended, and with whether the
# call streams.
NoteCall = Callable[[str, grpc.StatusCode, float, bool], None]
# A function that calls a service's method. It gets the request, the result of Admit, and the context, and passes those
# of them that the method takes.
_Invoke = Callable[[Any, Any, Context], Any]
# A function that makes a call of a session and returns the answer. If the call repeats an earlier one of the session,
# it returns the answer of that one. It gets the session, the context, and a function that makes the call.
AnswerOnce = Callable[[Any, Context, Callable[[], Coroutine[Any, Any, Any]]], Awaitable[Any]]

# The right that the server checks before it receives the request, by the method's own right. The two differ only for
# Right.SESSION: the request names the session, so only the token can be checked before.
_BEFORE_REQUEST = {Right.SESSION: Right.TOKEN}
# The seconds within which a caller that needs no token must send its request. Such a request has a few bytes.
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
            admission: returns for a right the function that checks whether a call has it, and raises an error if not.
            describe_waits: returns a text that says what requests wait for now, for clients whose deadline is near.
            note_call: counts calls that have ended. None if calls are not counted.
            answer_once: makes each call of a session that has one answer, and finds repetitions of a call. None if a
                repeated request is made again.
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
        # A method that is declared as raw takes bytes from gRPC and returns bytes, so gRPC gets no parser and no
        # serializer for it.
        parse = None if declared.is_raw else _refusing(GetMessageClass(rpc.input_type).FromString)
        serialize = None if declared.is_raw else GetMessageClass(rpc.output_type).SerializeToString
        if rpc.client_streaming:

            async def enter_stream(requests: Any, context: Context) -> tuple[Any, Any]:
                return requests, admit(None, context)

            # In a stream of requests, gRPC parses each message only when the method takes it from the stream. So the
            # token is checked before any message of a stranger is parsed.
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
        """Return a handler that calls `behaviour`, and passes each call's status and duration to `note_call`."""
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
        # If a method aborted its call, gRPC gives the status code as its enum or, in some versions, as a number. If the
        # method did not abort, gRPC gives 0.
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
                # gRPC's package of the health service declares methods that it does not implement. A call of such a
                # method is answered with this code, and not logged as a failure of the daemon.
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this server does not have that method")

    return call


def _streaming(name: str, enter: _Enter, method: Callable[..., Any], invoke: _Invoke) -> Callable[..., Any]:
    """Return a handler for gRPC of a method that yields its answers, or that writes them to the context."""

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
