"""Sessions of an engine without a daemon: the clients are only as much as the sessions see of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from paramserver.events import EventLog
from paramserver.security.principals import Principal, Role
from paramserver.security.quotas import Quotas, QuotasSection
from paramserver.services.parameter_store import ParameterStore
from paramserver.services.tracing import Traces
from paramserver.sessions.grants import Grants
from paramserver.sessions.leases import DeviceLease, Lease
from paramserver.sessions.seats import SeatLimits, Visitor
from paramserver.sessions.session import Session
from paramserver.sessions.sessions import SessionLimits, Sessions
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import KIND_TO_WIRE
from storage.base.errors import StorageError
from storage.base.shard import JobSpec, Kind
from storage.engine import Engine
from storage.state.slab import NEVER
from storage.state.versions import Job
from tests.unit.storage.builders import Layout, opened

SEATS = SeatLimits(total=100, reserved=1, per_identity=50, per_address=50)


class Stream:
    """The stream of a client that reads nothing."""

    def post(self, subject: object, message: pb.SessionResponse) -> None:
        pass

    def end(self, error: StorageError | None) -> None:
        pass


def sessions_of(engine: Engine, quotas: QuotasSection | None = None, *, grace_seconds: float = 60.0) -> Sessions:
    """Return the sessions of an engine, of which there are none yet."""
    limits = SessionLimits(
        heartbeat_timeout_seconds=60.0, grace_seconds=grace_seconds, late_copy_seconds=1.0, seats=SEATS
    )
    return Sessions(engine, limits, Quotas(quotas or QuotasSection()), EventLog(), on_end=lambda _: None)


@asynccontextmanager
async def serving(
    state_dir: Path, quotas: QuotasSection | None = None, *, grace_seconds: float = 60.0, **changes: Any
) -> AsyncIterator[tuple[Engine, Sessions]]:
    """Open an engine and its sessions; at the end of the block end them, and check that nothing leaked."""
    async with opened(state_dir, arena_slots=16, **changes) as engine:
        sessions = sessions_of(engine, quotas, grace_seconds=grace_seconds)
        yield engine, sessions
        await sessions.close()


class _Access:
    """The check of a caller who has all rights."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def session(self, session_id: str, _: Any) -> Session:
        return self._sessions.get(session_id)


def service(engine: Engine, sessions: Sessions, quotas: QuotasSection | None = None) -> ParameterStore:
    """Return the service, for calls that need nothing but the engine and the sessions."""
    missing = cast(Any, None)
    access = cast(Any, _Access(sessions))
    limits = Quotas(quotas or QuotasSection())
    return ParameterStore(engine, sessions, missing, missing, missing, access, limits, Traces(engine.tracer))


def connect(sessions: Sessions) -> Session:
    """Open a session of a client on another node, whose token allows all jobs."""
    owner = Principal(name="remote", role=Role.JOB, jobs=("*",))
    visitor = Visitor(owner=owner, peer="ipv4:10.0.0.9:1")
    return sessions.open("client", visitor, Stream(), registers_arena=False)


async def join(
    sessions: Sessions, session: Session, spec: JobSpec, run_id: str = "run", rank: int = 0, *, comes_back: bool = False
) -> Job:
    """Make a session a rank of a run."""
    return await sessions.join(session, spec, run_id, rank, may_exist=True, must_exist=False, comes_back=comes_back)


async def begin(engine: Engine, sessions: Sessions, layout: Layout, run_id: str = "run") -> Session:
    """Open a session that has registered all groups of a layout in a new run of its job."""
    session = connect(sessions)
    job = await join(sessions, session, layout.job(), run_id)
    await engine.register(job, [layout.group(name) for name in layout.groups])
    return session


async def stage_all(engine: Engine, sessions: Sessions, session: Session, layout: Layout) -> None:
    """Publish zeros as the initial values of all groups, and vote for step 0."""
    for group in layout.groups:
        for kind in {Kind.PARAM, layout.weight_kind}:
            lease = await acquire(sessions.grants, session, group, kind, pb.LEASE_MODE_WRITE)
            engine.host.view(lease.arena_range)[:] = bytes(lease.arena_range.nbytes)
            await sessions.grants.release(session, lease, publish=True, next_use=NEVER)
    await sessions.vote(session, 0, b"", 0)


async def acquire(grants: Grants, session: Session, group: str, kind: Kind, mode: pb.LeaseMode, step: int = 0) -> Lease:
    """Acquire one lease of a slab or of a gradient."""
    slab = pb.SlabName(group=group, kind=KIND_TO_WIRE[kind])
    lease = await grants.acquire(session, pb.AcquireLeasesRequest.Want(slab=slab, mode=mode, step=step))
    assert not isinstance(lease, DeviceLease)
    return lease


async def until_cleaned_up(sessions: Sessions) -> None:
    """Wait until what ended sessions have left is cleaned up."""
    while tasks := list(sessions._cleanup._tasks):
        await asyncio.wait(tasks)
