"""The store as this rank sees it: typed calls, leases as tensors, and the session behind them.

Owns the channel, the session and the choice of the data plane. Must never block where asynchrony was asked for, nor
swallow a failure: what fails behind the caller's back is raised by the next call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import parameter_store_pb2_grpc as pb_grpc
from trainer_client.errors import StoreError
from trainer_client.link.arena import Arena
from trainer_client.link.channel import (
    Pending,
    open_channel,
    translate,
)
from trainer_client.link.credentials import NO_CREDENTIALS, Credentials
from trainer_client.link.deadlines import Deadlines
from trainer_client.link.planes import ArenaPlane, LeasedBytes, Plane, StreamPlane
from trainer_client.link.sender import Sender
from trainer_client.link.session import Session
from trainer_client.link.streams import Streams
from trainer_client.recorder import Cause, Link, Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """One kind of one shard group."""

    group: str
    kind: pb.Kind

    def to_proto(self) -> pb.SlabName:
        return pb.SlabName(group=self.group, kind=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """One group's hand-over of gradients; see ApplyGradientsRequest in the wire contract.

    Attributes:
        next_use: the position at which the group's parameters are needed next.
    """

    group: str
    gradient: LeasedBytes
    scale: float
    hyper_parameters_of_shard: Sequence[int]
    clip_value: float | None = None
    next_use: int = 0


class RankStore:
    """Attributes:
    as_of_step: reads see what this step leaves, and nothing of later ones; None: the newest.

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
        self._recorder = recorder or Recorder()
        self._failure: StoreError | None = None
        # Bytes that the store has fetched for the job, and the sum of what each fetch took in seconds.
        self.fetched: tuple[int, float] = 0, 0.0
        self._arena: Arena | None = None
        self._channel = open_channel(address, credentials)
        try:
            self._stub = pb_grpc.ParameterStoreStub(self._channel)
            self._session = Session(self._stub, client)
        except BaseException:
            self._channel.close()
            raise
        self._deadlines = Deadlines.of(self._session.welcome)
        self._sender = Sender()
        self._hand_overs = ThreadPoolExecutor(1, "paramserver-hand-over")
        self.session_id = self._session.welcome.session_id
        self.epoch = self._session.welcome.epoch
        self.arena_bytes = self._session.welcome.arena.size_bytes
        try:
            self._arena = None if prefer_streams else Arena.map(self._session.welcome.arena)
        except BaseException:
            self.close()
            raise
        streams = Streams(self._channel, self.session_id, self._session.check)
        self.plane: Plane = ArenaPlane(self._arena) if self._arena else StreamPlane(streams)

    def close(self) -> None:
        """Ends the session, and with it all leases; idempotent."""
        self._hand_overs.shutdown(cancel_futures=True)
        self._sender.close()
        if self._arena is not None:
            # Before the session: what this process can write to is not used again until it has let go.
            self._arena.close()
        self._session.close()
        self._channel.close()

    def open_job(self, request: pb.OpenJobRequest) -> pb.OpenJobResponse:
        """Attaches this rank to its job; what is committed of it."""
        request.session_id = self.session_id
        response: pb.OpenJobResponse = self._call(self._stub.OpenJob, request)
        return response

    def begin_layout(self, first_step: int) -> None:
        """Gives the job the layout that `open_job` named, empty; its first commit has that number."""
        request = pb.BeginLayoutRequest(session_id=self.session_id, first_step=first_step)
        self._call(self._stub.BeginLayout, request)

    def register_shards(self, groups: Iterable[pb.ShardGroup]) -> None:
        request = pb.RegisterShardsRequest(session_id=self.session_id, groups=groups)
        self._call(self._stub.RegisterShards, request)

    def roll_back(self, step: int) -> None:
        self._call(self._stub.RollBack, pb.RollBackRequest(session_id=self.session_id, step=step))

    def check_leases(self) -> None:
        """To be called after bytes were copied out of a lease, before they are used.

        Raises:
            SessionEndedError: the leases are void, and what was copied may be somebody else's bytes.
        """
        if self._arena is not None:
            self._arena.check()

    def prefetch(self, wants: Iterable[tuple[Slab, int]]) -> None:
        """Replaces the prefetch window by slabs with their positions. Does not wait; the answer updates `fetched`.

        One that is lost with a broken connection is not missed: the next one replaces it.
        """
        request = pb.PrefetchRequest(
            session_id=self.session_id,
            wants=[pb.PrefetchRequest.Want(slab=slab.to_proto(), position=position) for slab, position in wants],
        )
        self._check()
        future = self._sender.begin(self._stub.Prefetch, request, self._deadlines.control)
        future.add_done_callback(partial(self._note_failure, besides=grpc.StatusCode.UNAVAILABLE))
        Pending(future, lambda _: None).on_response(self._note_fetched)

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

        def finish(response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            began = time.monotonic()
            leases = [self.plane.open_read(lease) for lease in response.leases]
            self._recorder.moved(Link.FROM_STORE, where, sum(lease.size_bytes for lease in response.leases), began)
            return leases

        def waited(response: pb.AcquireLeasesResponse, began: float, ended: float) -> None:
            updated = asked + max((lease.update_wait_seconds for lease in response.leases), default=0.0)
            updated = min(max(began, updated), ended)
            self._recorder.stalled(Cause.UPDATE, where, began, updated)
            self._recorder.stalled(Cause.FETCH, where, updated, ended)

        future = self._acquire(wants)
        if self._recorder.is_tracing:
            future.add_done_callback(lambda _: self._recorder.fetched(where, asked))
        return Pending(future, finish, waited, self._return_granted)

    def acquire_write(self, slabs: Iterable[Slab], step: int) -> Pending[list[LeasedBytes]]:
        """Write leases, all or none, in the order of the slabs; the bytes will belong to `step`."""
        wants = [
            pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs
        ]

        def finish(response: pb.AcquireLeasesResponse) -> list[LeasedBytes]:
            return [self.plane.open_write(lease) for lease in response.leases]

        # All else that is written takes part in a commit.
        of_gradients = all(want.slab.kind == pb.KIND_GRAD for want in wants)
        cause, where = Cause.GRADIENT_MEMORY if of_gradients else Cause.COMMIT, _unit_of(wants)

        return Pending(
            self._acquire(wants),
            finish,
            lambda _, began, ended: self._recorder.stalled(cause, where, began, ended),
            self._return_granted,
        )

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
            self.check_leases()
        except BaseException:
            self.give_back(leases)
            raise
        self.release(leases)

    def give_back(self, leases: Iterable[LeasedBytes]) -> None:
        """Return leases after a failure, without publishing what they hold. Does not wait and raises nothing, because
        the caller has an error to report already. The store may have taken some of them already, for a call of which
        only the answer is missing: each is therefore returned by a call of its own, which may find it gone."""
        for leased in leases:
            self._begin_release([pb.ReleaseLeasesRequest.Release(lease_id=leased.lease_id)])

    def release(self, leases: Iterable[LeasedBytes], next_use: int | None = None) -> Pending[None]:
        """Returns leases, and with them the right to look at their bytes. Does not wait, and need not be waited for."""
        releases = [pb.ReleaseLeasesRequest.Release(lease_id=leased.lease_id, next_use=next_use) for leased in leases]
        request = pb.ReleaseLeasesRequest(session_id=self.session_id, releases=releases)
        return self._send(self._stub.ReleaseLeases, request)

    def _return_granted(self, response: pb.AcquireLeasesResponse) -> None:
        self._begin_release([pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id) for lease in response.leases])

    def _begin_release(self, releases: Sequence[pb.ReleaseLeasesRequest.Release]) -> None:
        request = pb.ReleaseLeasesRequest(session_id=self.session_id, releases=releases)
        future = self._sender.begin(self._stub.ReleaseLeases, request, self._deadlines.control)
        future.add_done_callback(partial(self._note_failure, besides=grpc.StatusCode.NOT_FOUND))

    def publish(self, leases: Sequence[LeasedBytes]) -> None:
        """Returns write leases and stages their bytes as the version of their step."""
        self._flush(f"{len(leases)} leases", leases)
        self.check_leases()
        releases = [pb.ReleaseLeasesRequest.Release(lease_id=leased.lease_id, publish=True) for leased in leases]
        request = pb.ReleaseLeasesRequest(session_id=self.session_id, releases=releases)
        self._call(self._stub.ReleaseLeases, request)

    def apply_gradients(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
    ) -> None:
        """Hands gradients over; returns when the store has accepted them. Consumes their leases."""
        self._flush_gradients(updates)
        with self._recorder.waiting(Cause.HAND_OVER, _units_of(updates)):
            self._call(self._stub.ApplyGradients, self._apply_request(step, hyper_parameters, updates))

    def start_apply_gradients(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
    ) -> Pending[None]:
        """As `apply_gradients`, for updates that may be withdrawn until `commit`, which consumes the leases. Does not
        wait; nobody writes to the gradients meanwhile."""
        self._check()
        request = self._apply_request(step, hyper_parameters, updates, provisional=True)
        future = self._hand_overs.submit(self._start_apply, request, updates)
        return Pending(
            future,
            lambda _: None,
            lambda _, began, ended: self._recorder.stalled(Cause.HAND_OVER, _units_of(updates), began, ended),
        )

    def withdraw_updates(self, step: int, groups: Iterable[str]) -> None:
        """Undoes updates that `start_apply_gradients` has begun and whose end was waited for; their gradients are this
        rank's again."""
        request = pb.WithdrawUpdatesRequest(session_id=self.session_id, step=step, groups=groups)
        self._call(self._stub.WithdrawUpdates, request)

    def _start_apply(self, request: pb.ApplyGradientsRequest, updates: Sequence[GroupUpdate]) -> Any:
        """On a thread of its own: to send gradients may take long. The call itself begins in its turn, after what was
        sent before: leases that were returned are returned then."""
        self._flush_gradients(updates)
        return self._sender.begin(self._stub.ApplyGradients, request, self._deadlines.control).result()

    def _flush_gradients(self, updates: Sequence[GroupUpdate]) -> None:
        for update in updates:
            self._flush(_unit_of_group(update.group), [update.gradient])
        self.check_leases()

    def _apply_request(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
        *,
        provisional: bool = False,
    ) -> pb.ApplyGradientsRequest:
        return pb.ApplyGradientsRequest(
            session_id=self.session_id,
            step=step,
            hyper_parameters=hyper_parameters,
            updates=[
                pb.ApplyGradientsRequest.GroupUpdate(
                    group=update.group,
                    grad_lease_id=update.gradient.lease_id,
                    grad_scale=update.scale,
                    hyper_parameters_of_shard=update.hyper_parameters_of_shard,
                    grad_clip_value=update.clip_value,
                    position=update.next_use,
                )
                for update in updates
            ],
            provisional=provisional,
        )

    def commit(self, step: int, client_state: bytes, settled_step: int) -> Pending[bool]:
        """This rank's vote for a step; the result says whether the commit is durable."""
        self._check()
        request = pb.CommitStepRequest(
            session_id=self.session_id, step=step, client_state=client_state, settled_step=settled_step
        )
        future = self._stub.CommitStep.future(request, timeout=self._deadlines.commit)
        return Pending(
            future,
            lambda response: bool(response.durable),
            lambda _, began, ended: self._recorder.stalled(Cause.COMMIT, f"step {step}", began, ended),
        )

    def read_counters(self) -> Future[pb.ReadCountersResponse]:
        """What the store's tiers have done since its start. Does not wait; its failure is only the caller's."""
        request = pb.ReadCountersRequest(session_id=self.session_id)
        return self._sender.begin(self._stub.ReadCounters, request, self._deadlines.control)

    def collect_spans(self, *, ends: bool) -> Future[pb.CollectSpansResponse]:
        """What the store has done for the job since the last call; the first one begins to take note. As
        `read_counters`."""
        request = pb.CollectSpansRequest(session_id=self.session_id, ends=ends)
        return self._sender.begin(self._stub.CollectSpans, request, self._deadlines.control)

    def _flush(self, where: str, leases: Sequence[LeasedBytes]) -> None:
        began = time.monotonic()
        for leased in leases:
            self.plane.flush(leased)
        self._recorder.moved(Link.TO_STORE, where, sum(leased.data.numel() for leased in leases), began)

    def _acquire(self, wants: Sequence[pb.AcquireLeasesRequest.Want]) -> Future[Any]:
        self._check()
        request = pb.AcquireLeasesRequest(session_id=self.session_id, wants=wants)
        return self._sender.begin(self._stub.AcquireLeases, request, self._deadlines.lease)

    def _call(self, method: Any, request: Any) -> Any:
        self._check()
        try:
            return method(request, timeout=self._deadlines.control)
        except grpc.RpcError as error:
            # Why it failed, where that is the end of the session.
            self._session.check()
            self.check_leases()
            raise translate(error) from error

    def _send(self, method: Any, request: Any) -> Pending[None]:
        """Starts a call that need not be waited for: its failure is also raised by the next call."""
        self._check()
        future = self._sender.begin(method, request, self._deadlines.control)
        future.add_done_callback(self._note_failure)
        return Pending(future, lambda _: None)

    def _note_failure(self, future: Future[Any], besides: grpc.StatusCode | None = None) -> None:
        # Cancelled is what close() leaves behind.
        if isinstance(error := future.exception(), grpc.RpcError):
            failure = translate(error)
            if failure.code is not besides:
                self._failure = failure

    def _check(self) -> None:
        self._session.wait_until_attached()
        if self._failure is not None:
            raise self._failure


def _unit_of(wants: Sequence[pb.AcquireLeasesRequest.Want]) -> str:
    """The unit of a request, whose groups are named by it and the range that they are of it."""
    return _unit_of_group(wants[0].slab.group) if wants else ""


def _units_of(updates: Sequence[GroupUpdate]) -> str:
    return _unit_of_group(updates[0].group) if len(updates) == 1 else f"{len(updates)} groups"


def _unit_of_group(name: str) -> str:
    return name.rpartition("[")[0]
