"""Pending calls that outlive the loss of the daemon they were made to.

[Note: attaching again] in attachments.py says how the next daemon is found. After that, a lease request is made again,
an update that may be withdrawn is not made again, and a vote for a commit is repeated by the journal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainer_client.base.recorder import Cause, Recorder
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.journal import JournaledVote
from trainer_client.errors import StoreError

T = TypeVar("T")


class RepeatedCall(Pending[T]):
    """The future of a call that is made again with the next daemon if the daemon is lost before `wait` returns."""

    def __init__(
        self,
        attachments: Attachments,
        ask: Callable[[Attachment], Pending[T]],
        *,
        late: Callable[[], bool] | None = None,
    ) -> None:
        """Make the call with `ask`. `late` is called again and again while it waits, as `Pending.while_late` does."""
        self.waited_seconds = 0.0
        self._late = late
        self._attachments = attachments
        self._ask = ask
        self.attachment, self._pending = self._begin()

    @property
    def is_answered(self) -> bool:
        return self._pending.is_answered

    def wait(self) -> T:
        """Wait for the result, and repeat the call with the next daemon if this one is lost.

        It can raise StoreError.
        """
        while True:
            at = self.attachment
            try:
                if at is self._attachments.current:
                    if self._late is not None:
                        self._pending.while_late(self._late)
                    result = self._pending.wait()
                    self.waited_seconds = self._pending.waited_seconds
                    return result
            except StoreError as error:
                self._attachments.outlive(at, error)
            self.attachment, self._pending = self._begin()

    def release_when_granted(self) -> None:
        """Release the leases that the call is granted, as `Pending.release_when_granted` does.

        Leases of a lost daemon need no release, because they are void.
        """
        self._pending.release_when_granted()

    def on_response(self, act: Callable[[Any], None]) -> None:
        self._pending.on_response(act)

    def _begin(self) -> tuple[Attachment, Pending[T]]:
        return self._attachments.retry_over_restarts(lambda at: (at, self._ask(at)))


class WithdrawableUpdate(Pending[bool]):
    """An update that can be withdrawn until the commit. It is made on one attachment, and never repeated with the next.

    The result of `wait` is whether the current daemon has the update.
    """

    def __init__(self, attachments: Attachments, at: Attachment, sent: Pending[None] | None) -> None:
        """Make the future of an update that was sent on `at` by the call `sent`; None if it was not sent at all."""
        self.waited_seconds = 0.0
        self._attachments = attachments
        self._at = at
        self._sent = sent

    def release_when_granted(self) -> None:
        """Do nothing, because the store grants no lease for an update."""

    @property
    def is_answered(self) -> bool:
        return self._sent is None or self._sent.is_answered

    def wait(self) -> bool:
        """Wait until the store has accepted the update, and return True. It can raise StoreError.

        Return False if the current daemon lacks the update: it was not sent, or the daemon that was given it is lost.
        """
        if self._sent is None:
            return False
        if self._at is self._attachments.current:
            try:
                self._sent.wait()
            except StoreError as error:
                self._attachments.outlive(self._at, error)
        return self._at is self._attachments.current


class PendingCommit(Pending[None]):
    """This rank's vote for a commit. If the daemon is lost, the journal repeats the vote with the next one."""

    def __init__(self, attachments: Attachments, vote: JournaledVote, recorder: Recorder) -> None:
        self.waited_seconds = 0.0
        self._attachments = attachments
        self._vote = vote
        self._recorder = recorder

    def release_when_granted(self) -> None:
        """Do nothing, because the store grants no lease for a vote."""

    @property
    def is_answered(self) -> bool:
        return bool(self._vote.call.done())

    def when_answered(self, act: Callable[[], None]) -> None:
        self._vote.call.add_done_callback(lambda _: act())

    def wait(self) -> None:
        """Wait until the store has committed the step. It can raise StoreError."""
        with self._attachments.changed:
            # The vote's call may be on a newer attachment than `current`: after a restart of the daemon, the journal
            # repeats the vote on the new attachment, which becomes the current one only when the commit exists.
            at, call = self._attachments.current, self._vote.call
        try:
            Pending(call, lambda _: None, self._note_wait).wait()
        except StoreError as error:
            # The vote's call has failed, perhaps because the daemon was lost. `Attachments.outlive` returns only after
            # the next daemon has made the commit, so nothing has to be repeated here. If the journal no longer has the
            # vote, the store has committed the step already: the failed call was made to the former daemon, so its
            # error is ignored.
            if not self._is_acknowledged:
                self._attachments.outlive(at, error)
        self._attachments.acknowledge(self._vote.step)

    @property
    def _is_acknowledged(self) -> bool:
        with self._attachments.changed:
            return self._attachments.journal.vote is not self._vote

    def _note_wait(self, _: Any, began: float, ended: float) -> None:
        self._recorder.stalled(Cause.COMMIT, f"step {self._vote.step}", began, ended)
