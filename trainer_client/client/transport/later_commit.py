"""The end of a step on a thread of its own: the last values are handed over, and then the rank votes for the commit.

Meanwhile the trainer goes on with the next step, so that copies from the device run while the device computes.

[Note: a vote that comes later] If a daemon is restarted before the vote, the new one lacks what this rank has not
handed over yet. A read by the trainer must then wait for the vote, because it could miss bytes of the step: see
`SlabLeases.acquire_read`. Without a restart a read need not wait, because all bytes that it sees were handed over
before.

This module owns the thread. It must never copy values that the trainer may change meanwhile, so callers pass none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from trainer_client.base.log_context import carried
from trainer_client.base.recorder import Cause, Recorder
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.journal import Value
from trainer_client.errors import StoreUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterValues:
    """Values of one flat group that are handed over while the trainer goes on.

    Attributes:
        values: values on the device, which do not change until they are copied.
        kept: the same values in tensors that the trainer does not change until the step is committed, for the journal.
    """

    values: Sequence[Value]
    kept: Sequence[Value]


class LaterCommit(Pending[None]):
    """The future of a commit for which the thread of `LaterCommits` votes, after it has handed over more values."""

    def __init__(self, step: int, voted: Future[Pending[None]], recorder: Recorder) -> None:
        """Make the future of the commit of `step`. The result of `voted` is the future of the vote's call."""
        self.waited_seconds = 0.0
        self._step = step
        self._voted = voted
        self._recorder = recorder

    def release_when_granted(self) -> None:
        """Do nothing, because the store grants a commit no lease."""

    @property
    def is_answered(self) -> bool:
        return self._voted.done() and (self._voted.exception() is not None or self._voted.result().is_answered)

    def when_answered(self, act: Callable[[], None]) -> None:
        def act_on_answer(voted: Future[Pending[None]]) -> None:
            if voted.cancelled() or voted.exception() is not None:
                act()
            else:
                voted.result().when_answered(act)

        self._voted.add_done_callback(act_on_answer)

    def wait_until_voted(self) -> Pending[None]:
        """Wait until this rank has voted, and return the future of the commit. It can raise StoreError."""
        try:
            return self._voted.result()
        except CancelledError:
            raise _closed() from None

    def wait(self) -> None:
        """Wait until the store has committed the step. It can raise StoreError."""
        with self._recorder.waiting(Cause.COMMIT, f"step {self._step}"):
            pending = self.wait_until_voted()
        pending.wait()


class LaterCommits:
    """The thread that hands over the last values of steps and votes, for one step at a time.

    Attributes:
        newest: the commit that the thread was given last; None: there was none.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.newest: LaterCommit | None = None
        self._recorder = recorder
        self._thread = ThreadPoolExecutor(1, "paramserver-commit")
        self._closing = threading.Event()

    def begin(self, step: int, hand_over_and_vote: Callable[[], Pending[None]]) -> LaterCommit:
        """Call `hand_over_and_vote` on the thread, and return the future of the commit of `step` at once."""
        self.newest = LaterCommit(step, self._thread.submit(carried(hand_over_and_vote)), self._recorder)
        return self.newest

    def check(self) -> None:
        """Raise StoreUnavailableError after `close`. The thread calls this repeatedly while it waits for copies."""
        if self._closing.is_set():
            raise _closed()

    def close(self) -> None:
        """Have the thread end as soon as it can, without waiting for it; idempotent."""
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the thread's end. Call `close` first, and end the session, because that ends the thread's calls."""
        self._thread.shutdown()


def _closed() -> StoreUnavailableError:
    return StoreUnavailableError(grpc.StatusCode.CANCELLED, "the session was closed")
