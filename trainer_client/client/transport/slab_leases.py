"""Leases of one rank on slabs, as tensors, and the window of slabs that the store prefetches for the job.

If a daemon is lost, a request for leases is made again to the next one, because a version has the same bytes there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport import lease_calls
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.device_memory import OfferedMemory
from trainer_client.client.transport.device_offer import DeviceOffer
from trainer_client.client.transport.journal import SlabName, publish
from trainer_client.client.transport.later_commit import LaterCommits
from trainer_client.client.transport.pending_calls import RepeatedCall
from trainer_client.client.transport.planes import LeasedBytes, check


class SlabLeases:
    """The leases with which one rank reads and writes slabs of its job.

    Args:
        attachments: the rank's connection.
        later_commits: the thread that votes for commits; a read may have to wait for its vote.
        relieve: parks gradients of this rank if the daemon says that requests wait for room, and returns whether it
            says so. A thread that waits for a lease calls it again and again until it returns True.
        recorder: records waits and moved bytes.

    Attributes:
        device: the memory of this rank's device in which the store may place copies of slabs.
        fetched: two totals of the job: bytes that the store has fetched into its host memory, and the seconds that
            these fetches took, summed.
    """

    def __init__(
        self, attachments: Attachments, later_commits: LaterCommits, relieve: Callable[[], bool], recorder: Recorder
    ) -> None:
        self.device = DeviceOffer(attachments)
        self.fetched: tuple[int, float] = 0, 0.0
        self._attachments = attachments
        self._later_commits = later_commits
        self._relieve = relieve
        self._recorder = recorder
        self._as_of_step: int | None = None  # None if reads see the newest version, committed or not.

    def check(self) -> None:
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
        """Have `acquire_read` return bytes of the committed `step`, and no later ones, until `StepCalls.commit`."""
        self._as_of_step = step

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
        if next_uses is not None and self.device.memory is not None:
            for want, next_use in zip(wants, next_uses, strict=True):
                want.device.CopyFrom(pb.DeviceUse(next_use=next_use))

        where, asked = lease_calls.unit_of(wants), time.monotonic()

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
            memory = self.device.offer_again(at)
            future = lease_calls.acquire(at, wants)
            if self._recorder.is_tracing:
                future.add_done_callback(lambda _: self._recorder.fetched(where, asked))
            return Pending(future, partial(finish, at, memory), waited, partial(lease_calls.release_granted, at))

        # The lease request may be repeated with the next daemon, because a version has the same bytes in each daemon.
        return RepeatedCall(self._attachments, ask, late=self._relieve)

    def acquire_write(self, slabs: Iterable[SlabName], step: int) -> Pending[list[LeasedBytes]]:
        """Request write leases, all or none; the result has the order of `slabs`. The bytes will belong to `step`.

        The slabs are none of gradients, for which `GradientLeases.acquire` asks.
        """
        wants = [
            pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs
        ]
        where = lease_calls.unit_of(wants)

        def waited(_: Any, began: float, ended: float) -> None:
            # These slabs are written only as a part of a commit, so the wait counts as waiting for the commit.
            self._recorder.stalled(Cause.COMMIT, where, began, ended)

        def ask(at: Attachment) -> Pending[list[LeasedBytes]]:
            return Pending(
                lease_calls.acquire(at, wants),
                lambda response: [lease_calls.open_write(at, lease) for lease in response.leases],
                waited,
                partial(lease_calls.release_granted, at),
            )

        return RepeatedCall(self._attachments, ask, late=self._relieve)

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
