"""The store as this rank sees it: typed calls, leases as tensors, and the attachments behind them.

Owns what a call means: which ones are made again with the next daemon where one is lost, and which are in the journal.
Must never block where asynchrony was asked for, nor swallow a failure: what fails behind the caller's back is raised by
the next call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from paramserver.contract.kinds import GRAD
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import StoreError
from trainer_client.recorder import Cause, Link, Recorder
from trainer_client.transport.attachment import Attachment
from trainer_client.transport.attachments import Attachments, Membership, Restart, Survival
from trainer_client.transport.channel import Pending
from trainer_client.transport.credentials import NO_CREDENTIALS, Credentials
from trainer_client.transport.group_names import unit_of
from trainer_client.transport.journal import (
    Applied,
    GroupUpdate,
    HandOver,
    Put,
    Slab,
    Value,
    apply,
    apply_request,
    publish,
)
from trainer_client.transport.lasting import Commit, Lasting, Provisional
from trainer_client.transport.planes import LeasedBytes, Plane, check

__all__ = ["GroupUpdate", "RankStore", "Slab", "Value"]


class RankStore:
    """Attributes:
    as_of_step: reads see what this step leaves, and nothing of later ones; None: the newest.
    fetched: bytes that the store has fetched for the job, and the sum of what each fetch took in seconds.

    Args:
    address: `unix:/path` or `host:port`.
    client: who we are, for people.
    credentials: what to show to the daemon.
    prefer_streams: leave the arena alone even where it can be mapped.
    recorder: is told what is waited for and moved.

    Raises:
        ConfigError: the address or the credentials cannot be used.
        StoreError: the daemon cannot be reached, or lets nobody in with them.
    """

    def __init__(
        self,
        address: str,
        client: str,
        credentials: Credentials = NO_CREDENTIALS,
        *,
        prefer_streams: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.as_of_step: int | None = None
        self.address = address
        self.credentials = credentials
        self.fetched: tuple[int, float] = 0, 0.0
        self._recorder = recorder or Recorder()
        self._job = pb.OpenJobRequest()
        self._groups: list[pb.ShardGroup] = []
        # Gradients are sent on a thread of their own, because that may take long.
        self._hand_overs = ThreadPoolExecutor(1, "paramserver-hand-over")
        attach = partial(Attachment, address, client, credentials, prefer_streams=prefer_streams)
        self._attachments = Attachments(attach, address, credentials, self._recorder)

    def survive_restarts(self, survival: Survival, *, layout: str, newest: int | None) -> None:
        """From now on this rank outlives restarts of its daemon, as attachments.py says.

        Args:
            layout: the job's, as the store names it.
            newest: the newest commit of the job.
        """
        self._attachments.survive(survival, Membership(job=self._job, layout=layout, groups=self._groups), newest)

    def give_up(self) -> None:
        """From now on the loss of the daemon is final: what waits for the next one is told so. Idempotent."""
        self._attachments.give_up()

    def close(self) -> None:
        """Ends the session, and with it all leases; idempotent."""
        self._hand_overs.shutdown(cancel_futures=True)
        self._attachments.close()

    @property
    def restarts(self) -> Sequence[Restart]:
        """The restarts of the daemon that this rank has outlived."""
        return tuple(self._attachments.restarts)

    @property
    def session_id(self) -> str:
        return self._attachments.current.session_id

    @property
    def epoch(self) -> str:
        """Of the daemon's start."""
        return self._attachments.current.epoch

    @property
    def arena_bytes(self) -> int:
        return self._attachments.current.arena_bytes

    @property
    def plane(self) -> Plane:
        return self._attachments.current.plane

    def open_job(self, request: pb.OpenJobRequest) -> pb.OpenJobResponse:
        """Attaches this rank to its job; what is committed of it."""
        self._job = request
        at = self._attachments.current
        response: pb.OpenJobResponse = at.call(at.stub.OpenJob, request)
        return response

    def begin_layout(self, first_step: int) -> None:
        """Gives the job the layout that `open_job` named, empty; its first commit has that number."""
        at = self._attachments.current
        at.call(at.stub.BeginLayout, pb.BeginLayoutRequest(first_step=first_step))

    def register_shards(self, groups: Iterable[pb.ShardGroup]) -> None:
        self._groups = list(groups)
        at = self._attachments.current
        at.call(at.stub.RegisterShards, pb.RegisterShardsRequest(groups=self._groups))

    def roll_back(self, step: int) -> None:
        at = self._attachments.current
        at.call(at.stub.RollBack, pb.RollBackRequest(step=step))

    def check_leases(self) -> None:
        """To be called after bytes were copied out of a lease of the present session, before they are used.

        Raises:
            SessionEndedError: the leases are void, and what was copied may be somebody else's bytes.
        """
        self._attachments.current.check_leases()

    def is_current(self, leased: LeasedBytes) -> bool:
        """Whether the lease is one of the present session. Else its daemon is gone: its bytes can be copied only."""
        return self._attachments.current.owns(leased)

    def prefetch(self, wants: Iterable[tuple[Slab, int]]) -> None:
        """Replaces the prefetch window by slabs with their positions. Does not wait; the answer updates `fetched`.

        One that is lost with a broken connection is not missed: the next one replaces it.
        """
        request = pb.PrefetchRequest(
            wants=[pb.PrefetchRequest.Want(slab=slab.to_proto(), position=position) for slab, position in wants],
        )

        def send(at: Attachment) -> None:
            at.check()
            future = at.begin(at.stub.Prefetch, request)
            future.add_done_callback(partial(at.note_failure, besides=grpc.StatusCode.UNAVAILABLE))
            Pending(future, lambda _: None).on_response(self._note_fetched)

        self._attachments.surviving(send)

    def _note_fetched(self, response: pb.PrefetchResponse) -> None:
        self.fetched = response.fetched_bytes, response.fetch_seconds

    def acquire_read(self, slabs: Iterable[Slab], position: int) -> Pending[list[LeasedBytes]]:
        """Read leases on the versions of `as_of_step`, all or none, in the order of the slabs."""
        wants = [
            pb.AcquireLeasesRequest.Want(
                slab=slab.to_proto(), mode=pb.LEASE_MODE_READ, position=position, as_of_step=self.as_of_step
            )
            for slab in slabs
        ]

        where, asked = _unit_of(wants), time.monotonic()

        def finish(at: Attachment, response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            began = time.monotonic()
            leases = [at.plane.open_read(lease) for lease in response.leases]
            self._recorder.moved(Link.FROM_STORE, where, sum(lease.size_bytes for lease in response.leases), began)
            return leases

        def waited(response: pb.AcquireLeasesResponse, began: float, ended: float) -> None:
            updated = asked + max((lease.update_wait_seconds for lease in response.leases), default=0.0)
            updated = min(max(began, updated), ended)
            self._recorder.stalled(Cause.UPDATE, where, began, updated)
            self._recorder.stalled(Cause.FETCH, where, updated, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            self._attachments.settle_commit()
            future = _acquire(at, wants)
            if self._recorder.is_tracing:
                future.add_done_callback(lambda _: self._recorder.fetched(where, asked))
            return Pending(future, partial(finish, at), waited, partial(_return_granted, at))

        # A version is the same bytes in every daemon that has it.
        return Lasting(self._attachments, ask)

    def acquire_write(self, slabs: Iterable[Slab], step: int) -> Pending[list[LeasedBytes]]:
        """Write leases, all or none, in the order of the slabs; the bytes will belong to `step`."""
        wants = [
            pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs
        ]

        def finish(at: Attachment, response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            return [at.plane.open_write(lease) for lease in response.leases]

        # All else that is written takes part in a commit.
        of_gradients = all(want.slab.kind == GRAD for want in wants)
        cause, where = Cause.GRADIENT_MEMORY if of_gradients else Cause.COMMIT, _unit_of(wants)

        def waited(_: Any, began: float, ended: float) -> None:
            self._recorder.stalled(cause, where, began, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            return Pending(_acquire(at, wants), partial(finish, at), waited, partial(_return_granted, at))

        return Lasting(self._attachments, ask)

    @contextmanager
    def holding(self, pending: Pending[list[LeasedBytes]]) -> Iterator[list[LeasedBytes]]:
        """Wait for read leases and hold them within the context. They go back to the store at its end, also after an
        exception.

        Raises:
            SessionEndedError: at the end of the context, because what was read may be somebody else's bytes.
        """
        leases = pending.wait()
        try:
            yield leases
            check(leases)
        except BaseException:
            self.give_back(leases)
            raise
        self.release(leases)

    def give_back(self, leases: Iterable[LeasedBytes]) -> None:
        """Return leases after a failure, without publishing what they hold. Does not wait and raises nothing, because
        the caller has an error to report already."""
        at = self._attachments.current
        at.give_back(leased.lease_id for leased in leases if at.owns(leased))

    def release(self, leases: Iterable[LeasedBytes], next_use: int | None = None) -> Pending[None]:
        """Returns leases, and with them the right to look at their bytes. Does not wait, and need not be waited for.

        Those of a daemon that is gone are gone with it.
        """
        leases = list(leases)

        def give_back(at: Attachment) -> Pending[None]:
            own = [leased for leased in leases if at.owns(leased)]
            return at.release(
                [pb.ReleaseLeasesRequest.Release(lease_id=leased.lease_id, next_use=next_use) for leased in own]
            )

        return Lasting(self._attachments, give_back)

    def publish(self, leases: Sequence[LeasedBytes]) -> None:
        """Returns write leases and stages their bytes as the version of their step."""
        began = time.monotonic()
        publish(self._attachments.current, leases)
        self._recorder.moved(Link.TO_STORE, "", sum(leased.data.numel() for leased in leases), began)

    def put(self, values: Sequence[Value], step: int) -> None:
        """Makes values the versions of `step` of their slabs. They must not change until the step is committed."""
        entry, began = Put(step=step, values=values), time.monotonic()
        with self._recorder.waiting(Cause.COMMIT, unit_of(values[0].slab.group) if values else ""):
            self._hand_over(step, entry)
        nbytes = sum(value.values.numel() * value.dtype.itemsize for value in values)
        self._recorder.moved(Link.TO_STORE, "", nbytes, began)

    def _hand_over(self, step: int, entry: HandOver) -> None:
        """Hands something over, now or, where the daemon is lost meanwhile, with the rest of the journal."""
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.note(step, entry)
        try:
            entry.make(at)
        except StoreError as error:
            self._outlive(at, error, entry)

    def _outlive(self, at: Attachment, error: StoreError, entry: HandOver | None) -> None:
        """As Attachments.outlive; what was refused does not stay in the journal."""
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
        """Hands gradients over; returns when the store has accepted them. Consumes their leases.

        Args:
            begun: `start_apply_gradients` has done it, and only the commit is to come.
        """
        with self._attachments.changed:
            at = self._attachments.current
            entry = self._attachments.journal.note_update(step, hyper_parameters, updates)
        own = [update for update in updates if at.owns(update.gradient)]
        # Their leases are of a daemon that was lost in this moment, before the journal had them.
        others = [update for update in updates if not at.owns(update.gradient)]
        began = time.monotonic()
        try:
            if not begun and (own or not others):
                with self._recorder.waiting(Cause.HAND_OVER, _units_of(own)):
                    apply(at, step, hyper_parameters, own)
                nbytes = sum(update.gradient.data.numel() for update in own)
                self._recorder.moved(Link.TO_STORE, _units_of(own), nbytes, began)
            if others:
                kept = [update.gradient.data for update in others]
                Applied(step=step, hyper_parameters=hyper_parameters, updates=others, kept=kept).make(at)
        except StoreError as error:
            self._outlive(at, error, entry)

    def start_apply_gradients(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
    ) -> Pending[bool]:
        """As `apply_gradients`, for updates that may be withdrawn until `commit`, which consumes the leases. Does not
        wait; nobody writes to the gradients meanwhile. The result says whether the present daemon has them: they are to
        be handed over again where it was restarted."""
        at = self._attachments.current
        where = _units_of(updates)

        def send() -> Any:
            """On a thread of its own. The call itself begins in its turn, after what was sent before: leases that were
            returned are returned then."""
            at.check()
            began = time.monotonic()
            for update in updates:
                at.plane.flush(update.gradient)
            self._recorder.moved(Link.TO_STORE, where, sum(u.gradient.data.numel() for u in updates), began)
            at.check_leases()
            request = apply_request(step, hyper_parameters, updates, provisional=True)
            return at.begin(at.stub.ApplyGradients, request).result()

        def waited(_: Any, began: float, ended: float) -> None:
            self._recorder.stalled(Cause.HAND_OVER, where, began, ended)

        # Leases may be of a daemon that was lost just now; the ids of another one's mean something else.
        are_own = all(at.owns(update.gradient) for update in updates)
        sent = Pending(self._hand_overs.submit(send), lambda _: None, waited) if are_own else None
        return Provisional(self._attachments, at, sent)

    def withdraw_updates(self, step: int, groups: Iterable[str]) -> None:
        """Undoes updates that `start_apply_gradients` has begun and whose end was waited for; their gradients are this
        rank's again."""
        request = pb.WithdrawUpdatesRequest(step=step, groups=groups)
        at = self._attachments.current
        try:
            at.call(at.stub.WithdrawUpdates, request)
        except StoreError as error:
            # The next daemon has not begun with them.
            self._attachments.outlive(at, error)

    def commit(self, step: int, client_state: bytes, settled_step: int) -> Pending[None]:
        """This rank's vote for a step."""
        self._attachments.surviving(Attachment.check)
        with self._attachments.changed:
            at = self._attachments.current
            vote = self._attachments.journal.begin_vote(at, step, client_state, settled_step)
        vote.call.add_done_callback(partial(self._note_commit, step))
        return Commit(self._attachments, vote, self._recorder)

    def _note_commit(self, step: int, call: Any) -> None:
        """On a thread of gRPC: what was kept for a commit that is there is forgotten at once."""
        if not call.cancelled() and call.exception() is None:
            with self._attachments.changed:
                self._attachments.journal.settle(step)

    def read_counters(self) -> Future[pb.ReadCountersResponse]:
        """What the store's tiers have done since its start. Does not wait; its failure is only the caller's."""
        at = self._attachments.current
        return at.begin(at.stub.ReadCounters, pb.ReadCountersRequest())

    def collect_spans(self, *, ends: bool) -> Future[pb.CollectSpansResponse]:
        """What the store has done for the job since the last call; the first one begins to take note. As
        `read_counters`."""
        at = self._attachments.current
        return at.begin(at.stub.CollectSpans, pb.CollectSpansRequest(ends=ends))


def _acquire(at: Attachment, wants: Sequence[pb.AcquireLeasesRequest.Want]) -> Future[Any]:
    at.check()
    return at.begin(at.stub.AcquireLeases, pb.AcquireLeasesRequest(wants=wants), at.deadlines.lease)


def _return_granted(at: Attachment, response: pb.AcquireLeasesResponse) -> None:
    at.give_back(lease.lease_id for lease in response.leases)


def _unit_of(wants: Sequence[pb.AcquireLeasesRequest.Want]) -> str:
    """The unit of a request, whose groups are named by it and the range that they are of it."""
    return unit_of(wants[0].slab.group) if wants else ""


def _units_of(updates: Sequence[GroupUpdate]) -> str:
    return unit_of(updates[0].group) if len(updates) == 1 else f"{len(updates)} groups"
