"""The journal of what this rank has handed to the store for the commit under way, to hand it to the next daemon.

[Note: the journal] If a daemon dies, all that it was given since the last commit is lost. Until the daemon acknowledges
the next commit, the journal keeps what this rank gave to it:

- gradients, as copies, because their memory belongs to the store after the hand-over;
- values, as references to the trainer's own tensors, which the trainer does not change before the commit exists;
- the vote for the commit.

A daemon that was restarted from the commit before gets all of this again in the same order, so it computes the same
bits.

This module owns the copies. A journal must never be replayed into a store that has the commit already; `Attachments`
checks that first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from paramserver.contract.kinds import GRAD, Kind
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.device import wait_for_stream
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.journal_state import JournalState, JournalVerb, following
from trainer_client.client.transport.planes import LeasedBytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabName:
    """The name of a slab: the bytes of one kind (parameters, gradients, a state) of one shard group."""

    group: str
    kind: Kind

    def to_proto(self) -> pb.SlabName:
        return pb.SlabName(group=self.group, kind=self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUpdate:
    """The update of one shard group; see ApplyGradientsRequest.GroupUpdate in parameter_store.proto.

    Attributes:
        group: name of the shard group.
        gradient: the write lease that holds the gradient.
        scale: the store multiplies the gradient by this.
        hyper_parameters_of_shard: for each shard, the index of its hyper-parameters in the request; -1: it is not
            updated.
        clip_value: the store clamps the scaled gradient to [-clip_value, clip_value]; None: it does not clamp.
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
    """New values of a slab. They are converted to `dtype`, the slab's element type, when they are written."""

    slab: SlabName
    dtype: torch.dtype
    values: torch.Tensor


