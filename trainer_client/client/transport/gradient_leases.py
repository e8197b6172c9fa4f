"""Leases of one rank on gradients, and the updates that the store makes with them.

If a daemon is lost, the next one is handed the gradients that the journal has kept, or that are still in the memory of
a lost lease.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport import lease_calls
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.hand_overs import outlive
from trainer_client.client.transport.journal import Applied, GroupUpdate, SlabName, apply, apply_request
from trainer_client.client.transport.parking import Parking
from trainer_client.client.transport.pending_calls import RepeatedCall, WithdrawableUpdate
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.errors import StoreError


class GradientLeases:
    """The leases that hold one rank's gradients within a step, until the store's optimizer uses them.

    Args:
        attachments: the rank's connection.
        sender: the thread that sends gradients to the store, so that the training thread does not wait for them.
        recorder: records waits and moved bytes.

    Attributes:
        parking: which gradients this rank parks.
    """

    def __init__(self, attachments: Attachments, sender: ThreadPoolExecutor, recorder: Recorder) -> None:
        self.parking = Parking()
        self._attachments = attachments
        self._sender = sender
        self._recorder = recorder

    def expect(self, nbytes: int) -> None:
        """Announce to the journal how many bytes of gradients this rank hands over in a step.

        If they are more than the journal's limit, it keeps no copies of gradients at all.
        """
        with self._attachments.changed:
            self._attachments.journal.expect_gradients(nbytes)

    def acquire(self, slab: SlabName, step: int) -> Pending[LeasedBytes]:
        """Request a lease to write the gradient of `step`."""
        want = pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step)
        ask = partial(lease_calls.acquire_one, want=want, waited=partial(self._waited, slab))
        call = RepeatedCall(self._attachments, ask, late=self.relieve_if_pressed)
        call.on_response(partial(self.parking.note, slab.group))
        return call

    def _waited(self, slab: SlabName, _: Any, began: float, ended: float) -> None:
        self._recorder.stalled(Cause.GRADIENT_MEMORY, ShardGroupName.unit_of(slab.group), began, ended)

    def park(self, group: str, leased: LeasedBytes, *, is_sent: bool) -> LeasedBytes | None:
        """Park a gradient, and return its lease without the bytes; None if its daemon is gone. It does not wait.

        The caller must not touch the bytes of `leased` any more. The result can be handed over, released or recalled.

        Args:
            group: the group of the gradient.
            leased: the gradient.
            is_sent: whether `start_updates` has made the bytes visible to the store.
        """
        with self._attachments.changed:
            at = self._attachments.current
            if not at.owns(leased):
                return None
            kept = self._attachments.journal.keep(group, leased.data)
        return lease_calls.park(self._sender, at, leased, is_sent=is_sent, kept=kept)

    def recall(self, slab: SlabName, parked: LeasedBytes, step: int) -> Pending[LeasedBytes]:
        """Request a parked gradient, to read and write it again.

        If the daemon was lost meanwhile, the result is a lease of the next daemon, with the bytes that the journal has
        kept. The result of `wait` raises DaemonRestartedError if the journal has kept none.
        """
        want = pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step)

        def finish(at: Attachment, response: pb.AcquireLeasesResponse) -> LeasedBytes:
            (lease,) = response.leases
            if at.owns(parked) and lease.lease_id == parked.lease_id:
                return replace(at.plane.open_read(lease), asks_to_park=lease.park)
            leased = lease_calls.open_write(at, lease)
            self.refill(slab.group, leased, parked)
            return leased

        def ask(at: Attachment) -> Pending[LeasedBytes]:
            if at.owns(parked):
                # The store refuses to lease a gradient whose parking is under way, so this waits until the gradient is
                # parked.
                at.plane.flush(parked)
            return Pending(
                lease_calls.acquire(at, [want]),
                partial(finish, at),
                partial(self._waited, slab),
                partial(lease_calls.release_granted, at),
            )

        return RepeatedCall(self._attachments, ask, late=self.relieve_if_pressed)

    def refill(self, group: str, leased: LeasedBytes, former: LeasedBytes) -> None:
        """Copy a gradient from `former`, a lease whose daemon was lost, into `leased`, a lease of the next daemon.

        Raises:
            DaemonRestartedError: the gradient was parked, and the journal has not kept its bytes.
        """
        if not former.has_data:
            raise self._attachments.continuation.gradient_lost(group)
        leased.data.copy_(former.data)

    def apply(
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
            begun: `start_updates` has handed these updates over already, so only the journal is to note them.
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
                    raise self._attachments.continuation.gradient_lost(lost[0])
                kept = [update.gradient.data for update in others]
                Applied(step=step, hyper_parameters=hyper_parameters, updates=others, kept=kept).make(at)
        except StoreError as error:
            outlive(self._attachments, at, error, entry)

    def start_updates(
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
            """Make the bytes visible to the store and make the call; runs on the thread of `sender`.

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
        sent = Pending(self._sender.submit(send), lambda _: None, waited) if are_own else None
        return WithdrawableUpdate(self._attachments, at, sent)

    def withdraw_updates(self, step: int, groups: Iterable[str]) -> None:
        """Undo updates of `start_updates`, after which this rank may write to their gradients again.

        The caller has waited for the result of `start_updates`.
        """
        request = pb.WithdrawUpdatesRequest(step=step, groups=groups)
        at = self._attachments.current
        try:
            at.call(at.stub.WithdrawUpdates, request)
        except StoreError as error:
            # If the daemon is lost, the next daemon has not received these updates, so it has nothing to withdraw, and
            # the call is not repeated.
            self._attachments.outlive(at, error)

    def relieve_if_pressed(self) -> bool:
        """Park this rank's gradients if the daemon reports that requests wait for room. Return whether it does."""
        is_pressed = self._attachments.current.session.is_pressed
        if is_pressed:
            self.parking.begin_for_all()
        return is_pressed


def _units_of(updates: Sequence[GroupUpdate]) -> str:
    return ShardGroupName.unit_of(updates[0].group) if len(updates) == 1 else f"{len(updates)} groups"
