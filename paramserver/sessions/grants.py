"""The granting and the end of leases.

This module owns the numbers of leases; a lease itself belongs to its session. Wants come here as the wire's messages,
because the state of the session and its job decides which of their fields are used. This module must never grant a
lease to a session that has ended, because nothing would end that lease. It must never grant a range with bytes of
another job to a client that may write to it, and so can publish it, but does not map the arena.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterable

from paramserver.contract.sizes import shown_size
from paramserver.rpc import convert
from paramserver.sessions.client_process import ClientProcesses
from paramserver.sessions.device_copies import DeviceCopies, next_use_on_device
from paramserver.sessions.host_quota import HostQuota, lease_bytes
from paramserver.sessions.leases import DeviceLease, Lease, LeaseMode
from paramserver.sessions.session import Session
from paramserver.sessions.shared_ranges import SharedRange, SharedRanges
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.errors import BudgetExceededError, ConflictError, InvalidRequestError, NotFoundError
from storage.base.shard import DType, Kind
from storage.engine import Engine
from storage.memory.parkable import Activation, Gradient
from storage.state.slab import NEVER, Slab
from storage.state.versions import Job
from storage.steps.pins import Pin
from storage.steps.reader import StepReader
from storage.tiers.arena import ArenaRange
from storage.tiers.base import round_up

# A rank has to park its gradients if its share of host memory has no room for this many activations of the size that it
# asks for.
_ACTIVATIONS_AT_ONCE = 4


class Grants:
    """The object that grants leases to sessions, and ends them; no other code grants any.

    `GradientUpdates` ends the leases of gradients that clients hand over.
    """

    def __init__(self, engine: Engine, host_quota: HostQuota) -> None:
        self._engine = engine
        self._host_quota = host_quota
        self._shared_ranges = SharedRanges(engine)
        self._lease_ids = itertools.count(1)
        self._processes = ClientProcesses(engine.host.arena.slots)
        self.device_copies = DeviceCopies(engine)

    async def acquire(self, session: Session, want: pb.AcquireLeasesRequest.Want) -> Lease | DeviceLease:
        """Lease a slab or a gradient to a session, once the quotas of its job and its token have room.

        A slab is leased in the memory of the session's device if a copy of the wanted bytes is there.

        Raises:
            InvalidRequestError: a slab of the want's kind cannot be leased in the want's mode.
            NotFoundError: there is no such slab, or the session ended meanwhile.
            ConflictError: the session holds a lease that excludes this one, or has not opened a job.
            StepAbortedError: a rank of the session's run is gone.
            StorageError: see SlabPins.fetch and stage, PendingSteps.allocate_put and allocate_gradient.
        """
        kind, group = convert.kind(want.slab.kind), want.slab.group
        session.require_run().check_whole()
        job = await session.job()
        as_of = convert.step(want.as_of_step, "wants.as_of_step") if want.HasField("as_of_step") else None
        # The request's fields are checked before the lease is granted. After the grant, the error would reach a client
        # that does not know the lease's number, and so could not release the lease.
        next_use = next_use_on_device(want)
        if next_use is not None and want.mode == pb.LEASE_MODE_READ and kind is not Kind.GRAD:
            lease_id = next(self._lease_ids)
            on_device = self.device_copies.lease(session, job, group, kind, as_of, next_use, lease_id)
            if on_device is not None:
                return on_device
        async with self._host_quota.room_for(session.owner, job, lease_bytes(job, group, kind)):
            # The session's job is looked up again, because a rank may have begun another layout of the job during the
            # wait for room.
            job = await session.job()
            match want.mode, kind is Kind.GRAD:
                case pb.LEASE_MODE_READ, False:
                    position = convert.position(want.position, "wants.position")
                    pin = await self._engine.pins.fetch(job, group, kind, position, as_of)
                    lease = await self._grant_pin(session, LeaseMode.READ, pin)
                    if next_use is not None:
                        lease.keep = self.device_copies.place(session, pin, next_use)
                    return lease
                case pb.LEASE_MODE_WRITE, True:
                    return await self._lease_gradient(session, job, group)
                case pb.LEASE_MODE_WRITE, False:
                    step = convert.step(want.step, "wants.step")
                    if job.newest is None and step == job.first_step:
                        staged = await self._engine.pins.stage(job, group, kind)
                        return await self._grant_pin(session, LeaseMode.STAGE, staged)
                    return await self._lease_put(session, job, step, group, kind)
                case _:
                    raise InvalidRequestError(f"lease mode {want.mode} is not possible for kind {kind.value}")

    async def acquire_range(
        self,
        session: Session,
        reader_id: int,
        reader: StepReader,
        name: str,
        wanted: Hashable,
        dtype: DType,
        nbytes: int,
        fill: Callable[[memoryview], Awaitable[None]],
    ) -> Lease:
        """Lease bytes of a reader's step, once the quotas have room for them, or share those that are leased already.

        Args:
            session: gets the lease.
            reader_id: the reader's number in the session.
            reader: the reader that had that number when the request came.
            name: the name of the tensor or ranges that are read, for error texts.
            wanted: identifies the bytes that are read. Leases with equal `wanted` on the same step share one range.
            dtype: the type of the elements.
            nbytes: the size of the range.
            fill: brings the bytes into the given memory.

        Raises:
            NotFoundError: the reader was closed, or the session ended, meanwhile.
            StorageError: see StepReaders.load.
        """
        shared = await self._shared_ranges.find(reader, wanted)
        if shared is None:
            async with self._host_quota.room_for(session.owner, reader.job, round_up(nbytes)):
                # Another session may have begun to read the same bytes while this one waited for the quotas, so the
                # bytes are looked up again before they are read.
                shared = await self._shared_ranges.find(reader, wanted)
                if shared is None:
                    shared = await self._shared_ranges.load(reader, wanted, nbytes, fill)
        if session.readers.get(reader_id) is not reader:
            self._shared_ranges.release(shared)
            raise NotFoundError(f"reader {reader_id} was closed while a range was leased from it")
        assert shared.arena_range is not None
        lease = await self._grant(
            session, name, LeaseMode.RANGE, nbytes, shared.arena_range, None, step=reader.step, shared=shared
        )
        lease.reader, lease.dtype = reader, dtype
        return lease

    async def _lease_put(self, session: Session, job: Job, step: int, group: str, kind: Kind) -> Lease:
        slab = job.slab(group, kind)
        if slab in session.exclusive:
            raise ConflictError(f"{slab.key} is being written by another lease of this session")
        range_ = await self._engine.pending_steps.allocate_put(job, step, group, kind)
        nbytes = slab.layout.element_bytes
        return await self._grant(session, group, LeaseMode.PUT, nbytes, range_, None, slab=slab, step=step)

    async def _lease_gradient(self, session: Session, job: Job, group: str) -> Lease:
        if (held := session.exclusive.get(group)) is not None:
            return await self._recall(session, held)
        gradient = await self._engine.pending_steps.allocate_gradient(job, group)
        nbytes = job.group(group).spec.layout(Kind.GRAD).nbytes
        lease = await self._grant(session, group, LeaseMode.GRADIENT, nbytes, None, None, gradient=gradient)
        must_park = self._host_quota.must_park
        lease.asks_to_park = gradient.leaves_host or session.parks_gradients or must_park(session.owner, job)
        return lease

    async def acquire_activation(self, session: Session, use: pb.ActivationUse) -> Lease:
        """Lease memory for an activation, or bring a parked one back and return its lease.

        Raises:
            InvalidRequestError: the size is 0.
            NotFoundError: the session does not hold the lease that it recalls, or ended meanwhile.
            ConflictError: the lease is not for an activation that is parked, or the session has not opened a job.
            BudgetExceededError: there is no room for the activation beside what steps need, or the session has too
                many that are not parked.
            StepAbortedError: a rank of the session's run is gone.
            StorageError: see Gradients.allocate_activation and Gradients.recall.
        """
        session.require_run().check_whole()
        job = await session.job()
        if use.lease_id:
            lease = session.lease(use.lease_id)
            if lease.activation is None:
                raise ConflictError(f"lease {lease.lease_id} ({lease.mode.value}) is not for an activation")
            self._check_room(session, job, lease.nbytes, is_held=True)
            needed = 0 if lease.activation.arena_range is not None else round_up(lease.nbytes)
            async with self._host_quota.room_for(session.owner, job, needed):
                return await self._recall(session, lease)
        if not use.size_bytes:
            raise InvalidRequestError("wants.activation.size_bytes is 0; an activation has bytes")
        nbytes = convert.device_bytes(use.size_bytes)
        self._check_room(session, job, nbytes)
        async with self._host_quota.room_for(session.owner, job, round_up(nbytes)):
            activation = await self._engine.gradients.allocate_activation(job.spec.name, session.session_id, nbytes)
        return await self._grant(
            session, activation.label, LeaseMode.ACTIVATION, nbytes, None, None, activation=activation
        )

    def _check_room(self, session: Session, job: Job, nbytes: int, *, is_held: bool = False) -> None:
        """Check that a rank may have `nbytes` more bytes of activations without parking them.

        Raises:
            BudgetExceededError: the rank may not have them.
        """
        size = round_up(nbytes)
        admit = self._host_quota.admit_activation
        share = admit(session.owner, job, nbytes, parks=session.parks_gradients, is_held=is_held)
        if not is_held and not session.parks_gradients and (share is None or share < _ACTIVATIONS_AT_ONCE * size):
            # The daemon asks a rank to park only those gradients that the rank leases from now on. So the parking
            # begins only at a moment when the rank writes to no gradient.
            is_free = not any(lease.gradient is not None and lease.is_written for lease in session.leases.values())
            if is_free and (more := admit(session.owner, job, nbytes, parks=True)) is not None:
                session.parks_gradients, share = True, more
        taken = self._engine.gradients.unparked_bytes(session.session_id)
        # If a rank uses several activations, they may take at most half of its share of host memory. More of them could
        # leave no contiguous run of free bytes for other requests.
        if share is None or (taken and taken + size > share // 2):
            raise BudgetExceededError(
                f"host_budget has no room for {shown_size(size)} of an activation of job {job.spec.name!r} beside "
                f"what the steps of the jobs need, and {shown_size(taken)} of activations that this rank uses; raise "
                "host_budget, or nvme_budget if activations are to be spilled"
            )

    async def _recall(self, session: Session, lease: Lease) -> Lease:
        """Bring a parked gradient or activation back to the arena, and return its lease.

        Raises:
            ConflictError: the gradient or the activation is not parked.
            NotFoundError: the lease ended meanwhile.
        """
        parkable = lease.parkable
        if parkable is None or not (parkable.is_parked or lease.recall_failed):
            raise ConflictError(f"{lease.what} is leased by this session already")
        lease.recalls += 1
        try:
            await self._engine.gradients.recall(parkable)
            session.lease(lease.lease_id)
        except BaseException:
            # After a failed recall, the client does not know where the bytes of the gradient or the activation are. So
            # they are parked again, and the client can repeat the recall.
            lease.recall_failed = True
            self._engine.gradients.park(parkable)
            raise
        lease.recall_failed = False
        self._note_process(session, lease)
        return lease

    async def _grant_pin(self, session: Session, mode: LeaseMode, pin: Pin) -> Lease:
        return await self._grant(session, pin.slab.key.group, mode, pin.nbytes, pin.arena_range, pin)

    async def _grant(
        self,
        session: Session,
        group: str,
        mode: LeaseMode,
        nbytes: int,
        range_: ArenaRange | None,
        pin: Pin | None,
        *,
        gradient: Gradient | None = None,
        activation: Activation | None = None,
        slab: Slab | None = None,
        step: int = 0,
        shared: SharedRange | None = None,
    ) -> Lease:
        """Give a session a lease on a range, which is freed if this raises.

        Raises:
            NotFoundError: the session ended meanwhile.
            ConflictError: another call of the session leased the same gradient meanwhile.
        """
        lease = Lease(
            next(self._lease_ids),
            group,
            mode,
            nbytes,
            range_,
            pin,
            gradient,
            activation,
            slab=slab,
            step=step,
            shared=shared,
        )
        try:
            if mode.is_for_writing and not self._maps_arena(session):
                await self._engine.host.clear(lease.arena_range)
            if not session.state.has_leases:
                raise NotFoundError("the session ended while it waited for a lease; open a new one")
            if gradient is not None and group in session.exclusive:
                raise ConflictError(f"{lease.what} was leased by another call of this session meanwhile")
        except BaseException:
            self.release_range(lease, NEVER)
            raise
        session.add_lease(lease)
        self._note_process(session, lease)
        return lease

    def _maps_arena(self, session: Session) -> bool:
        """Return whether the client's process maps the arena, or has done so."""
        if not session.maps_arena and session.slot is not None:
            # A client locks its slot of the arena before it maps the arena. So if the slot's lock is held, the client
            # may have mapped the arena, and this counts as mapped.
            session.maps_arena = self._engine.host.arena.slots.is_held(session.slot)
        return session.maps_arena

    def _note_process(self, session: Session, lease: Lease) -> None:
        """Keep the process that may write to the lease's range in the session, for the quarantine at its end."""
        if (
            lease.mode.is_for_writing
            and session.registers_arena
            and session.process is None
            and session.slot is not None
        ):
            # A client locks its slot of the arena before it maps the arena. So the process that holds the slot's lock
            # is the one that may write to the leased range.
            session.process = self._processes.holder(session.slot)

    def park(self, session: Session, lease_ids: Iterable[int]) -> None:
        """Park the gradients and activations of some leases: the client does not touch them until it recalls them.

        Raises:
            NotFoundError: the session does not hold one of the leases. Nothing is parked then.
            ConflictError: a lease is for neither a gradient nor an activation. Nothing is parked then.
        """
        leases = [session.lease(lease_id) for lease_id in lease_ids]
        parkables = [lease.parkable for lease in leases if lease.parkable is not None]
        if len(parkables) < len(leases):
            other = next(lease for lease in leases if lease.parkable is None)
            raise ConflictError(
                f"lease {other.lease_id} ({other.mode.value}) is not for a gradient or an activation; only those are "
                "parked"
            )
        for parkable in parkables:
            self._engine.gradients.park(parkable)

    # The following methods end leases.

    async def release(
        self, session: Session, lease: Lease, *, publish: bool, next_use: float, is_kept: bool = False
    ) -> None:
        """End a lease that a client returns.

        Args:
            session: holds the lease.
            lease: the one that ends.
            publish: whether the bytes that the client has written become the slab's version.
            next_use: the position in the trace where the client needs the slab next.
            is_kept: whether the client has copied the bytes to the range of its device's memory that it was given for
                them.

        Raises:
            InvalidRequestError: `publish` is set, but the lease is neither for staging nor for a put.
            NotFoundError: the lease has ended already.
            StorageError: see SlabPins.publish and PendingSteps.put.
        """
        if publish and lease.mode not in (LeaseMode.STAGE, LeaseMode.PUT):
            raise InvalidRequestError(
                f"lease {lease.lease_id} ({lease.mode.value}) cannot be published; write leases can"
            )
        # The lease may have ended since the caller looked it up, because its session or its reader ended.
        # `session.lease` raises an error if so.
        session.lease(lease.lease_id)
        lease.void = True
        session.remove_lease(lease)
        if lease.keep is not None and lease.pin is not None:
            self.device_copies.end_place(session, lease.pin.slab, lease.keep, is_kept=is_kept)
        if publish and lease.pin is not None:
            await self._engine.pins.publish(lease.pin)
        elif publish and lease.slab is not None:
            key = lease.slab.key
            await self._engine.pending_steps.put(
                await session.job(), lease.step, key.group, key.kind, lease.arena_range
            )
        else:
            self.release_range(lease, next_use)

    def release_range(self, lease: Lease, next_use: float) -> None:
        """End a lease, and publish nothing: free its range, or let the host cache evict its slab again.

        The range of a gradient is freed when the update that uses it is done.
        """
        lease.void = True
        if lease.gradient is not None:
            if lease.update is None:
                self._engine.gradients.free(lease.gradient)
            else:
                self._engine.gradients.free_after(lease.update, lease.gradient)
        elif lease.activation is not None:
            self._engine.gradients.free(lease.activation)
        elif lease.shared is not None:
            self._shared_ranges.release(lease.shared)
        elif lease.pin is None:
            self._engine.scratch.free(lease.arena_range)
        else:
            self._engine.pins.unpin(lease.pin, next_use)

    def take_range(self, lease: Lease) -> ArenaRange | None:
        """End a lease whose range the client's process may still write to.

        Return the range, which the caller must keep from any other use until that process is gone. None is returned if
        the gradient or activation of the lease is not in the arena.
        """
        lease.void = True
        if lease.parkable is not None:
            return self._engine.gradients.take_range(lease.parkable)
        if lease.pin is None:
            return self._engine.scratch.hand_over(lease.arena_range)
        return self._engine.pins.take_range(lease.pin)
