"""No RPC is served without the right that its method declares, and a refusal names the RPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2

from paramserver.rpc.checked_server import CheckedServer
from paramserver.rpc.rights import Right, declaration_of, needs
from paramserver.security.gate import ForbiddenError
from paramserver.services.parameter_store import ParameterStore
from paramserver.services.store_admin import StoreAdmin
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb

STORE = pb.DESCRIPTOR.services_by_name["ParameterStore"]
ADMIN = admin_pb.DESCRIPTOR.services_by_name["StoreAdmin"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]

# The rights of the RPCs that need neither a session (the others of ParameterStore) nor an admin (of StoreAdmin).
OTHERWISE = dict.fromkeys(
    ("Session", "Read", "Write", "DeleteJob", "KeepStep", "ForgetStep", "ListKeptSteps", "BeginCopy", "ReportReplica"),
    Right.TOKEN,
) | dict.fromkeys(("BorrowMemory", "AccessLoan"), Right.BORROWER)


class Context:
    """The part of gRPC's servicer context that CheckedServer uses, with the request that a client sends."""

    def __init__(self, request: bytes = b"") -> None:
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.request: bytes | None = request

    async def read(self) -> object:
        """Return the request, once."""
        request, self.request = self.request, None
        return grpc.aio.EOF if request is None else request

    async def abort(self, code: grpc.StatusCode, text: str, trailing_metadata: object = ()) -> None:
        self.status = code, text
        raise grpc.aio.AbortError

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"


class Server:
    """A stand-in for gRPC's server, which keeps the handlers that are added."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"{service}/{name}": handler for name, handler in handlers.items()})


class Admission:
    """Admits each caller, or refuses each with `error`, and records for which right each was checked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Right] = []
        self._error = error

    def __call__(self, right: Right) -> Any:
        def admit(request: Any, context: Any) -> str:
            self.asked.append(right)
            if self._error is not None:
                raise self._error
            return f"whom {right.name} admits"

        return admit


def added(service: ServiceDescriptor, servicer: object, admission: Admission, **options: Any) -> dict[str, Any]:
    server: Any = Server()
    CheckedServer(server, admission, lambda: "nothing").add(service, servicer, **options)
    return dict(server.handlers)


@pytest.fixture
def store() -> Iterator[Any]:
    """A servicer of ParameterStore whose methods record in `calls` with which arguments they were called."""
    calls: list[tuple[object, ...]] = []

    def method(name: str) -> Any:
        async def answer(_: object, *arguments: object) -> object:
            calls.append((name, *arguments))
            return "the answer"

        async def generate(_: object, *arguments: object) -> AsyncIterator[object]:
            calls.append((name, *arguments))
            yield "the answer"

        return generate if name == "WatchJob" else answer

    declared = {
        rpc.name: needs(OTHERWISE.get(rpc.name, Right.SESSION), takes_context=rpc.client_streaming)(method(rpc.name))
        for rpc in STORE.methods
    }
    yield type("Store", (), {**declared, "calls": calls})()


@pytest.mark.parametrize(
    ("service", "kind", "usual"), [(STORE, ParameterStore, "SESSION"), (ADMIN, StoreAdmin, "ADMIN")]
)
def test_every_rpc_of_the_daemon_declares_the_right_that_it_asks_for(
    service: ServiceDescriptor, kind: type, usual: str
) -> None:
    declared = {rpc.name: declaration_of(getattr(kind, rpc.name, None)) for rpc in service.methods}
    assert {name: found and found.right for name, found in declared.items()} == {
        name: OTHERWISE.get(name, Right[usual]) for name in declared
    }


@pytest.mark.parametrize("forgotten", [None, "undeclared"])
def test_a_method_without_a_declared_right_is_not_served(store: Any, forgotten: str | None) -> None:
    async def undeclared(_: object, request: object) -> None: ...

    type(store).ListVersions = undeclared if forgotten else None
    with pytest.raises(TypeError, match=r"ParameterStore\.ListVersions has no method that declares the right"):
        added(STORE, store, Admission())


def test_a_method_that_asks_for_a_session_which_its_request_does_not_name_is_not_served(store: Any) -> None:
    type(store).Session = needs(Right.SESSION)(type(store).Session)
    with pytest.raises(TypeError, match=r"ParameterStore\.Session asks for a session"):
        added(STORE, store, Admission())


