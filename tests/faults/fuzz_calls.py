"""One call of the campaign of `fuzz.py`: its messages as bytes, its timing, its ending, and the allowed endings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.faults.fuzz_requests import fields_of

CODE = grpc.StatusCode
# The deadline of calls that need not wait for another client. The store must answer them before it.
DEADLINE_SECONDS = 10.0
# gRPC itself ends a call at its deadline. A call that has not ended this much later hangs.
HANG_SECONDS = 15.0
_FILES: tuple[FileDescriptor, ...] = (
    pb.DESCRIPTOR,
    admin_pb.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in _FILES
    for service in file.services_by_name.values()
    for method in service.methods
}
# By contract these calls last until another client has done something, or until their own client ends them.
_WAITING = (
    "AcquireLeases",
    "CommitStep",
    "WatchJob",
    "WatchTiers",
    "WatchEvents",
    "Session",
    "Read",
    "Write",
    "Watch",
    "BorrowMemory",
    "AccessLoan",
)
WAITING = frozenset(path for path, method in METHODS.items() if method.name in (*_WAITING, "ServerReflectionInfo"))

# A daemon that is being drained answers so to a client that wants a new session.
DRAINED = "the store daemon is being drained"

REFUSALS = {
    *(CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.ALREADY_EXISTS, CODE.FAILED_PRECONDITION),
    *(CODE.RESOURCE_EXHAUSTED, CODE.ABORTED, CODE.OUT_OF_RANGE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call as a client makes it.

    Attributes:
        path: the full name of the method.
        messages: the wire form of each request; one, unless the client streams.
        deadline_seconds: the deadline of the call.
        half_close: whether the client closes its side of the stream after the last message.
        cancel_seconds: the time after which the client cancels the call; None: it does not.
        reads: the number of answers of a stream that the client reads before it cancels the call.
    """

    path: str
    messages: tuple[bytes, ...]
    deadline_seconds: float
    half_close: bool = True
    cancel_seconds: float | None = None
    reads: int = 1 << 20

    @property
    def method(self) -> MethodDescriptor:
        """The descriptor of the method."""
        return METHODS[self.path]

    def renamed(self, old_session: str, session: str, ids: Mapping[int, int]) -> Call:
        """Return the same call for another session, with the ids of leases and readers replaced by `ids`."""
        messages = [data.replace(old_session.encode(), session.encode()) for data in self.messages]
        kind = GetMessageClass(self.method.input_type)
        for index, data in enumerate(messages):
            # Bytes that cannot be parsed as a message stay as they are.
            with contextlib.suppress(DecodeError):
                message = kind.FromString(data)
                found = list(fields_of(message, ("lease_id", "grad_lease_id", "reader_id")))
                for holder, name in found:
                    setattr(holder, name, ids.get(getattr(holder, name), getattr(holder, name)))
                messages[index] = message.SerializeToString() if found else data
        return replace(self, messages=tuple(messages))

    def to_json(self) -> dict[str, Any]:
        """Return the call as values for JSON; `from_json` is the inverse."""
        return asdict(self) | {"messages": [base64.b64encode(data).decode() for data in self.messages]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Call:
        """Return the call of which `to_json` made these values."""
        return cls(**fields | {"messages": tuple(base64.b64decode(text) for text in fields["messages"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a call: its status, the status's text, and the first answer. `code` is None if it did not end."""

    code: grpc.StatusCode | None
    details: str = ""
    answer: bytes | None = None


async def send(channel: grpc.aio.Channel, call: Call) -> Ending:
    """Make the call, and wait for its end."""
    try:
        async with asyncio.timeout(call.deadline_seconds + HANG_SECONDS):
            return await _send(channel, call)
    except TimeoutError:
        return Ending(code=None, details=f"no end {HANG_SECONDS:g} s after its deadline")


async def _send(channel: grpc.aio.Channel, call: Call) -> Ending:
    started = _start(channel, call)
    loop = asyncio.get_running_loop()
    timer = None if call.cancel_seconds is None else loop.call_later(call.cancel_seconds, started.cancel)
    answers: list[bytes] = []
    writing = asyncio.ensure_future(_write(started, call)) if call.method.client_streaming else None
    try:
        # A failed or cancelled call raises, and its status below has the reason.
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            if not call.method.server_streaming:
                answers.append(await started)
            else:
                await _read(started, call, answers)
        code, details = await started.code(), await started.details()
    finally:
        if timer is not None:
            timer.cancel()
        # If the call never began, its first message still waits to be written.
        if writing is not None:
            writing.cancel()
            await asyncio.wait([writing])
    return Ending(code=code, details=details or "", answer=answers[0] if answers else None)


def _start(channel: grpc.aio.Channel, call: Call) -> Any:
    kinds = "stream" if call.method.client_streaming else "unary", "stream" if call.method.server_streaming else "unary"
    multicallable = getattr(channel, "_".join(kinds))(call.path)
    arguments = () if call.method.client_streaming else call.messages
    return multicallable(*arguments, timeout=call.deadline_seconds)


async def _write(started: Any, call: Call) -> None:
    # The call may end at any time, and then nothing more can be written.
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError, asyncio.InvalidStateError):
        for message in call.messages:
            await started.write(message)
        if call.half_close:
            await started.done_writing()


async def _read(started: Any, call: Call, answers: list[bytes]) -> None:
    for _ in range(call.reads):
        answer = await started.read()
        if answer is grpc.aio.EOF:
            return
        answers[1:] = [answer]
    started.cancel()


def what_is_wrong(call: Call, ending: Ending) -> str | None:
    """Return the reason why the call must not have ended like this; None if it may."""
    code = ending.code
    if code is None:
        return ending.details
    if code is CODE.OK or code in REFUSALS:
        return None
    allowed = {
        CODE.CANCELLED: call.cancel_seconds is not None or call.method.server_streaming,
        CODE.DEADLINE_EXCEEDED: call.deadline_seconds < DEADLINE_SECONDS,
        # gRPC's client reports this instead of the real status when it writes to a call that has ended already.
        CODE.INTERNAL: call.method.client_streaming and ending.details == "Internal error from Core",
        CODE.DATA_LOSS: call.method.name in ("Write", "AccessLoan"),
        # Another client has called Drain.
        CODE.UNAVAILABLE: call.method.name in ("Session", "BorrowMemory") and DRAINED in ending.details,
        CODE.UNIMPLEMENTED: call.path == "/grpc.health.v1.Health/List",
    }
    return None if allowed.get(code, False) else f"it ended with {code.name}: {ending.details}"
