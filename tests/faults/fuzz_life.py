"""A client of the campaign of `fuzz.py`: a session that opens a job of its own and then sends random calls.

This module owns its channel and its session. Remembers all calls that it has sent, so that a failure can be replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from paramserver.contract.channel import NO_PROXY, target_of
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_pb_grpc
from storage.base.shard import TierName
from tests.faults.fuzz_calls import DEADLINE_SECONDS, DRAINED, METHODS, WAITING, Call, Ending, send
from tests.faults.fuzz_requests import Known, Requests, encoded
from tests.integration.support.daemon import CHANNEL_OPTIONS
from tests.unit.storage.builders import Layout

STORE = "/paramserver.v1.ParameterStore/"
HEARTBEAT_SECONDS = 0.5
OnEnding = Callable[["Life", Call, Ending], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A call that was sent. `granted` are the ids of leases and readers in the store's answer."""

    call: Call
    granted: tuple[int, ...]


class Life:
    """One session from its first to its last call; see `live`."""

    def __init__(self, address: str, rng: random.Random, name: str, *, jobs: list[str], strangers: list[str]) -> None:
        self.history: list[Sent] = []
        self._address = address
        self._rng = rng
        placement = rng.choice((TierName.NVME, TierName.HOST))
        layout = Layout(name=name, numels=(3_000, 17), groups=("a", "b"), weights=placement, with_skips=False)
        self.known = Known(session_id="", layout=layout, jobs=[name, *jobs], strangers=strangers)
        self._requests = Requests(rng, self.known)

    async def live(self, calls: int, report: OnEnding) -> None:
        """Open a session and make `calls` calls.

        Most sessions begin with the valid calls that open and fill a job. At the end, half of them close the session
        properly, and the others only close the channel.
        """
        await self._in_session(self._calls, calls, report)

    async def replay(self, history: list[Sent], old_session: str, report: OnEnding) -> None:
        """Send the calls of an earlier session again, with the ids of this one."""
        await self._in_session(self._replay, history, old_session, report)

    async def _in_session(self, act: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        channel = grpc.aio.insecure_channel(target_of(self._address), options=[*NO_PROXY, *CHANNEL_OPTIONS])
        try:
            # No client maps the arena, so the daemon holds back what a client that says this was writing to.
            session, self.known.session_id = await _open(channel, registers_arena=self._rng.random() < 0.3)
            leaving = asyncio.Event()
            beating = asyncio.ensure_future(_beat(session, leaving))
            try:
                await act(channel, *arguments)
                # Half of the clients close their session properly. The others disappear without it.
                if self._rng.random() < 0.5:
                    leaving.set()
                    await asyncio.wait([beating])
            finally:
                beating.cancel()
                await asyncio.wait([beating])
        finally:
            await channel.close()

    async def _calls(self, channel: grpc.aio.Channel, calls: int, report: OnEnding) -> None:
        beginning = self._beginning() if self._rng.random() < 0.9 else []
        for number in range(calls):
            call = beginning[number]() if number < len(beginning) else self._draw()
            await self._send(channel, call, report)

    async def _replay(self, channel: grpc.aio.Channel, history: list[Sent], old_session: str, report: OnEnding) -> None:
        renamed: dict[int, int] = {}
        for sent in history:
            call = sent.call.renamed(old_session, self.known.session_id, renamed)
            await self._send(channel, call, report)
            renamed |= zip(sent.granted, self.history[-1].granted, strict=False)

    async def _send(self, channel: grpc.aio.Channel, call: Call, report: OnEnding) -> None:
        ending = await send(channel, call)
        granted = self._learn(call, ending)
        self.history.append(Sent(call=call, granted=granted))
        report(self, call, ending)

    # --- what to send

    def _beginning(self) -> list[Callable[[], Call]]:
        """Return valid calls that open a job, commit its initial values, and acquire leases."""

        def valid(method: str) -> Callable[[], Call]:
            return lambda: self._valid(STORE + method)

        def stage() -> Call:
            slabs = [pb.SlabName(group=group, kind=pb.KIND_PARAM) for group in self.known.layout.groups]
            wants = [pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE) for slab in slabs]
            request = pb.AcquireLeasesRequest(session_id=self.known.session_id, wants=wants)
            return Call(path=STORE + "AcquireLeases", messages=(encoded(request),), deadline_seconds=1.0)

        def publish() -> Call:
            releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease, publish=True) for lease in self.known.leases]
            request = pb.ReleaseLeasesRequest(session_id=self.known.session_id, releases=releases)
            return Call(path=STORE + "ReleaseLeases", messages=(encoded(request),), deadline_seconds=DEADLINE_SECONDS)

        return [valid("OpenJob"), valid("RegisterShards"), stage, publish, valid("CommitStep"), valid("AcquireLeases")]

    def _valid(self, path: str) -> Call:
        request = encoded(self._requests.valid(METHODS[path].input_type))
        return Call(path=path, messages=(request,), deadline_seconds=DEADLINE_SECONDS if path not in WAITING else 1.0)

    def _draw(self) -> Call:
        rng = self._rng
        # Few calls go to the health and reflection services, because they are gRPC's own and not under test.
        ours = [path for path in METHODS if path.startswith("/paramserver.")]
        path = rng.choice(ours if rng.random() < 0.97 else list(METHODS))
        method = METHODS[path]
        deadline = DEADLINE_SECONDS if path not in WAITING else rng.choice((0.01, 0.1, 0.3))
        if rng.random() < 0.05:
            deadline = rng.choice((0.001, 0.01))
        stream = method.client_streaming
        return Call(
            path=path,
            messages=self._requests.stream(method.input_type)
            if stream
            else (self._requests.spoiled(method.input_type),),
            deadline_seconds=deadline,
            half_close=not stream or rng.random() < 0.7,
            cancel_seconds=rng.choice((0.0, 0.001, 0.01, 0.05)) if rng.random() < 0.15 else None,
            reads=rng.choice((0, 1, 3, 1 << 20)) if method.server_streaming else 1 << 20,
        )

    # --- what the answers say

    def _learn(self, call: Call, ending: Ending) -> tuple[int, ...]:
        """Keep what an answer says about leases, readers and steps, and return the ids that it granted."""
        if ending.code is not grpc.StatusCode.OK or ending.answer is None or not call.path.startswith(STORE):
            return ()
        known = self.known
        match call.method.name:
            case "AcquireLeases":
                wants = pb.AcquireLeasesRequest.FromString(call.messages[0]).wants
                leases = pb.AcquireLeasesResponse.FromString(ending.answer).leases
                known.leases |= {lease.lease_id: want for lease, want in zip(leases, wants, strict=True)}
                known.sizes |= {lease.lease_id: lease.size_bytes for lease in leases}
                return tuple(lease.lease_id for lease in leases)
            case "ReleaseLeases":
                for release in pb.ReleaseLeasesRequest.FromString(call.messages[0]).releases:
                    known.leases.pop(release.lease_id, None)
            case "ApplyGradients":
                request = pb.ApplyGradientsRequest.FromString(call.messages[0])
                for update in request.updates if not request.provisional else ():
                    known.leases.pop(update.grad_lease_id, None)
            case "CommitStep":
                known.next_step = pb.CommitStepRequest.FromString(call.messages[0]).step + 1
            case "OpenJob" if committed := pb.OpenJobResponse.FromString(ending.answer).committed:
                known.next_step = committed[-1].step + 1
            case "BeginLayout":
                known.next_step = pb.BeginLayoutRequest.FromString(call.messages[0]).first_step
            case "RollBack":
                known.next_step = pb.RollBackRequest.FromString(call.messages[0]).step + 1
            case "OpenReader":
                known.readers.append(pb.OpenReaderResponse.FromString(ending.answer).reader_id)
                return (known.readers[-1],)
        return ()


async def _open(channel: grpc.aio.Channel, *, registers_arena: bool) -> tuple[Any, str]:
    """Open a session, and return its call and its id. While other clients have the daemon drained, end the draining."""
    while True:
        session = pb_grpc.ParameterStoreStub(channel).Session()
        try:
            hello = pb.SessionRequest.Hello(client="fuzz", registers_arena=registers_arena)
            await session.write(pb.SessionRequest(hello=hello))
            return session, (await session.read()).welcome.session_id
        # A write to a call that has ended raises no status, so the status is asked for.
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            if DRAINED not in (await session.details() or ""):
                raise
        await admin_pb_grpc.StoreAdminStub(channel).Undrain(admin_pb.UndrainRequest(), timeout=DEADLINE_SECONDS)


async def _beat(session: Any, leaving: asyncio.Event) -> None:
    """Send heartbeats until the client leaves, then close the session; or until the session ends."""
    with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        while not leaving.is_set():
            await session.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), HEARTBEAT_SECONDS)
        await session.done_writing()
        while await session.read() is not grpc.aio.EOF:
            pass
