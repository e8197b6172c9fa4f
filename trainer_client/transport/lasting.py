"""Calls under way that outlive the daemon they were made to: what each of them means when its daemon is lost.

[Note: attaching again] in attachments.py says how the next daemon is found. A read is asked for again, an update that
may be withdrawn is not, and a vote is in the journal, which brings it to the next daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainer_client.errors import StoreError
from trainer_client.recorder import Cause, Recorder
from trainer_client.transport.attachment import Attachment
from trainer_client.transport.attachments import Attachments
from trainer_client.transport.channel import Pending
from trainer_client.transport.journal import Vote

T = TypeVar("T")


class Lasting(Pending[T]):
    """A call that is made again with the next daemon where one is lost before its result was taken."""

    def __init__(self, attachments: Attachments, ask: Callable[[Attachment], Pending[T]]) -> None:
        self.waited_seconds = 0.0
        self._attachments = attachments
        self._ask = ask
        self.attachment, self._pending = self._begin()

    def wait(self) -> T:
        """Raises StoreError."""
        while True:
            at = self.attachment
            try:
                if at is self._attachments.current:
                    result = self._pending.wait()
                    self.waited_seconds = self._pending.waited_seconds
                    return result
            except StoreError as error:
                self._attachments.outlive(at, error)
            self.attachment, self._pending = self._begin()

    def forgo(self) -> None:
        """As Pending.forgo. What a daemon granted that is gone is gone with it."""
        self._pending.forgo()

    def on_response(self, act: Callable[[Any], None]) -> None:
        self._pending.on_response(act)

    def _begin(self) -> tuple[Attachment, Pending[T]]:
        return self._attachments.surviving(lambda at: (at, self._ask(at)))


class Provisional(Pending[bool]):
    """An update that can be withdrawn, of one attachment. It is granted nothing."""

    def __init__(self, attachments: Attachments, at: Attachment, sent: Pending[None] | None) -> None:
        """`sent` None: it was not sent at all."""
        self.waited_seconds = 0.0
        self._attachments = attachments
        self._at = at
        self._sent = sent

    def forgo(self) -> None:
        """Do nothing."""

    def wait(self) -> bool:
        """Raises StoreError."""
        if self._sent is None:
            return False
        if self._at is self._attachments.current:
            try:
                self._sent.wait()
            except StoreError as error:
                self._attachments.outlive(self._at, error)
        return self._at is self._attachments.current


class Commit(Pending[None]):
    """A vote, which the journal brings to the next daemon where one is lost. It is granted nothing."""

    def __init__(self, attachments: Attachments, vote: Vote, recorder: Recorder) -> None:
        self.waited_seconds = 0.0
        self._attachments = attachments
        self._vote = vote
        self._recorder = recorder

    def forgo(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Raises StoreError."""
        with self._attachments.changed:
            at, call = self._vote.attachment, self._vote.call
        try:
            Pending(call, lambda _: None, self._note_wait).wait()
        except StoreError as error:
            # The thread that attaches again has waited for the commit, too.
            self._attachments.outlive(at, error)
        with self._attachments.changed:
            self._attachments.journal.settle(self._vote.step)

    def _note_wait(self, _: Any, began: float, ended: float) -> None:
        self._recorder.stalled(Cause.COMMIT, f"step {self._vote.step}", began, ended)
