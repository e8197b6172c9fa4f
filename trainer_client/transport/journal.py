"""What this rank has handed to the store for the commit under way, so that it can be handed to the next daemon.

[Note: the journal] A daemon that dies takes with it what was handed over since the last commit. Until the daemon
acknowledges the commit, the journal keeps what this rank gave to it: gradients as copies, because their memory is the
store's from the hand-over on, values as references to the trainer's own tensors, which nothing changes before the
commit is there, and the vote. A daemon that comes back with the commit before this one gets all of it again, in the
same order, and computes the same bits.

Owns the copies. Must never be replayed into a store that has the commit already: the owner looks first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from paramserver.contract.kinds import GRAD, Kind
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.transport.attachment import Attachment
from trainer_client.transport.planes import LeasedBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """One kind of one shard group."""

    group: str
    kind: Kind

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """New values of a slab: `values` are converted to `dtype`."""

    slab: Slab
    dtype: torch.dtype
    values: torch.Tensor


class HandOver(Protocol):
    """Something that was given to the store and becomes part of the next commit."""

    def make(self, attachment: Attachment) -> None:
        """Hands it over from what the trainer keeps. Raises StoreError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Values that this rank has computed itself."""

    step: int
    values: Sequence[Value]

    @torch.no_grad()
    def make(self, attachment: Attachment) -> None:
        with _acquired(attachment, [value.slab for value in self.values], self.step) as leases:
            for value, leased in zip(self.values, leases, strict=True):
                leased.data.view(value.dtype).copy_(value.values)
            publish(attachment, leases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """An update of groups, whose gradients are `kept`: uint8, one for each update."""

    step: int
    hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters]
    updates: Sequence[GroupUpdate]
    kept: Sequence[torch.Tensor]

    def make(self, attachment: Attachment) -> None:
        # One at a time, because the store's memory need not hold more of them than it works on.
        for update, gradient in zip(self.updates, self.kept, strict=True):
            with _acquired(attachment, [Slab(group=update.group, kind=GRAD)], self.step) as (leased,):
                leased.data.copy_(gradient)
                apply(attachment, self.step, self.hyper_parameters, [replace(update, gradient=leased)])


@dataclass(slots=True, kw_only=True)
class Vote:
    """This rank's vote for the commit, and the call that brings it to the store."""

    step: int
    client_state: bytes
    settled: int
    attachment: Attachment
    call: Future[Any]


