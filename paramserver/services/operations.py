"""The methods of StoreAdmin that change a running store: verify, evict, promote, roll back, drain, reload.

This module owns nothing. It must never touch a job that has sessions attached, except that it may evict the job's host
copies that are not in use. A method that destroys or stops something does its work inside of `Audit.call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from paramserver.contract.printable import printable
from paramserver.events import EventKind, EventLog
from paramserver.rpc import convert
from paramserver.rpc.rights import Right, needs
from paramserver.security.gate import Context, Gate, check_job
from paramserver.security.principals import Principal, Role
from paramserver.security.quotas import Quotas
from paramserver.services.audit import Audit
from paramserver.services.configuration import Configuration
from paramserver.services.store_view import StoreView
from paramserver.sessions.drain import Drain
from paramserver.sessions.sessions import Sessions
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.errors import DamagedBlockError, InvalidRequestError, NotFoundError, StorageError
from storage.engine import Engine
from storage.state.versions import Job

# A running verification sends the operator its progress after VERIFY_INTERVAL_SECONDS, or earlier if it has found
# MAX_DAMAGE_OF_A_MESSAGE damaged blocks.
VERIFY_INTERVAL_SECONDS = 0.2
MAX_DAMAGE_OF_A_MESSAGE = 100
# The most parameters that a verification names for one damaged block, so that a message stays below the 4 MiB that
# clients receive. Names have at most 1024 bytes.
MAX_FQNS_OF_A_BLOCK = 16
# The most characters that the daemon keeps of the text in which a follower reports why its holder gets no steps.
MOST_PROBLEM_CHARACTERS = 500
# The most jobs that the text of an error names.
MOST_JOBS_OF_AN_ERROR = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """The objects of a daemon that the methods of StoreAdmin use, for example the engine and the sessions."""

    # The digest of the code that this daemon runs, as paramserver.build.read_build gave it at the daemon's start.
    build: str
    engine: Engine
    sessions: Sessions
    view: StoreView
    gate: Gate
    quotas: Quotas
    events: EventLog
    audit: Audit
    drain: Drain
    # A function that sets what the health service answers: whether the daemon accepts new sessions.
    tell_ready: Callable[[bool], Awaitable[None]]
    configuration: Configuration


class Operations:
    """The methods that change a running store; store_admin.proto says what each does. StoreAdmin inherits them."""

    def __init__(self, parts: AdminParts) -> None:
        self._engine = parts.engine
        self._sessions = parts.sessions
        self._view = parts.view
        self._events = parts.events
        self._audit = parts.audit
        self._drain = parts.drain
        self._tell_ready = parts.tell_ready
        self._configuration = parts.configuration

    @needs(Right.ADMIN)
    async def Verify(self, request: admin_pb.VerifyRequest) -> AsyncIterator[admin_pb.VerifyResponse]:
        if request.job:
            self.check_known(request.job)
        loop = asyncio.get_running_loop()
        sent_at, progress, found = -math.inf, admin_pb.VerifyResponse(), list[admin_pb.VerifyResponse.Damage]()
        async with contextlib.aclosing(self._engine.upkeep.verify(request.job or None)) as verification:
            async for verified in verification:
                found += [] if verified.damage is None else [describe_damage(verified.damage)]
                progress = admin_pb.VerifyResponse(
                    verified_bytes=verified.verified_bytes, total_bytes=verified.total_bytes, damage=found
                )
                if loop.time() >= sent_at + VERIFY_INTERVAL_SECONDS or len(found) == MAX_DAMAGE_OF_A_MESSAGE:
                    yield progress
                    sent_at, found = loop.time(), []
        # The last message of a verification has the damage found since the message before, and the verification's
        # totals.
        progress = admin_pb.VerifyResponse(
            verified_bytes=progress.verified_bytes, total_bytes=progress.total_bytes, damage=found
        )
        yield progress

    @needs(Right.ADMIN, takes_context=True, takes_caller=True)
    async def EvictCopies(
        self, request: admin_pb.EvictCopiesRequest, principal: Principal, context: Context
    ) -> admin_pb.EvictCopiesResponse:
        return await self._audit.call("EvictCopies", request, principal, context, self._evict(request))

    async def _evict(self, request: admin_pb.EvictCopiesRequest) -> admin_pb.EvictCopiesResponse:
        if request.all_jobs == bool(request.job):
            raise InvalidRequestError(f"job {request.job!r}, all_jobs {request.all_jobs}: name a job, or set all_jobs")
        moved = await self._engine.upkeep.evict_copies(
            None if request.all_jobs else self.known_job(request.job).spec.name
        )
        return admin_pb.EvictCopiesResponse(copies=moved.slabs, bytes=moved.nbytes, left_bytes=moved.left_bytes)

    @needs(Right.ADMIN)
    async def PromoteJob(self, request: admin_pb.PromoteJobRequest) -> admin_pb.PromoteJobResponse:
        moved = await self._engine.upkeep.promote(self.known_job(request.job).spec.name)
        return admin_pb.PromoteJobResponse(
            slabs=moved.slabs, bytes=moved.nbytes, present_bytes=moved.present_bytes, left_bytes=moved.left_bytes
        )

    @needs(Right.ADMIN, takes_context=True, takes_caller=True)
    async def RollBackJob(
        self, request: admin_pb.RollBackJobRequest, principal: Principal, context: Context
    ) -> admin_pb.RollBackJobResponse:
        return await self._audit.call("RollBackJob", request, principal, context, self._roll_back(request))

    async def _roll_back(self, request: admin_pb.RollBackJobRequest) -> admin_pb.RollBackJobResponse:
        name = self.known_job(request.job).spec.name
        if not request.HasField("step"):
            raise InvalidRequestError("step is missing; name the retained step to which the job is to return")
        step = convert.step(request.step, "step")
        with self._sessions.closed(name):
            job = self._engine.jobs.job(name)
            former = job.newest
            await self._engine.roll_back(job, step, is_ordered=True)
        self._events.add(EventKind.JOB, name, f"an operator rolled the job back from step {former} to step {step}")
        return admin_pb.RollBackJobResponse(former_step=former or 0)

    @needs(Right.TOKEN, takes_context=True)
    async def BeginCopy(
        self, request: admin_pb.BeginCopyRequest, principal: Principal, context: Context
    ) -> admin_pb.BeginCopyResponse:
        check_job(principal, request.job)
        return await self._audit.call("BeginCopy", request, principal, context, self._begin_copy(request, principal))

    async def _begin_copy(self, request: admin_pb.BeginCopyRequest, principal: Principal) -> admin_pb.BeginCopyResponse:
        name, run_id = convert.name(request.job, "job"), convert.name(request.run_id, "run_id")
        origin, source = convert.name(request.origin, "origin"), convert.name(request.source, "source")
        token = "" if principal.role is Role.ADMIN else principal.name
        resumes = await self._sessions.begin_copy(name, run_id, origin, token)
        self._events.add(EventKind.JOB, name, f"steps are copied into the job, from {source}")
        return admin_pb.BeginCopyResponse(resumes=resumes)

    @needs(Right.TOKEN)
    async def ReportReplica(
        self, request: admin_pb.ReportReplicaRequest, principal: Principal
    ) -> admin_pb.ReportReplicaResponse:
        check_job(principal, request.job)
        name, holder = convert.name(request.job, "job"), convert.name(request.holder, "holder")
        job = self._engine.jobs.by_name.get(name)
        if job is None:
            raise self.unknown_job(name, principal)
        self._sessions.replicas.report(
            name,
            job.settled_step,
            holder=holder,
            step=convert.step(request.step, "step") if request.HasField("step") else None,
            sent_bytes=request.sent_bytes,
            copy_seconds=request.copy_seconds if math.isfinite(request.copy_seconds) else 0.0,
            problem=printable(request.problem[:MOST_PROBLEM_CHARACTERS]),
            is_finishing=request.finishing,
        )
        return admin_pb.ReportReplicaResponse()

    @needs(Right.ADMIN, takes_context=True, takes_caller=True)
    async def Drain(
        self, request: admin_pb.DrainRequest, principal: Principal, context: Context
    ) -> admin_pb.GetDrainResponse:
        return await self._audit.call("Drain", request, principal, context, self._set_draining(True))

    @needs(Right.ADMIN, takes_context=True, takes_caller=True)
    async def Undrain(
        self, request: admin_pb.UndrainRequest, principal: Principal, context: Context
    ) -> admin_pb.GetDrainResponse:
        return await self._audit.call("Undrain", request, principal, context, self._set_draining(False))

    async def _set_draining(self, is_on: bool) -> admin_pb.GetDrainResponse:
        if is_on != self._drain.is_on:
            (self._drain.begin if is_on else self._drain.end)()
            await self._tell_ready(not is_on)
            text = "the daemon is being drained" if is_on else "the daemon accepts sessions again"
            self._events.add(EventKind.DAEMON, "daemon", text)
        return self._describe_drain()

    @needs(Right.ADMIN)
    async def GetDrain(self, _: admin_pb.GetDrainRequest) -> admin_pb.GetDrainResponse:
        return self._describe_drain()

    def _describe_drain(self) -> admin_pb.GetDrainResponse:
        waiting = self._drain.waiting() if self._drain.is_on else []
        return admin_pb.GetDrainResponse(
            draining=self._drain.is_on,
            since_unix_seconds=self._drain.since or 0.0,
            sessions=len(self._sessions),
            waiting=[
                admin_pb.GetDrainResponse.Waiting(
                    client=waited.session.client,
                    job=waited.session.run.spec.name if waited.session.run else "",
                    rank=max(0, waited.session.rank),
                    why=waited.why,
                )
                for waited in waiting
            ],
            ready=self._drain.is_on and not waiting,
        )

    @needs(Right.ADMIN, takes_context=True, takes_caller=True)
    async def Reload(
        self, request: admin_pb.ReloadRequest, principal: Principal, context: Context
    ) -> admin_pb.ReloadResponse:
        return await self._audit.call("Reload", request, principal, context, self._reload())

    async def _reload(self) -> admin_pb.ReloadResponse:
        changed, restart_needed = await self._configuration.reload()
        return admin_pb.ReloadResponse(changed=changed, restart_needed=restart_needed)

    def check_known(self, name: str, principal: Principal | None = None) -> None:
        """Check that there is a job of a name, or a kept step of it.

        Raises:
            NotFoundError: there is no job and no kept step of that name. The text lists the known jobs for operators.
        """
        if convert.name(name, "job") not in self._engine.jobs.by_name and not self._engine.jobs.kept_steps(name):
            raise self.unknown_job(name, principal)

    def known_job(self, name: str) -> Job:
        """Return the job of a name.

        Raises:
            NotFoundError: there is no such job. The text lists the known jobs.
        """
        convert.name(name, "job")
        if name not in self._engine.jobs.by_name:
            raise self.unknown_job(name)
        return self._engine.jobs.job(name)

    def unknown_job(self, name: str, principal: Principal | None = None) -> NotFoundError:
        """Return the error for a caller who names a job that is not there.

        The text lists known jobs only for an operator, because no other caller may learn their names. Without a
        principal, the caller is an operator.
        """
        if principal is not None and principal.role is not Role.ADMIN:
            return NotFoundError(f"there is no job {name!r}")
        names = self._view.job_names
        more = f" and {len(names) - MOST_JOBS_OF_AN_ERROR} more" if len(names) > MOST_JOBS_OF_AN_ERROR else ""
        known = ", ".join(names[:MOST_JOBS_OF_AN_ERROR]) or "none"
        return NotFoundError(f"there is no job {name!r}; known jobs: {known}{more}")


def describe_damage(error: StorageError) -> admin_pb.VerifyResponse.Damage:
    """Return the message for the error of damaged bytes, or of bytes that cannot be read. Its size is bounded."""
    damage = admin_pb.VerifyResponse.Damage(text=str(error))
    if isinstance(error, DamagedBlockError):
        damage.version, damage.offset, damage.bytes = error.label, error.offset, error.nbytes
        damage.fqns.extend(error.fqns[:MAX_FQNS_OF_A_BLOCK])
    return damage