async def test_a_method_runs_only_after_its_right_was_checked_and_gets_what_the_right_is_about(store: Any) -> None:
    admission, context = Admission(), Context()
    handlers = added(STORE, store, admission)
    request = pb.ListVersionsRequest(session_id="one")
    list_versions = handlers[f"{STORE.full_name}/ListVersions"].stream_unary
    assert await list_versions(None, Context(request.SerializeToString())) == "the answer"
    watch = handlers[f"{STORE.full_name}/WatchJob"].stream_stream
    assert [answer async for answer in watch(None, Context())] == ["the answer"]
    await handlers[f"{STORE.full_name}/Session"].stream_stream("requests", context)
    assert store.calls == [
        ("ListVersions", request, "whom SESSION admits"),
        ("WatchJob", pb.WatchJobRequest(), "whom SESSION admits"),
        ("Session", "requests", "whom TOKEN admits", context),
    ]
    # A session is named in the request, which is received from a caller with a token only.
    assert admission.asked == [Right.TOKEN, Right.SESSION, Right.TOKEN, Right.SESSION, Right.TOKEN]


@pytest.mark.parametrize("rpc", [rpc.name for rpc in STORE.methods])
async def test_no_method_runs_for_a_caller_without_the_right_and_the_log_names_the_rpc(
    store: Any, rpc: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserver.rpc.status._refusals._logged", 1)
    context = Context()
    handler = added(STORE, store, Admission(ForbiddenError("token bob is not allowed that")))[
        f"{STORE.full_name}/{rpc}"
    ]
    behaviour = handler.stream_unary or handler.stream_stream
    with pytest.raises(grpc.aio.AbortError), caplog.at_level(logging.WARNING):
        if rpc == "WatchJob":
            await anext(behaviour(None, context))
        else:
            await behaviour(None, context)
    assert context.request is not None, "the request was received"
    assert context.status == (grpc.StatusCode.PERMISSION_DENIED, ForbiddenError.text)
    assert store.calls == []
    assert caplog.messages == [f"refused {rpc} from unix:: token bob is not allowed that"]


@pytest.mark.parametrize("request_", [b"\xff", None])
async def test_a_request_that_is_no_message_is_refused_before_its_session_is_asked_for(
    store: Any, request_: bytes | None
) -> None:
    admission, context = Admission(), Context()
    context.request = request_
    handlers = added(STORE, store, admission)
    with pytest.raises(grpc.aio.AbortError):
        await handlers[f"{STORE.full_name}/ListVersions"].stream_unary(None, context)
    assert context.status is not None
    assert context.status[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert admission.asked == [Right.TOKEN]


async def test_a_librarys_methods_get_what_grpc_gives_behind_the_right_that_is_said_for_all() -> None:
    admission, context = Admission(), Context()
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    handlers = added(HEALTH, servicer, admission, library_right=Right.NOTHING)
    answer = await handlers[f"{HEALTH.full_name}/Check"].stream_unary(None, context)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert set(admission.asked) == {Right.NOTHING}
    assert set(handlers) == {f"{HEALTH.full_name}/{rpc.name}" for rpc in HEALTH.methods}


class SlowContext(Context):
    """The context of a call whose deadline comes while a method's own refusal is being sent."""

    async def abort(self, code: grpc.StatusCode, text: str = "", trailing_metadata: object = ()) -> None:
        if self.status is not None:
            raise grpc.aio.UsageError("Abort already called!")
        self.status = code, text
        await asyncio.Event().wait()

    def time_remaining(self) -> float:  # type: ignore[override]
        return 0.05


async def test_a_librarys_refusal_that_the_deadline_overtakes_ends_the_call_quietly() -> None:
    request = health_pb2.HealthCheckRequest(service="unknown").SerializeToString()
    context = SlowContext(request)
    handlers = added(HEALTH, health.aio.HealthServicer(), Admission(), library_right=Right.NOTHING)
    # gRPC logs a stack for every other error of a method.
    with pytest.raises(asyncio.CancelledError):
        await handlers["grpc.health.v1.Health/Check"].stream_unary(None, context)
    assert context.status is not None and context.status[0] is grpc.StatusCode.NOT_FOUND
