"""The calls with which one rank ends a step: its values, its vote, and that every rank has committed the step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments, may_be_lost
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.hand_overs import hand_over
from trainer_client.client.transport.journal import Derived, Put, Settled, Value
from trainer_client.client.transport.later_commit import LaterCommits, LaterValues
from trainer_client.client.transport.pending_calls import PendingCommit
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.errors import StoreError

# A function that makes a context in which the caller begins copies of values from the device. At its end, the context
# waits for the copies. During this wait it calls the function's argument again and again, which may raise an error to
# end the wait.
Copying = Callable[[Callable[[], None]], AbstractContextManager[None]]


class StepCalls:
    """The steps that one rank commits.

    Args:
        attachments: the rank's connection.
        leases: the rank's leases on slabs, which show the bytes of a step from the rank's vote for it on.
        later_commits: the thread that hands over the last values of a step while the trainer goes on.
        recorder: records waits and moved bytes.
    """

    def __init__(
        self, attachments: Attachments, leases: SlabLeases, later_commits: LaterCommits, recorder: Recorder
    ) -> None:
        self._attachments = attachments
        self._leases = leases
        self._later_commits = later_commits
        self._recorder = recorder

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
            hand_over(self._attachments, step, entry, noted)
        nbytes = sum(value.values.numel() * value.dtype.itemsize for value in values)
        self._recorder.moved(Link.TO_STORE, "", nbytes, began)

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
        self._leases.check()
        self._attachments.retry_over_restarts(Attachment.check)
        self._leases.read_as_of(step)
        waiting = deque(later)
        if not waiting:
            return self._vote(step, client_state, settled_step)
        assert copying is not None, "values on the device are copied beside the trainer's work"
        copy = partial(copying, self._later_commits.check)

        def hand_over_and_vote() -> Pending[None]:
            while waiting:
                self._hand_over_later(step, waiting.popleft(), copy)
            self._leases.check()
            self._attachments.retry_over_restarts(Attachment.check)
            return self._vote(step, client_state, settled_step)

        return self._later_commits.begin(step, hand_over_and_vote)

    def _hand_over_later(self, step: int, group: LaterValues, copy: Callable[[], AbstractContextManager[None]]) -> None:
        """Hand values of one flat group to the store, on the thread of `_later_commits`.

        When this returns, the copies are done, so the caller may free the values' memory on the device.
        """
        began = time.monotonic()
        entry = Put(step=step, values=group.values, copying=copy)
        hand_over(self._attachments, step, entry, Put(step=step, values=group.kept, copying=copy))
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

    def amend(self, step: int, client_state: bytes) -> None:
        """Replace the client state of this rank in the newest committed step.

        The daemon must have the capability AMENDED_STEPS. When this returns, the new client state is as durable as the
        step.

        Raises:
            StoreError: the store refuses the call, or cannot be reached.
        """
        request = pb.AmendStepRequest(step=step, client_state=client_state)
        self._attachments.retry_over_restarts(lambda at: at.call(at.stub.AmendStep, request))

    def settle(self, step: int) -> None:
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


def _note_commit(attachments: Attachments, step: int, call: Any) -> None:
    """Remove the commit's entries from the journal as soon as the commit exists; called on a thread of gRPC."""
    if not call.cancelled() and call.exception() is None:
        with attachments.changed:
            attachments.journal.acknowledge(step)