class Journal:
    """Attributes:
    acknowledged: the newest commit that the store has confirmed; None: there is none.
    step: the commit that something was handed over for and that is not confirmed; None: nothing was.
    vote: for that commit.
    unkept_bytes: of gradients that were handed over and that no copy was kept of.
    awaits_commit: whether the daemon is another one than that of the last acknowledged commit. It may then lack what
        other ranks have handed over for the commit under way, although these believe that they have.
    """

    def __init__(self) -> None:
        self.acknowledged: int | None = None
        self.step: int | None = None
        self.vote: Vote | None = None
        self.unkept_bytes = 0
        self.is_open = False
        self.awaits_commit = False
        self._most_bytes = 0
        self._exceeds = False
        self._entries: list[HandOver] = []
        # The attachment that has the first so many entries by `replay`.
        self._replayed_to: Attachment | None = None
        self._replayed = 0
        # By group, used again in each step: new memory of this size costs the kernel as much as the copy itself.
        self._copies: dict[str, torch.Tensor] = {}

    def open(self, acknowledged: int | None, most_bytes: int) -> None:
        """Begins to keep what is handed over from now on, but of gradients at most `most_bytes`."""
        self.acknowledged = acknowledged
        self._most_bytes = most_bytes
        self.is_open = True

    @property
    def kept_bytes(self) -> int:
        """Bytes of gradients that are kept."""
        return sum(copy.numel() for copy in self._copies.values())

    def note(self, step: int, entry: HandOver) -> None:
        """Keeps something that is handed over."""
        if self.is_open:
            self.step = step
            self._entries.append(entry)

    def note_update(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
    ) -> Applied | None:
        """Keeps an update with copies of its gradients; None where they are not kept, as they would be too large."""
        if not self.is_open:
            return None
        self.step = step
        nbytes = sum(update.gradient.data.numel() for update in updates)
        if not self._exceeds:
            wanted = sum(update.gradient.data.numel() for update in updates if update.group not in self._copies)
            self._exceeds = self.kept_bytes + wanted > self._most_bytes
            if self._exceeds:
                log.info(
                    "this rank has more gradients than paramserver.kept_gradients = %d: where the daemon is lost "
                    "while a commit is under way, the run has to be restarted",
                    self._most_bytes,
                )
        if self._exceeds:
            # A part of a step is of no use.
            self.unkept_bytes += nbytes
            self._copies.clear()
            self._entries.clear()
            self._replayed = 0
            return None
        kept = [self._copy(update) for update in updates]
        entry = Applied(step=step, hyper_parameters=list(hyper_parameters), updates=list(updates), kept=kept)
        self._entries.append(entry)
        return entry

    def remove(self, entry: HandOver | None) -> None:
        """Forgets something that the store has refused."""
        places = [place for place, other in enumerate(self._entries) if other is entry]
        for place in places:
            del self._entries[place]
            self._replayed -= place < self._replayed

    def begin_vote(self, attachment: Attachment, step: int, client_state: bytes, settled: int) -> Vote:
        """Votes for the commit. Does not wait."""
        call = vote(attachment, step, client_state, settled)
        self.step = step
        self.vote = Vote(step=step, client_state=client_state, settled=settled, attachment=attachment, call=call)
        return self.vote

    def settle(self, step: int) -> None:
        """Forgets what the commit `step` consisted of, because the store has it. Idempotent."""
        if self.step == step:
            self.acknowledged = step
            self.step = self.vote = None
            self.unkept_bytes = self._replayed = 0
            self.awaits_commit = False
            self._entries.clear()

    def replay(self, attachment: Attachment) -> Vote | None:
        """Hands over what a daemon does not have yet, which has the commit before; the vote that it has then, if this
        rank has voted. Raises StoreError."""
        if self._replayed_to is not attachment:
            self._replayed_to, self._replayed = attachment, 0
        for entry in self._entries[self._replayed :]:
            entry.make(attachment)
            self._replayed += 1
        if self.vote is not None and self.vote.attachment is not attachment:
            self.vote.call = vote(attachment, self.vote.step, self.vote.client_state, self.vote.settled)
            self.vote.attachment = attachment
        return self.vote

    def _copy(self, update: GroupUpdate) -> torch.Tensor:
        data = update.gradient.data
        if update.group not in self._copies:
            self._copies[update.group] = torch.empty_like(data)
        return self._copies[update.group].copy_(data)


@contextmanager
def _acquired(attachment: Attachment, slabs: Sequence[Slab], step: int) -> Iterator[list[LeasedBytes]]:
    """Give a block write leases, all or none, in the order of the slabs, which the block hands to the store; where the
    block fails, they go back. Raises StoreError."""
    wants = [pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs]
    request = pb.AcquireLeasesRequest(wants=wants)
    response = attachment.call(attachment.stub.AcquireLeases, request, attachment.deadlines.lease)
    try:
        yield [attachment.plane.open_write(lease) for lease in response.leases]
    except BaseException:
        attachment.give_back(lease.lease_id for lease in response.leases)
        raise


def publish(attachment: Attachment, leases: Sequence[LeasedBytes]) -> None:
    """Return write leases, and stage their bytes as the version of their step. Raises StoreError."""
    for leased in leases:
        attachment.plane.flush(leased)
    attachment.check_leases()
    releases = [pb.ReleaseLeasesRequest.Release(lease_id=leased.lease_id, publish=True) for leased in leases]
    attachment.call(attachment.stub.ReleaseLeases, pb.ReleaseLeasesRequest(releases=releases))


def apply(
    attachment: Attachment,
    step: int,
    hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
    updates: Sequence[GroupUpdate],
) -> None:
    """Hand gradients over, and return when the store has accepted them. Consumes their leases. Raises StoreError."""
    for update in updates:
        attachment.plane.flush(update.gradient)
    attachment.check_leases()
    attachment.call(attachment.stub.ApplyGradients, apply_request(step, hyper_parameters, updates))


def apply_request(
    step: int,
    hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
    updates: Sequence[GroupUpdate],
    *,
    provisional: bool = False,
) -> pb.ApplyGradientsRequest:
    """Return the request of an update, but for the session."""
    return pb.ApplyGradientsRequest(
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


def vote(attachment: Attachment, step: int, client_state: bytes, settled: int) -> Any:
    """Begin this rank's vote for a step, and return the call, which ends when the step is committed."""
    request = pb.CommitStepRequest(
        session_id=attachment.session_id, step=step, client_state=client_state, settled_step=settled
    )
    return attachment.stub.CommitStep.future(request, timeout=attachment.deadlines.commit)