class HandOver(Protocol):
    """An entry of the journal. The classes below implement it: values, updates and declarations of this rank."""

    def make(self, attachment: Attachment) -> None:
        """Hand the entry to the daemon of `attachment`, from tensors that the trainer keeps.

        It can raise StoreError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """An entry with values that this rank has computed itself, such as optimizer states whose home is the device.

    Attributes:
        copying: makes a context in which values are copied from the device, and whose end waits for the copies; None:
            they are copied by the current stream.
    """

    step: int
    values: Sequence[Value]
    copying: Callable[[], AbstractContextManager[None]] | None = None

    @torch.no_grad()
    def make(self, attachment: Attachment) -> None:
        with _acquired(attachment, [value.slab for value in self.values], self.step) as leases:
            with self._on_current_stream() if self.copying is None else self.copying():
                for value, leased in zip(self.values, leases, strict=True):
                    leased.begin_fill(value.values, value.dtype)
            publish(attachment, leases)

    @contextmanager
    def _on_current_stream(self) -> Iterator[None]:
        yield
        for device in {value.values.device for value in self.values}:
            wait_for_stream(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """An entry with values that this rank computes or reads again, so that it need not keep them.

    `make` runs only on the training thread, because the values may depend on torch's global random numbers and the
    model.
    """

    step: int
    values: Callable[[], Sequence[Value]]

    def make(self, attachment: Attachment) -> None:
        Put(step=self.step, values=self.values()).make(attachment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """An entry with updates of groups; `kept` has one copy of a gradient, as uint8 tensor, for each update."""

    step: int
    hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters]
    updates: Sequence[GroupUpdate]
    kept: Sequence[torch.Tensor]

    def make(self, attachment: Attachment) -> None:
        # The gradients are handed to the store one at a time, because the store need not have memory for all of them at
        # once.
        for update, gradient in zip(self.updates, self.kept, strict=True):
            with _acquired(attachment, [SlabName(group=update.group, kind=GRAD)], self.step) as (leased,):
                leased.data.copy_(gradient)
                apply(attachment, self.step, self.hyper_parameters, [replace(update, gradient=leased)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBegun:
    """An entry that declares that the job gets a new layout, whose first commit will be step `first_step`."""

    first_step: int

    def make(self, attachment: Attachment) -> None:
        attachment.call(attachment.stub.BeginLayout, pb.BeginLayoutRequest(first_step=self.first_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An entry that declares to the store which shard groups this rank has."""

    groups: Sequence[pb.ShardGroup]

    def make(self, attachment: Attachment) -> None:
        attachment.call(attachment.stub.RegisterShards, pb.RegisterShardsRequest(groups=self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """An entry that declares to the store that every rank of the job, on every node, has committed a step.

    Attributes:
        step: the step.
        records: whether the store writes this to its catalog at once.
    """

    step: int
    records: bool = False

    def make(self, attachment: Attachment) -> None:
        attachment.call(attachment.stub.SettleStep, pb.SettleStepRequest(step=self.step, record=self.records))


@dataclass(slots=True, kw_only=True)
class JournaledVote:
    """This rank's vote for a commit, and the last call that carried it to the store.

    Attributes:
        step: the step to commit.
        client_state: bytes that are stored with the commit.
        settled: the newest step that all ranks are known to have committed.
        attachment: the attachment that `call` was made on.
        call: future of the call; it is done when the step is committed.
    """

    step: int
    client_state: bytes
    settled: int
    attachment: Attachment
    call: Future[Any]


class Journal:
    """What this rank has handed over since the last acknowledged commit; see [Note: the journal].

    Attributes:
        acknowledged: the newest commit that the store has acknowledged; None: there is none.
        returns_to: the older commit to which the store is being rolled back; None: there is no roll-back.
        layout_begun: the layout without a commit that this rank has begun; None: there is none.
        registered: the shard groups that this rank has declared; None: it has declared none.
        settled: the newest step that this rank has declared to be on all nodes; None: it has declared none.
        step: the commit under way, for which this rank has handed something over; None: nothing was handed over.
        vote: this rank's vote for the commit under way; None: it has not voted.
        state: what the journal has of the commit under way; only this class changes it.
        unkept_bytes: bytes of the commit under way that were handed over without keeping a copy.
        is_open: whether the journal keeps anything; False before `open`.
        is_filling: whether the states are being given their first values. The journal keeps at most as
            many bytes of first values as of gradients.
        awaits_commit: whether the daemon was restarted since the last acknowledged commit. The new one may lack what
            other ranks handed to the last one for the commit under way.
    """

    def __init__(self) -> None:
        self.acknowledged: int | None = None
        self.returns_to: int | None = None
        self.layout_begun: LayoutBegun | None = None
        self.registered: Registered | None = None
        self.settled: Settled | None = None
        self.step: int | None = None
        self.state = JournalState.IDLE
        self.vote: JournaledVote | None = None
        self.unkept_bytes = 0
        self.is_open = False
        self.is_filling = False
        self.awaits_commit = False
        self._most_bytes = 0
        self._durable_every = 1
        self._made_durable: int | None = None
        self._filled_bytes = 0
        self._exceeds = False
        self._entries: list[HandOver] = []
        # The progress of `replay`: it has handed the declarations in `_declared` and the first `_replayed` entries to
        # the attachment `_replayed_to`.
        self._replayed_to: Attachment | None = None
        self._declared: list[HandOver] = []
        self._replayed = 0
        # The journal's copies of gradients, by group. Each step uses the same memory again, because fresh memory of
        # this size costs the kernel as much time as the copy itself.
        self._copies: dict[str, torch.Tensor] = {}

    def open(self, most_bytes: int, *, durable_every: int) -> None:
        """Begin to keep what is handed over, with at most `most_bytes` of gradients or of first values.

        `durable_every` is the number of steps from one durable commit to the next; 0: no commit is durable.
        """
        self._most_bytes = most_bytes
        self._durable_every = durable_every
        self.is_open = self.is_filling = True

    def expect_gradients(self, nbytes: int) -> None:
        """Take note that a step has so many bytes of gradients. If they are more than the limit, none is ever copied.

        Without this call, the journal would copy gradients of the first step up to the limit, and then drop all the
        copies.
        """
        if self.is_open:
            self._has_room(nbytes)

    def go_on_from(self, step: int | None) -> None:
        """Take the commit `step`, which the store has shown as the newest one, as acknowledged and maybe durable."""
        self.acknowledged = self._made_durable = step

    def note_durable(self, step: int) -> None:
        """Count the commit `step` as one that may be durable, although `durable_every` does not divide it."""
        self._made_durable = step

    @property
    def is_useful(self) -> bool:
        """Whether the next daemon may have the commit on which the commit under way builds.

        If this daemon has that commit in memory only, the run ends with the daemon, so copies of gradients are of no
        use.
        """
        before = self.acknowledged if self.vote is None else self.vote.step
        if before is None:
            return True
        return self._durable_every > 0 and (before % self._durable_every == 0 or before == self._made_durable)

    @property
    def kept_bytes(self) -> int:
        """The bytes of memory that the journal's copies of gradients take now."""
        return sum(copy.numel() for copy in self._copies.values())

    def note(self, step: int, entry: HandOver) -> None:
        """Add an entry, which belongs to the commit `step`, behind the others. Before `open`, do nothing."""
        if not self.is_open:
            return
        self._enter(JournalVerb.NOTE, step)
        if self.is_filling and isinstance(entry, Put):
            # The same tensor may be given for several kinds of one group, so its bytes are counted once.
            nbytes = sum({id(value.values): value.values.nbytes for value in entry.values}.values())
            self._filled_bytes += nbytes
            if self._filled_bytes > self._most_bytes:
                self._drop(self._filled_bytes - self.unkept_bytes, step)
                return
        self._entries.append(entry)

    def note_update(
        self,
        step: int,
        hyper_parameters: Sequence[pb.ApplyGradientsRequest.HyperParameters],
        updates: Sequence[GroupUpdate],
    ) -> Applied | None:
        """Add updates with copies of their gradients, and return the entry.

        Return None if the journal is not open, if the copies would be of no use, or if the gradients of a step are
        larger than its limit.
        """
        if not self.is_open:
            return None
        nbytes = sum(update.gradient.nbytes for update in updates)
        # A parked gradient may have no copy in this process: it was parked while the last commit was not known to be
        # durable, so that a copy would have been of no use. If a restart has since shown that the commit is durable,
        # the copy is missing, and the journal cannot keep the step.
        has_all = self.is_useful and all(update.gradient.has_data for update in updates)
        wanted = sum(update.gradient.nbytes for update in updates if update.group not in self._copies)
        if updates and not (has_all and self._has_room(wanted)):
            self._drop(nbytes, step)
            return None
        self._enter(JournalVerb.NOTE, step)
        kept = [self._copy(update) for update in updates]
        entry = Applied(step=step, hyper_parameters=list(hyper_parameters), updates=list(updates), kept=kept)
        self._entries.append(entry)
        return entry

    def _drop(self, nbytes: int, step: int) -> None:
        """Drop all entries of the commit `step`, because `nbytes` of it have no copy. A part of a step is of no use."""
        self._enter(JournalVerb.DROP, step)
        self.unkept_bytes += nbytes
        self._entries.clear()
        self._replayed = 0

    def _enter(self, verb: JournalVerb, step: int) -> None:
        """Enter the state that follows by `verb`, which is about the commit `step`."""
        self.state = following(self.state, verb)
        self.step = step

    def keep(self, group: str, data: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a gradient that is about to be parked, because this rank cannot read parked bytes.

        Return None if the journal is to keep no copy, for the reasons that `note_update` has.
        """
        has_room = self.is_open and self.is_useful and self._has_room(0 if group in self._copies else data.numel())
        if not has_room:
            return None
        if self._entries:
            # An entry of the commit under way still needs the journal's last copy of this group's gradient, so the new
            # gradient gets another copy. The last copy is freed with that entry.
            self._copies.pop(group, None)
        return self._filled_copy(group, data)

    def _has_room(self, wanted: int) -> bool:
        """Return whether `wanted` more bytes of copies are within the limit. If not, drop all copies for good."""
        if not self._exceeds and self.kept_bytes + wanted > self._most_bytes:
            self._exceeds = True
            self._copies.clear()
            log.info(
                "this rank has more bytes of gradients than paramserver.kept_gradients = %d: if the daemon is lost "
                "while a commit is under way, the run has to be restarted",
                self._most_bytes,
            )
        return not self._exceeds

    def remove(self, entry: HandOver | None) -> None:
        """Remove an entry that the store has refused; do nothing if it is not in the journal."""
        places = [place for place, other in enumerate(self._entries) if other is entry]
        for place in places:
            del self._entries[place]
            self._replayed -= place < self._replayed

    def begin_vote(self, attachment: Attachment, step: int, client_state: bytes, settled: int) -> JournaledVote:
        """Begin this rank's vote for the commit `step`, keep the vote in the journal, and return it.

        It does not wait for the commit.
        """
        call = vote(attachment, step, client_state, settled)
        self._enter(JournalVerb.VOTE, step)
        self.vote = JournaledVote(
            step=step, client_state=client_state, settled=settled, attachment=attachment, call=call
        )
        return self.vote

    def acknowledge(self, step: int) -> None:
        """Remove all entries and the vote of the commit `step`, because the store has committed it. Idempotent."""
        if self.step == step:
            self._enter(JournalVerb.ACKNOWLEDGE, step)
            self.acknowledged = step
            if self.layout_begun is not None:
                # The first commit of a new layout is durable if any commit of the job is, so it is noted as durable.
                self.note_durable(step)
            self.step = self.vote = self.layout_begun = None
            self.unkept_bytes = self._replayed = self._filled_bytes = 0
            self.awaits_commit = False
            self._entries.clear()

    def replay(self, attachment: Attachment, *, derives: bool = False) -> bool:
        """Hand over the entries and the vote that a restarted daemon does not have yet; return whether it has all now.

        The daemon has the last acknowledged commit. Without `derives` this stops before the first entry that only the
        training thread can make, and returns False. It raises StoreError.
        """
        if self._replayed_to is not attachment:
            self._replayed_to, self._declared, self._replayed = attachment, [], 0
        for declaration in (self.layout_begun, self.registered, self.settled):
            if declaration is not None and declaration not in self._declared:
                declaration.make(attachment)
                self._declared.append(declaration)
        for entry in self._entries[self._replayed :]:
            if isinstance(entry, Derived) and not derives:
                return False
            entry.make(attachment)
            self._replayed += 1
        if self.vote is not None and self.vote.attachment is not attachment:
            self.vote.call = vote(attachment, self.vote.step, self.vote.client_state, self.vote.settled)
            self.vote.attachment = attachment
        return True

    def _copy(self, update: GroupUpdate) -> torch.Tensor:
        data = update.gradient.data
        if update.gradient.parked is not None:
            # This rank cannot read a parked gradient, so the gradient's `data` is the copy that the journal's `keep`
            # made before.
            return data
        return self._filled_copy(update.group, data)

    def _filled_copy(self, group: str, data: torch.Tensor) -> torch.Tensor:
        if group not in self._copies:
            self._copies[group] = torch.empty_like(data)
        return self._copies[group].copy_(data)


@contextmanager
def _acquired(attachment: Attachment, slabs: Sequence[SlabName], step: int) -> Iterator[list[LeasedBytes]]:
    """Acquire write leases, all or none and in the order of the slabs, for a `with` block.

    The block hands the leases to the store. If the block fails, they are released. It raises StoreError.
    """
    wants = [pb.AcquireLeasesRequest.Want(slab=slab.to_proto(), mode=pb.LEASE_MODE_WRITE, step=step) for slab in slabs]
    request = pb.AcquireLeasesRequest(wants=wants)
    response = attachment.call(attachment.stub.AcquireLeases, request, attachment.deadlines.lease)
    try:
        yield [attachment.plane.open_write(lease) for lease in response.leases]
    except BaseException:
        attachment.release_quietly(lease.lease_id for lease in response.leases)
        raise


def publish(attachment: Attachment, leases: Sequence[LeasedBytes]) -> None:
    """Release write leases, and make their bytes the versions of the leases' step. It can raise StoreError."""
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
    """Hand the gradients of `updates` to the store, which ends their leases. Return when it has accepted them.

    It can raise StoreError.
    """
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
    final: bool = False,
) -> pb.ApplyGradientsRequest:
    """Return the request that hands gradients to the store's optimizer; the caller sets its session id."""
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
        final=final,
    )


def vote(attachment: Attachment, step: int, client_state: bytes, settled: int) -> Future[Any]:
    """Begin this rank's vote for a step, and return the call, which ends when the step is committed."""
    request = pb.CommitStepRequest(step=step, client_state=client_state, settled_step=settled)
    return attachment.begin(attachment.stub.CommitStep, request, attachment.deadlines.commit)
