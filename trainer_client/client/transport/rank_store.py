"""The store as one rank of a training run uses it: typed calls, and leases as tensors.

This module owns the rules for a restart of the daemon: which calls are repeated with the next daemon, and which calls
the journal keeps. It must never block in a method that says that it does not wait, nor swallow a failure: if a call
fails that the caller does not wait for, the next call raises its error.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
import torch

from paramserver.contract.bearer import TraceParent
from paramserver.contract.kinds import GRAD
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport import lease_calls
from trainer_client.client.transport.activation_leases import ActivationLeases
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import (
    Attachments,
    Membership,
    Restart,
    Survival,
    may_be_lost,
    newest_of,
)
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.credentials import NO_CREDENTIALS, Credentials
from trainer_client.client.transport.device_memory import OfferedMemory
from trainer_client.client.transport.journal import (
    Applied,
    Derived,
    GroupUpdate,
    HandOver,
    LayoutBegun,
    Put,
    Registered,
    Settled,
    SlabName,
    Value,
    apply,
    apply_request,
    publish,
)
from trainer_client.client.transport.later_commit import LaterCommits, LaterValues
from trainer_client.client.transport.parking import Parking
from trainer_client.client.transport.pending_calls import PendingCommit, RepeatedCall, WithdrawableUpdate
from trainer_client.client.transport.pinning import PinDriver
from trainer_client.client.transport.planes import LeasedBytes, Plane, check
from trainer_client.client.transport.session import OnRankGone
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.errors import StoreError, StoreNotFoundError

# The deadline of KeepStep. It is long, because the store may have to write a whole step to NVMe before it keeps the
# step.
KEEPING_DEADLINE_SECONDS = 3600.0

__all__ = ["GroupUpdate", "LaterValues", "RankStore", "SlabName", "Value"]

T = TypeVar("T")

# A function that makes a context in which the caller begins copies of values from the device. At its end, the context
# waits for the copies. During this wait it calls the function's argument again and again, which may raise an error to
# end the wait.
Copying = Callable[[Callable[[], None]], AbstractContextManager[None]]


class RankStore:
    """One rank's connection to the store, which outlives restarts of the daemon if it is given a `survival`.

    See [Note: attaching again] in attachments.py.

    Attributes:
        parking: which gradients this rank parks.
        activations: the leases for activations.
        fetched: two totals of the job: bytes that the store has fetched into its host memory, and the seconds that
            these fetches took, summed.

    Args:
        address: `unix:/path` or `host:port`.
        client: name of this client, shown to people who operate the daemon.
        credentials: token and TLS files to connect with.
        prefer_streams: use gRPC streams even if the arena can be mapped.
        driver: registers the store's shared memory with this rank's device; None: this rank registers nothing.
        recorder: records waits and moved bytes.
        survival: how long to wait for the next daemon, and how many bytes to keep for it; None: the rank ends with its
            daemon.
        trace_parent: adds the span of the step under way to every call; None: the calls have no trace.
        on_rank_gone: called, on a thread of its own, when another rank of the run has lost or closed its session.

    Raises:
        ConfigError: the address or the credentials cannot be used.
        StoreError: the daemon cannot be reached, or refuses the credentials.
    """

    def __init__(
        self,
        address: str,
        client: str,
        credentials: Credentials = NO_CREDENTIALS,
        *,
        prefer_streams: bool = False,
        driver: PinDriver | None = None,
        recorder: Recorder | None = None,
        survival: Survival | None = None,
        trace_parent: TraceParent | None = None,
        on_rank_gone: OnRankGone = lambda _who, _is_closed: None,
    ) -> None:
        self.parking = Parking()
        self._as_of_step: int | None = None  # None if reads see the newest version, committed or not.
        self.address = address
        self.credentials = credentials
        self.fetched: tuple[int, float] = 0, 0.0
        self._recorder = recorder or Recorder()
        self._job = pb.OpenJobRequest()
        # The thread that sends gradients to the store, so that the training thread does not wait for them.
        self._hand_overs = ThreadPoolExecutor(1, "paramserver-hand-over")
        self._later_commits = LaterCommits(self._recorder)
        self.trace_parent = trace_parent
        # The memory of this rank's device in which the store may have copies placed, and the attachment over which the
        # memory was offered. A new attachment needs a new offer.
        self._device_memory: OfferedMemory | None = None
        self._offered_to: Attachment | None = None
        attach = partial(
            Attachment,
            address,
            client,
            credentials,
            prefer_streams=prefer_streams,
            driver=driver,
            trace_parent=trace_parent,
            on_rank_gone=on_rank_gone,
            patience_seconds=0.0 if survival is None else survival.timeout_seconds,
        )
        self._attachments = Attachments(attach, address, credentials, self._recorder, survival)
        self.activations = ActivationLeases(self._attachments, self._hand_overs, self._relieve_if_pressed)

    @property
    def reattach_seconds(self) -> float:
        """How long this rank waits for the next daemon when its own is gone; 0: it ends with its daemon."""
        return self._attachments.reattach_seconds

    def settle(self, layout: str) -> None:
        """Accept from now on only daemons whose job has the newest layout `layout`, which is committed now."""
        self._attachments.settle(layout)

    def stop_reattaching(self) -> None:
        """Treat the loss of the daemon as final from now on: calls that wait for the next daemon fail. Idempotent."""
        self._attachments.stop_reattaching()

    def close(self) -> None:
        """End the session, and with it all leases; idempotent."""
        self._later_commits.close()
        self._hand_overs.shutdown(cancel_futures=True)
        self.activations.close()
        self._attachments.close()
        self._later_commits.join()

    @property
    def end_session(self) -> Callable[[], None]:
        """A function that ends the session at once, and with it all leases.

        The function does not refer to this object, so a holder of the function does not keep the object alive.
        """
        return self._attachments.close

    @property
    def restarts(self) -> Sequence[Restart]:
        """The restarts of the daemon after which this rank has gone on with the new daemon, in their order."""
        return tuple(self._attachments.restarts)

    @property
    def session_id(self) -> str:
        return self._attachments.current.session_id

    @property
    def run_id(self) -> str:
        """The random name of this run of the job, the same on all ranks; "" before `open_job`."""
        return self._job.run_id

    @property
    def epoch(self) -> str:
        """The random name that the daemon gave itself at its start. It changes when the daemon is restarted."""
        return self._attachments.current.epoch

    @property
    def arena_bytes(self) -> int:
        return self._attachments.current.arena_bytes

    @property
    def plane(self) -> Plane:
        return self._attachments.current.plane

    def open_job(self, request: pb.OpenJobRequest) -> pb.OpenJobResponse:
        """Attach this rank to its job, and return the store's answer: the job's layouts and committed steps."""
        self._job = request

        def act(at: Attachment) -> pb.OpenJobResponse:
            response: pb.OpenJobResponse = at.call(at.stub.OpenJob, request)
            stored = response.layouts[-1].layout if response.layouts else None
            membership = Membership(job=request, layouts=(stored, request.layout))
            self._attachments.join(at, membership, newest_of(response))
            return response

        return self._attachments.retry_over_restarts(act)

    def confirm_epoch(self) -> str:
        """Return the epoch (see `epoch`) of the daemon that serves now.

        This makes a call whose answer is not used. So if the daemon was restarted, this returns the new epoch.
        """

        def act(at: Attachment) -> str:
            at.call(at.stub.ReadCounters, pb.ReadCountersRequest())
            return at.epoch

        return self._attachments.retry_over_restarts(act)

    def repeat_over_restarts(self, act: Callable[[], T]) -> T:
        """Call `act`, and call it again with the next daemon each time a daemon was lost during the call.

        `act` may use sessions of its own with the same daemon. `act` must be idempotent.

        Returns:
            The result of the call of `act` that did not fail.

        Raises:
            StoreError: `act` has failed although the daemon is there, or no daemon came in time.
        """
        return self._attachments.retry_over_restarts(lambda _: act())

    def begin_layout(self, first_step: int) -> None:
        """Begin the layout that `open_job` named, without any bytes; its first commit will be step `first_step`."""
        begun = LayoutBegun(first_step=first_step)
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.layout_begun = begun
        self._declare(at, begun)

    def register_shards(self, groups: Iterable[pb.ShardGroup]) -> None:
        registered = Registered(groups=list(groups))
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.registered = registered
        self._declare(at, registered)

    def expect_gradients(self, nbytes: int) -> None:
        """Announce to the journal how many bytes of gradients this rank hands over in a step.

        If they are more than the journal's limit, it keeps no copies of gradients at all.
        """
        with self._attachments.changed:
            self._attachments.journal.expect_gradients(nbytes)

    def _declare(self, at: Attachment, declaration: HandOver) -> None:
        """Hand the store `declaration`, an entry that the journal has. If the daemon is lost, the next one gets it."""
        try:
            declaration.make(at)
        except StoreError as error:
            self._attachments.outlive(at, error)

    @contextmanager
    def rolling_back(self, step: int) -> Iterator[None]:
        """Expect that another rank rolls the job back to the commit `step` within the context, and is done at its end.

        A daemon that is restarted within the context may have the job as it was before the roll-back, or after it.
        """
        with self._attachments.changed:
            self._attachments.journal.returns_to = step
        yield
        with self._attachments.changed:
            self._attachments.journal.go_on_from(step)
            self._attachments.journal.returns_to = None

    def roll_back(self, step: int) -> None:
        # The call RollBack may be repeated, because a job that was rolled back already stays as it is.
        self._attachments.retry_over_restarts(lambda at: at.call(at.stub.RollBack, pb.RollBackRequest(step=step)))

    def keep_step(self, step: int, name: str, note: str) -> admin_pb.KeepStepResponse:
        """Have the store keep a committed step of the job under a name; the kept step is durable when this returns.

        Raises:
            StoreBudgetError: the store has no room to keep the step beside those to come.
            StoreError: the store refused or failed the call.
        """
        request = admin_pb.KeepStepRequest(job=self._job.job, step=step, name=name, note=note)
        # The call KeepStep may be repeated with the next daemon, because a repeated KeepStep of the same step has no
        # further effect.
        response: admin_pb.KeepStepResponse = self._attachments.retry_over_restarts(
            lambda at: at.call_without_session(at.admin.KeepStep, request, KEEPING_DEADLINE_SECONDS)
        )
        return response

    def forget_step(self, name: str) -> None:
        """Have the store forget a kept step of the job. It is no error if the store does not have it."""
        request = admin_pb.ForgetStepRequest(job=self._job.job, name=name)
        with suppress(StoreNotFoundError):
            self._attachments.retry_over_restarts(
                lambda at: at.call_without_session(at.admin.ForgetStep, request, KEEPING_DEADLINE_SECONDS)
            )

    def list_kept_steps(self) -> Sequence[admin_pb.KeptStep]:
        """Return the kept steps of the job in this rank's store, by step and name."""
        request = admin_pb.ListKeptStepsRequest(job=self._job.job)
        response: admin_pb.ListKeptStepsResponse = self._attachments.retry_over_restarts(
            lambda at: at.call_without_session(at.admin.ListKeptSteps, request)
        )
        return response.kept

    def check_leases(self) -> None:
        """Check that the leases of the current session were still valid while a device copied bytes out of them.

        Call this after the copies and before the bytes are used. Reads by the processor are checked at once by the
        plane of the lease. So if only the processor reads, and the daemon has ended the session, this raises nothing,
        because this rank goes on in another session.

        Raises:
            SessionEndedError: the leases are void, and the copied bytes may be those of another session.
        """
        at = self._attachments.current
        if not self._attachments.comes_back_after(at):
            at.check_leases()

    def is_current(self, leased: LeasedBytes) -> bool:
        """Return whether the lease belongs to the current session.

        If it does not, its session has ended: the bytes can still be copied, but the lease cannot be handed to the
        store.
        """
        return self._attachments.current.owns(leased)

    def prefetch(self, wants: Iterable[tuple[SlabName, int]]) -> None:
        """Replace the job's window, the slabs that the store prefetches, by the slabs of `wants`. It does not wait.

        Each slab comes with the position at which it is needed. The response has the totals of what the store has
        fetched for the job, which become the attribute `fetched`. If the window is lost with a broken connection, it
        is not sent again, because the next call replaces it anyway.
        """
        request = pb.PrefetchRequest(
            wants=[pb.PrefetchRequest.Want(slab=slab.to_proto(), position=position) for slab, position in wants],
        )

        def send(at: Attachment) -> None:
            at.check()
            future = at.begin(at.stub.Prefetch, request)
            future.add_done_callback(partial(at.note_failure, besides=grpc.StatusCode.UNAVAILABLE))
            Pending(future, lambda _: None).on_response(self._note_fetched)

        self._attachments.retry_over_restarts(send)

    def _note_fetched(self, response: pb.PrefetchResponse) -> None:
        self.fetched = response.fetched_bytes, response.fetch_seconds

    def read_as_of(self, step: int) -> None:
        """Have `acquire_read` return bytes of the committed `step`, and no later ones, until the next `commit`."""
        self._as_of_step = step

    def offer_device_memory(self, device: torch.device, nbytes: int) -> None:
        """Offer `nbytes` of this rank's device to the store for copies of slabs, instead of what was offered before.

        The caller has released all leases on slabs. With less memory than before, the store drops the copies that do
        not fit any more.

        Raises:
            StoreError: the store refused or failed the call.
            torch.OutOfMemoryError: the device has too little memory for more than before.
        """
        memory = self._device_memory
        if memory is None:
            memory = OfferedMemory(device, nbytes)
        elif nbytes > memory.nbytes:
            memory.resize(nbytes)
        offered_to = self._offer(device, nbytes)
        if self._device_memory is not None and self._offered_to is not offered_to:
            memory.renew()
        self._device_memory, self._offered_to = memory, offered_to
        if nbytes >= memory.nbytes:
            return
        try:
            memory.resize(nbytes)
        except torch.OutOfMemoryError:
            # The device has no room for the smaller memory beside the larger one, so the copies of slabs cannot be
            # moved to the smaller memory. Therefore this rank withdraws the offer, so that the store forgets all
            # copies, frees the larger memory, and offers the smaller one.
            self._offer(device, 0)
            memory.resize(0)
            memory.resize(nbytes)
            self._offered_to = self._offer(device, nbytes)

    def _offer(self, device: torch.device, nbytes: int) -> Attachment:
        """Offer `nbytes` of device memory to the store, and return the attachment over which the offer was made."""
        request = pb.OfferDeviceMemoryRequest(size_bytes=nbytes, device=str(device))

        def act(at: Attachment) -> Attachment:
            at.call(at.stub.OfferDeviceMemory, request)
            return at

        return self._attachments.retry_over_restarts(act)

    def _offer_again(self, at: Attachment) -> OfferedMemory | None:
        """Offer the device memory to the next daemon, if `at` is an attachment to one, and return the memory."""
        memory = self._device_memory
        if memory is not None and self._offered_to is not at:
            memory.renew()
            at.send(
                at.stub.OfferDeviceMemory,
                pb.OfferDeviceMemoryRequest(size_bytes=memory.nbytes, device=str(memory.device)),
            )
            self._offered_to = at
        return memory

    def acquire_read(
        self, slabs: Iterable[SlabName], position: int, next_uses: Sequence[int | None] | None = None
    ) -> Pending[list[LeasedBytes]]:
        """Request read leases, all or none; the result has the order of `slabs`.

        The leases show the versions of the step that the last `read_as_of` or `commit` has named.

        Args:
            position: the position of this use, as in `prefetch`.
            next_uses: for each slab the position at which the same bytes are needed again, None if that is not known.
                With them, leases may be on copies in this rank's device memory, or ask for such a copy; see
                LeasedBytes. Without them, all leased bytes are in host memory.
        """
        wants = [
            pb.AcquireLeasesRequest.Want(
                slab=slab.to_proto(), mode=pb.LEASE_MODE_READ, position=position, as_of_step=self._as_of_step
            )
            for slab in slabs
        ]
        if next_uses is not None and self._device_memory is not None:
            for want, next_use in zip(wants, next_uses, strict=True):
                want.device.CopyFrom(pb.DeviceUse(next_use=next_use))

        where, asked = _unit_of(wants), time.monotonic()

        def finish(
            at: Attachment, memory: OfferedMemory | None, response: pb.AcquireLeasesResponse
        ) -> list[LeasedBytes]:
            began = time.monotonic()
            leases = [_open_read(at, lease, memory) for lease in response.leases]
            nbytes = sum(leased.data.nbytes for leased in leases if leased.on_device is None)
            self._recorder.moved(Link.FROM_STORE, where, nbytes, began)
            return leases

        def waited(response: pb.AcquireLeasesResponse, began: float, ended: float) -> None:
            updated = asked + max((lease.update_wait_seconds for lease in response.leases), default=0.0)
            updated = min(max(began, updated), ended)
            self._recorder.stalled(Cause.UPDATE, where, began, updated)
            self._recorder.stalled(Cause.FETCH, where, updated, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            if self._attachments.awaits_commit and self._later_commits.newest is not None:
                # A lease for reading must not be requested before this rank has voted for the pending commit: see
                # later_commit.py [Note: a vote that comes later].
                self._later_commits.newest.wait_until_voted()
            self._attachments.wait_for_voted_commit()
            memory = self._offer_again(at)
            future = lease_calls.acquire(at, wants)
            if self._recorder.is_tracing:
                future.add_done_callback(lambda _: self._recorder.fetched(where, asked))
            return Pending(future, partial(finish, at, memory), waited, partial(lease_calls.release_granted, at))

        # The lease request may be repeated with the next daemon, because a version has the same bytes in each daemon.
        return self._repeated(ask)

    def _repeated(self, ask: Callable[[Attachment], Pending[list[LeasedBytes]]]) -> Pending[list[LeasedBytes]]:
        """Return a call that requests leases with `ask`, and again from the next daemon if this one is lost.

        While the request waits for room in the store, this rank parks gradients.
        """
        call = RepeatedCall(self._attachments, ask)
        call.while_late(self._relieve_if_pressed)
        return call

    def _relieve_if_pressed(self) -> bool:
        """Park this rank's gradients if the daemon reports that requests wait for room. Return whether it does."""
        is_pressed = self._attachments.current.session.is_pressed
        if is_pressed:
            self.parking.begin_for_all()
        return is_pressed

    def acquire_write(self, slabs: Iterable[SlabName], step: int) -> Pending[list[LeasedBytes]]:
        """Request write leases, all or none; the result has the order of `slabs`. The bytes will belong to `step`."""
        wants = [
            pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs
        ]
        groups = [want.slab.group for want in wants]

        def finish(at: Attachment, response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            return [lease_calls.open_write(at, lease) for lease in response.leases]

        # Slabs other than gradients are written only as a part of a commit, so the time that this request waits counts
        # as waiting for the commit.
        of_gradients = all(want.slab.kind == GRAD for want in wants)
        cause, where = Cause.GRADIENT_MEMORY if of_gradients else Cause.COMMIT, _unit_of(wants)

        def waited(_: Any, began: float, ended: float) -> None:
            self._recorder.stalled(cause, where, began, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            release = partial(lease_calls.release_granted, at)
            return Pending(lease_calls.acquire(at, wants), partial(finish, at), waited, release)

        call = self._repeated(ask)
        if of_gradients:
            call.on_response(partial(self.parking.note, groups))
        return call

    def park(self, group: str, leased: LeasedBytes, *, is_sent: bool) -> LeasedBytes | None:
        """Park a gradient, and return its lease without the bytes; None if its daemon is gone. It does not wait.

        The caller must not touch the bytes of `leased` any more. The result can be handed over, released or recalled.

        Args:
            group: the group of the gradient.
            leased: the gradient.
            is_sent: whether `start_apply_gradients` has made the bytes visible to the store.
        """
        with self._attachments.changed:
            at = self._attachments.current
            if not at.owns(leased):
                return None
            kept = self._attachments.journal.keep(group, leased.data)
        return lease_calls.park(self._hand_overs, at, leased, is_sent=is_sent, kept=kept)

    def recall(self, slab: SlabName, parked: LeasedBytes, step: int) -> Pending[list[LeasedBytes]]:
        """Request a parked gradient, to read and write it again; the result has one lease.

        If the daemon was lost meanwhile, the result is a lease of the next daemon, with the bytes that the journal has
        kept. The result of `wait` raises DaemonRestartedError if the journal has kept none.
        """
        wants = [pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step)]
        where = _unit_of(wants)

        def finish(at: Attachment, response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            (lease,) = response.leases
            if at.owns(parked) and lease.lease_id == parked.lease_id:
                return [replace(at.plane.open_read(lease), asks_to_park=lease.park)]
            leased = lease_calls.open_write(at, lease)
            self.refill(slab.group, leased, parked)
            return [leased]

        def waited(_: Any, began: float, ended: float) -> None:
            self._recorder.stalled(Cause.GRADIENT_MEMORY, where, began, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            if at.owns(parked):
                # The store refuses to lease a gradient whose parking is under way, so this waits until the gradient is
                # parked.
                at.plane.flush(parked)
            release = partial(lease_calls.release_granted, at)
            return Pending(lease_calls.acquire(at, wants), partial(finish, at), waited, release)

        return self._repeated(ask)

    def refill(self, group: str, leased: LeasedBytes, former: LeasedBytes) -> None:
        """Copy a gradient from `former`, a lease whose daemon was lost, into `leased`, a lease of the next daemon.

        Raises:
            DaemonRestartedError: the gradient was parked, and the journal has not kept its bytes.
        """
        if not former.has_data:
            raise self._attachments.gradient_lost(group)
        leased.data.copy_(former.data)

    @contextmanager
    def holding(self, pending: Pending[list[LeasedBytes]]) -> Iterator[list[LeasedBytes]]:
        """Wait for read leases and hold them within the context; its end releases them, also after an exception.

        Raises:
            SessionEndedError: at the end of the context; the bytes that were read may be those of another session.
        """
        leases = pending.wait()
        try:
            yield leases
            check(leases)
        except BaseException:
            self.release_quietly(leases)
            raise
        self.release(leases)

    def release_quietly(self, leases: Iterable[LeasedBytes]) -> None:
        """Release leases after a failure, without publishing what was written.

        It does not wait, and raises nothing, because the caller already has an error to report.
        """
        at = self._attachments.current
        at.release_quietly(leased.lease_id for leased in leases if at.owns(leased))

    def release(self, leases: Iterable[LeasedBytes], next_use: int | None = None) -> Pending[None]:
        """Release leases, after which their bytes must not be used. It does not wait; the result may be ignored.

        Leases of a daemon that is gone are skipped, because they ended with it.

        Args:
            leases: the leases to release. The bytes of a lease with `keep` have been copied to that range.
            next_use: the position at which their bytes are needed next, as in `prefetch`; None: unknown.
        """
        leases = list(leases)

        def release_own(at: Attachment) -> Pending[None]:
            own = [leased for leased in leases if at.owns(leased)]
            return at.release(
                [
                    pb.ReleaseLeasesRequest.Release(
                        lease_id=leased.lease_id, next_use=next_use, kept=leased.keep is not None
                    )
                    for leased in own
                ]
            )

        return RepeatedCall(self._attachments, release_own)

    def publish(self, leases: Sequence[LeasedBytes]) -> None:
        """Release write leases, and make their bytes the versions of the leases' step."""
        began = time.monotonic()
        publish(self._attachments.current, leases)
        self._recorder.moved(Link.TO_STORE, "", sum(leased.data.numel() for leased in leases), began)

    def put(self, values: Sequence[Value], step: int, again: Callable[[], Sequence[Value]] | None = None) -> None:
        """Hand over values as the versions of `step` of their slabs.

        Args:
            values: the values. Without `again` they are kept, and must not change, until `step` is committed.
            step: the step that they belong to.
            again: returns the same values if they have to be handed over again. The training thread calls it, within
                another call of this object.
        """
        entry, began = Put(step=step, values=values), time.monotonic()
        noted = entry if again is None else Derived(step=step, values=again)
        with self._recorder.waiting(Cause.COMMIT, ShardGroupName.unit_of(values[0].slab.group) if values else ""):
            self._hand_over(step, entry, noted)
        nbytes = sum(value.values.numel() * value.dtype.itemsize for value in values)
        self._recorder.moved(Link.TO_STORE, "", nbytes, began)

    def _hand_over(self, step: int, entry: HandOver, noted: HandOver) -> None:
        """Hand `entry` to the store, and add `noted` to the journal.

        If this daemon is lost, the next one is handed `noted` instead of `entry`.
        """
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.note(step, noted)
        try:
            entry.make(at)
        except StoreError as error:
            self._outlive(at, error, noted)

    def _outlive(self, at: Attachment, error: StoreError, entry: HandOver | None) -> None:
        """Wait for the attachment that replaces `at`, on which a call has failed with `error`.

        If `Attachments.outlive` raises, the store has refused `entry`, so `entry` is removed from the journal.
        """
        try:
            self._attachments.outlive(at, error)
        except StoreError:
            with self._attachments.changed:
                self._attachments.journal.remove(entry)
            raise

    def apply_gradients(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
        *,
        begun: bool = False,
    ) -> None:
        """Hand gradients to the store for its optimizer, and wait until it has accepted them. Consumes their leases.

        Args:
            step: the step that the update belongs to.
            hyper_parameters: the sets of hyper-parameters that the updates refer to by index.
            updates: one for each group.
            begun: `start_apply_gradients` has handed these updates over already, so only the journal is to note them.
        """
        with self._attachments.changed:
            at = self._attachments.current
            entry = self._attachments.journal.note_update(step, hyper_parameters, updates)
        own = [update for update in updates if at.owns(update.gradient)]
        # The gradients of the other updates are in leases of a daemon that was lost before the journal noted these
        # updates. So the copies in this process are handed over.
        others = [update for update in updates if not at.owns(update.gradient)]
        began = time.monotonic()
        try:
            if not begun and (own or not others):
                with self._recorder.waiting(Cause.HAND_OVER, _units_of(own)):
                    apply(at, step, hyper_parameters, own)
                nbytes = sum(update.gradient.data.numel() for update in own)
                self._recorder.moved(Link.TO_STORE, _units_of(own), nbytes, began)
            if others:
                if lost := [update.group for update in others if not update.gradient.has_data]:
                    raise self._attachments.gradient_lost(lost[0])
                kept = [update.gradient.data for update in others]
                Applied(step=step, hyper_parameters=hyper_parameters, updates=others, kept=kept).make(at)
        except StoreError as error:
            self._outlive(at, error, entry)

    def start_apply_gradients(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
        *,
        final: bool = False,
    ) -> Pending[bool]:
        """Begin to hand gradients over for updates that can be withdrawn until `commit`. It does not wait.

        The trainer must not write to the gradients until the updates are withdrawn or `commit` consumes their leases.
        The result is whether the current daemon has the updates. It is False after a restart: the caller then has to
        hand them over again.

        Args:
            step: the step that the update belongs to.
            hyper_parameters: the sets of hyper-parameters that the updates refer to by index.
            updates: one for each group.
            final: the trainer has no other use for the gradients, so the store frees those that are parked when their
                update is done.
        """
        at = self._attachments.current
        where = _units_of(updates)

        def send() -> Any:
            """Make the bytes visible to the store and make the call; runs on the thread of `_hand_overs`.

            The sender begins this call after all calls queued before it, so leases released earlier are free by then.
            """
            at.check()
            began = time.monotonic()
            for update in updates:
                at.plane.flush(update.gradient)
            self._recorder.moved(Link.TO_STORE, where, sum(u.gradient.data.numel() for u in updates), began)
            at.check_leases()
            request = apply_request(step, hyper_parameters, updates, provisional=True, final=final)
            return at.begin(at.stub.ApplyGradients, request).result()

        def waited(_: Any, began: float, ended: float) -> None:
            self._recorder.stalled(Cause.HAND_OVER, where, began, ended)

        # Some gradients may be in leases of a lost daemon. The current daemon may have given the same lease ids to
        # other leases, so the updates are handed over only if all leases are the current daemon's.
        are_own = all(at.owns(update.gradient) for update in updates)
        sent = Pending(self._hand_overs.submit(send), lambda _: None, waited) if are_own else None
        return WithdrawableUpdate(self._attachments, at, sent)

    def withdraw_updates(self, step: int, groups: Iterable[str]) -> None:
        """Undo updates of `start_apply_gradients`, after which this rank may write to their gradients again.

        The caller has waited for the result of `start_apply_gradients`.
        """
        request = pb.WithdrawUpdatesRequest(step=step, groups=groups)
        at = self._attachments.current
        try:
            at.call(at.stub.WithdrawUpdates, request)
        except StoreError as error:
            # If the daemon is lost, the next daemon has not received these updates, so it has nothing to withdraw, and
            # the call is not repeated.
            self._attachments.outlive(at, error)

    def commit(
        self,
        step: int,
        client_state: bytes,
        settled_step: int,
        later: Iterable[LaterValues] = (),
        copying: Copying | None = None,
        *,
        wait_for_copies: Callable[[], None],
    ) -> Pending[None]:
        """Vote for the commit of `step`; the result is there when the step is committed.

        The vote comes after the last copy of the step, and after a check that no lease was void until then. From this
        call on, reads see the bytes as this step leaves them.

        Args:
            step: the step to commit.
            client_state: bytes that are stored with the commit and returned when the job is opened again.
            settled_step: the newest step that all ranks are known to have committed; older ones may be deleted.
            later: values of the step that are handed over before the vote by a thread, while the caller goes on. No
                read may need them before the step is committed.
            copying: how that thread copies from the device.
            wait_for_copies: returns when the device has done all copies from and to leases of the step.

        Raises:
            SessionEndedError: the leases of the step became void before its copies were done.
            StoreError: the store cannot be reached, or an earlier call failed that the caller did not wait for.
        """
        wait_for_copies()
        self.check_leases()
        self._attachments.retry_over_restarts(Attachment.check)
        self._as_of_step = step
        waiting = deque(later)
        if not waiting:
            return self._vote(step, client_state, settled_step)
        assert copying is not None, "values on the device are copied beside the trainer's work"
        copy = partial(copying, self._later_commits.check)

        def hand_over_and_vote() -> Pending[None]:
            while waiting:
                self._hand_over_later(step, waiting.popleft(), copy)
            self.check_leases()
            self._attachments.retry_over_restarts(Attachment.check)
            return self._vote(step, client_state, settled_step)

        return self._later_commits.begin(step, hand_over_and_vote)

    def _hand_over_later(self, step: int, group: LaterValues, copy: Callable[[], AbstractContextManager[None]]) -> None:
        """Hand values of one flat group to the store, on the thread of `_later_commits`.

        When this returns, the copies are done, so the caller may free the values' memory on the device.
        """
        began = time.monotonic()
        entry = Put(step=step, values=group.values, copying=copy)
        self._hand_over(step, entry, Put(step=step, values=group.kept, copying=copy))
        nbytes = sum(value.values.nbytes for value in group.values)
        self._recorder.moved(Link.TO_STORE, "", nbytes, began)

    def _vote(self, step: int, client_state: bytes, settled_step: int) -> Pending[None]:
        with self._attachments.changed:
            at = self._attachments.current
            vote = self._attachments.journal.begin_vote(at, step, client_state, settled_step)
        # The vote's callback does not refer to this RankStore, so that a commit under way does not keep an unused
        # engine alive.
        vote.call.add_done_callback(partial(_note_commit, self._attachments, step))
        return PendingCommit(self._attachments, vote, self._recorder)

    def wait_until_committed(self, step: int, check: Callable[[], None]) -> None:
        """Wait, on a thread beside the training, until the store has committed a step; see Attachments."""
        self._attachments.wait_until_acknowledged(step, check)

    def amend_step(self, step: int, client_state: bytes) -> None:
        """Replace the client state of this rank in the newest committed step.

        The daemon must have the capability AMENDED_STEPS. When this returns, the new client state is as durable as the
        step.

        Raises:
            StoreError: the store refuses the call, or cannot be reached.
        """
        request = pb.AmendStepRequest(step=step, client_state=client_state)
        self._attachments.retry_over_restarts(lambda at: at.call(at.stub.AmendStep, request))

    def settle_step(self, step: int) -> None:
        """Tell the store that every rank of the job, on every node, has committed a step, so that readers may have it.

        A thread beside the training calls this. If the daemon is lost meanwhile, this rank tells the next one when it
        attaches to that daemon, and the training thread gets the error.

        Raises:
            StoreError: the store refuses the call.
        """
        settled = Settled(step=step)
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.settled = settled
        try:
            settled.make(at)
        except StoreError as error:
            if not may_be_lost(error):
                raise

    def record_settled(self, step: int) -> None:
        """Write to the store's catalog that a step is settled: at the end of a run, no later commit would record it.

        The entry is in the catalog when this returns. If the daemon is lost meanwhile, it is in that of the next
        daemon.

        Raises:
            StoreError: the store refuses the call, or cannot be reached.
        """
        self._attachments.retry_over_restarts(Settled(step=step, records=True).make)

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities of the daemon, by the names of paramserver/contract/capabilities.py."""
        return self._attachments.current.capabilities

    def read_counters(self) -> Future[pb.ReadCountersResponse]:
        """Request the counters of the store's tiers since the daemon's start. It does not wait.

        If the call fails, only its future has the error; later calls of this rank are not affected.
        """
        at = self._attachments.current
        return at.begin(at.stub.ReadCounters, pb.ReadCountersRequest())

    def collect_spans(self, *, ends: bool) -> Future[pb.CollectSpansResponse]:
        """Request the spans that the store has recorded for the job since the last call. It does not wait.

        The first call begins the recording, and one with `ends` ends it. A failure is treated as in `read_counters`.
        """
        at = self._attachments.current
        return at.begin(at.stub.CollectSpans, pb.CollectSpansRequest(ends=ends))


def _open_read(at: Attachment, lease: pb.Lease, memory: OfferedMemory | None) -> LeasedBytes:
    """Return a granted read lease with its bytes, which are in host memory or in `memory`, on this rank's device."""
    if memory is not None and lease.HasField("device"):
        found = memory.range(lease.device, lease.size_bytes)
        return LeasedBytes(
            lease_id=lease.lease_id, version=lease.version, data=found.data, plane=at.plane, on_device=found
        )
    leased = at.plane.open_read(lease)
    if memory is not None and lease.HasField("keep"):
        return replace(leased, keep=memory.range(lease.keep, lease.size_bytes))
    return leased


def _note_commit(attachments: Attachments, step: int, call: Any) -> None:
    """Remove the commit's entries from the journal as soon as the commit exists; called on a thread of gRPC."""
    if not call.cancelled() and call.exception() is None:
        with attachments.changed:
            attachments.journal.acknowledge(step)


def _unit_of(wants: Sequence[pb.AcquireLeasesRequest.Want]) -> str:
    """Return the name of the unit that a request for leases is for, from the name of its first shard group."""
    return ShardGroupName.unit_of(wants[0].slab.group) if wants else ""


def _units_of(updates: Sequence[GroupUpdate]) -> str:
    return ShardGroupName.unit_of(updates[0].group) if len(updates) == 1 else f"{len(updates)} groups"
