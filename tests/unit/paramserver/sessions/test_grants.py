"""What a client may find in the memory that it leases, and how a grant ends that another call has overtaken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from paramserver.sessions.leases import Lease, LeaseMode
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import ConflictError, InvalidRequestError, NotFoundError
from storage.base.shard import Kind
from storage.engine import Engine
from storage.state.slab import NEVER
from storage.tiers.arena import ArenaRange
from storage.tiers.base import PAGE_BYTES
from tests.unit.paramserver.sessions.builders import acquire, begin, serving, stage_all
from tests.unit.storage.builders import Layout

LAYOUT = Layout(with_skips=False)
GROUP = LAYOUT.groups[0]
SECRET = b"another job's byte"

Grant = Callable[[Sessions, Session], Awaitable[Lease]]


def leave_secrets(engine: Engine) -> None:
    """Fill all free memory of the arena with bytes that another job leaves there."""
    ranges = []
    for nbytes in (1 << 20, PAGE_BYTES):
        while (range_ := engine.host.arena.allocate(nbytes)) is not None:
            ranges.append(range_)
    for range_ in ranges:
        engine.host.arena.view(range_)[:] = (SECRET * range_.nbytes)[: range_.nbytes]
        engine.host.arena.free(range_)


async def stage(sessions: Sessions, session: Session) -> Lease:
    return await acquire(sessions.grants, session, GROUP, Kind.PARAM, pb.LEASE_MODE_WRITE)


async def put(sessions: Sessions, session: Session) -> Lease:
    return await acquire(sessions.grants, session, GROUP, Kind.PARAM, pb.LEASE_MODE_WRITE, step=1)


async def gradient(sessions: Sessions, session: Session) -> Lease:
    return await acquire(sessions.grants, session, GROUP, Kind.GRAD, pb.LEASE_MODE_WRITE)


async def activation(sessions: Sessions, session: Session) -> Lease:
    return await sessions.grants.acquire_activation(session, pb.ActivationUse(size_bytes=1000))


async def granted(engine: Engine, sessions: Sessions, grant: Grant) -> tuple[Session, Lease]:
    """Begin a job, leave secrets in the arena, and return the session with its lease."""
    session = await begin(engine, sessions, LAYOUT)
    if grant is not stage:
        await stage_all(engine, sessions, session, LAYOUT)
    leave_secrets(engine)
    return session, await grant(sessions, session)


@pytest.mark.parametrize("grant", [stage, put, gradient, activation])
async def test_a_client_that_does_not_map_the_arena_leases_zeros_to_write_to(tmp_path: Path, grant: Grant) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session, lease = await granted(engine, sessions, grant)
        assert lease.mode is LeaseMode[grant.__name__.upper()]
        assert not any(engine.host.view(lease.arena_range))
        sessions.end(session, "closed", is_closed=True)


async def test_what_is_published_unwritten_is_zeros(tmp_path: Path) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        leave_secrets(engine)
        for group in LAYOUT.groups:
            lease = await acquire(sessions.grants, session, group, Kind.PARAM, pb.LEASE_MODE_WRITE)
            # Only a part in the middle is written.
            engine.host.view(lease.arena_range)[100:104] = b"mine"
            await sessions.grants.release(session, lease, publish=True, next_use=NEVER)
        await sessions.vote(session, 0, b"", 0)
        lease = await acquire(sessions.grants, session, GROUP, Kind.PARAM, pb.LEASE_MODE_READ)
        assert bytes(engine.host.view(lease.arena_range)).strip(b"\0") == b"mine"


@pytest.mark.parametrize("grant", [stage, put, gradient, activation])
async def test_nothing_is_cleared_for_a_client_that_maps_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grant: Grant
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        monkeypatch.setattr(engine.host.arena.slots, "is_held", lambda _: True)
        session, lease = await granted(engine, sessions, grant)
        assert SECRET in bytes(engine.host.view(lease.arena_range))
        # Such a client is known from then on, so its lock is not looked at for each lease.
        monkeypatch.setattr(engine.host.arena.slots, "is_held", lambda _: False)
        another = await sessions.grants.acquire_activation(session, pb.ActivationUse(size_bytes=1000))
        assert SECRET in bytes(engine.host.view(another.arena_range))


class Clearing:
    """A `clear` whose first call waits until the test lets it go on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self._clear = engine.host.clear
        monkeypatch.setattr(engine.host, "clear", self)

    async def __call__(self, range_: ArenaRange) -> None:
        if not self.begun.is_set():
            self.begun.set()
            await self.go_on.wait()
        await self._clear(range_)


@pytest.mark.parametrize("grant", [stage, put, gradient, activation])
async def test_a_session_that_ends_while_a_range_is_cleared_gets_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grant: Grant
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        if grant is not stage:
            await stage_all(engine, sessions, session, LAYOUT)
        clearing = Clearing(engine, monkeypatch)
        call = asyncio.ensure_future(grant(sessions, session))
        await clearing.begun.wait()
        sessions.end(session, "its stream broke")
        clearing.go_on.set()
        with pytest.raises(NotFoundError, match="the session ended while it waited"):
            await call
        assert not session.leases and not engine.scratch.nbytes


async def test_a_call_that_goes_away_while_a_range_is_cleared_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        clearing = Clearing(engine, monkeypatch)
        call = asyncio.ensure_future(gradient(sessions, session))
        await clearing.begun.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and not session.leases and not engine.scratch.nbytes


async def test_one_of_two_calls_for_a_gradient_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        clearing = Clearing(engine, monkeypatch)
        first = asyncio.ensure_future(gradient(sessions, session))
        await clearing.begun.wait()
        lease = await gradient(sessions, session)
        clearing.go_on.set()
        with pytest.raises(ConflictError, match="was leased by another call of this session meanwhile"):
            await first
        assert list(session.leases.values()) == [lease]


async def test_a_next_use_that_no_trace_has_is_refused_before_a_lease_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (engine, sessions):
        session = await begin(engine, sessions, LAYOUT)
        await stage_all(engine, sessions, session, LAYOUT)
        # The session has offered memory of its device.
        session.device = Mock()
        want = pb.AcquireLeasesRequest.Want(
            slab=pb.SlabName(group=GROUP, kind=pb.KIND_PARAM),
            mode=pb.LEASE_MODE_READ,
            device=pb.DeviceUse(next_use=1 << 60),
        )
        # An update of the slab is under way, so no copy on the device is looked for.
        monkeypatch.setattr(engine.pins, "newest_slab", lambda *_: None)
        with pytest.raises(InvalidRequestError, match="next_use"):
            await sessions.grants.acquire(session, want)
        assert not session.leases
        session.device = None
