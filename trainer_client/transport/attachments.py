"""The attachments of one rank, one after the other: when its daemon is restarted, this rank attaches to the new one.

[Note: attaching again] A thread of its own does it, so that a rank whose training thread waits for other ranks attaches
as well: the commit under way needs the votes of all ranks of the node. The thread waits for a daemon at the address,
opens the rank's job, declares the shard groups, and compares the newest commit there with what this rank knows. The
store then has either the commit under way, or the one before, and gets what the journal has. In the latter case the
thread waits for the commit, because until then reads could miss what another rank has not handed over again. Only after
that the training thread, which waits in `outlive`, sees the new attachment. Reads and gradients are its own business:
what it had asked for it asks for again, and gradients that it had not handed over are still readable in the old arena,
to be copied.

Where the store has anything else, this rank cannot go on, and every further call says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import (
    DaemonRestartedError,
    PermissionDeniedError,
    SessionEndedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnauthenticatedError,
)
from trainer_client.recorder import Cause, Recorder
from trainer_client.transport.attachment import Attachment
from trainer_client.transport.channel import Pending, wait_until_serving
from trainer_client.transport.credentials import Credentials
from trainer_client.transport.journal import Journal, Vote

log = logging.getLogger(__name__)

T = TypeVar("T")

# What a call can fail with when the daemon goes. ABORTED and NOT_FOUND: a daemon that stops ends one session after the
# other, and tells the ranks that are left.
_MAY_BE_THE_END = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# A call may fail so long before the session's own stream shows that it is over.
_SHOWS_SECONDS = 2.0
# A daemon that stops may answer for so long after it has ended our session.
_STOPPING_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 2.0
_LOOK_AT_VOTE_SECONDS = 0.02
# The training thread waits a little longer than the thread that attaches, which knows why it gave up.
_SLACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What this rank is, for a daemon that has not seen it.

    Attributes:
        job: the request that opened the rank's job.
        layout: the job's layout, as the store names it.
        groups: what this rank has declared.
    """

    job: pb.OpenJobRequest
    layout: str
    groups: Sequence[pb.ShardGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """How a rank outlives its daemon.

    Attributes:
        timeout_seconds: how long it waits for the next one.
        kept_bytes: most bytes of gradients of which copies are kept until they are committed.
        is_loud: whether this rank is the one that warns.
    """

    timeout_seconds: float
    kept_bytes: int
    is_loud: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart of the daemon that this rank has outlived.

    Attributes:
        seconds: from the loss of the session until this rank was attached again.
        step: the commit that the new daemon had.
        handed_over_again: the commit that was under way and that it did not have; None: there was none.
    """

    seconds: float
    step: int | None
    handed_over_again: int | None


class Attachments:
    """Args:
    attach: opens an attachment; `on_lost` is given to it.
    address, credentials: of the daemon.

    Attributes:
        current: the newest attachment that this rank may use.
        journal: what is handed over. To be read together with `current`, and written, under `changed`.
        changed: the lock of both; notified when `current` is another one, or will not be.
        restarts: of the daemon so far.
    """

    def __init__(
        self,
        attach: Callable[..., Attachment],
        address: str,
        credentials: Credentials,
        recorder: Recorder,
    ) -> None:
        self.journal = Journal()
        self.restarts: list[Restart] = []
        self._attach = attach
        self._address = address
        self._credentials = credentials
        self._recorder = recorder
        self._survival: Survival | None = None
        self._membership: Membership | None = None
        self._gone: StoreError | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition(threading.RLock())
        self.current = attach(on_lost=self._on_lost)

    def survive(self, survival: Survival, membership: Membership, newest: int | None) -> None:
        """From now on, a restart of the daemon is outlived. `newest` is the newest commit, which is acknowledged."""
        with self.changed:
            self._survival, self._membership = survival, membership
            self.journal.open(newest, survival.kept_bytes)
            if self.current.session.failure is not None:
                self._on_lost(self.current, self.current.session.failure)

    def give_up(self) -> None:
        """From now on, the end of a session is final: the run ends."""
        self._closing.set()
        with self.changed:
            self._survival = None
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Ends the session; idempotent."""
        self.give_up()
        self.current.close()

    def outlive(self, former: Attachment, error: StoreError) -> None:
        """Return when another attachment has taken the place of `former`, which a call has failed with `error` on.

        Raises:
            StoreError: the session is not over, and the error is the call's own; or why there is no next one.
        """
        if self._survival is None or error.code not in _MAY_BE_THE_END:
            raise error
        if self.current is former and not former.session.ends_within(_SHOWS_SECONDS):
            raise error
        with self._recorder.waiting(Cause.DAEMON, self._address), self.changed:
            seconds = self._survival.timeout_seconds + _SLACK_SECONDS if self._survival else 0.0
            self.changed.wait_for(
                lambda: self.current is not former or self._gone is not None or self._survival is None, seconds
            )
            if self.current is not former:
                return
            raise self._why_gone() or error from error

    def surviving(self, act: Callable[[Attachment], T]) -> T:
        """Return what `act` returns of the current attachment; it is called again with the next one where a daemon is
        lost. For what is the same however often it is done. Raises StoreError."""
        while True:
            attachment = self.current
            try:
                return act(attachment)
            except StoreError as error:
                self.outlive(attachment, error)

    def settle_commit(self) -> None:
        """To be called before something is read that the commit under way may change.

        After a restart of the daemon, waits for that commit, because only then the daemon is known to have what all
        ranks have handed over. Otherwise returns at once, because a read waits for the updates that the daemon knows
        of, and the ranks meet before any of them reads. Raises StoreError.
        """
        with self.changed:
            vote = self.journal.vote if self.journal.awaits_commit else None
        if vote is not None:
            Pending(vote.call, lambda _: None).wait()
            with self.changed:
                self.journal.settle(vote.step)

    def _why_gone(self) -> StoreError | None:
        return None if self._gone is None else type(self._gone)(self._gone.code, self._gone.message)

    def _on_lost(self, attachment: Attachment, error: StoreError) -> None:
        """On the session's thread: begins to look for the next daemon."""
        with self.changed:
            if self._survival is None or self.current is not attachment or self._closing.is_set():
                return
            if isinstance(error, SessionEndedError | UnauthenticatedError | PermissionDeniedError):
                # This daemon lives and has ended this session: what it was given stays as it is.
                self._gone = error
                self.changed.notify_all()
                return
            self._thread = threading.Thread(
                target=self._attach_again,
                args=(self._survival, attachment, error),
                name="paramserver-attach",
                daemon=True,
            )
            self._thread.start()

    def _attach_again(self, survival: Survival, former: Attachment, cause: StoreError) -> None:
        began = former.session.left_at
        deadline = time.monotonic() + survival.timeout_seconds
        level = logging.WARNING if survival.is_loud else logging.INFO
        shown = self._address, survival.timeout_seconds
        log.log(level, "the store daemon at %s is gone; waiting for the next one, at most %g s", *shown)
        try:
            restart = self._next(former, cause, began, deadline)
        except Exception as failure:
            if not isinstance(failure, StoreError):
                log.exception("attaching again failed")
            error = failure if isinstance(failure, StoreError) else self._cannot(str(failure))
            if not self._closing.is_set():
                log.error("%s", error.message)
            with self.changed:
                self._gone = error
                self.changed.notify_all()
            return
        again = (
            "" if restart.handed_over_again is None else f"; commit {restart.handed_over_again} was handed over again"
        )
        log.log(level, "the run goes on after %.1f s, from commit %s%s", restart.seconds, restart.step, again)
        self._recorder.restarted()
        self.restarts.append(restart)
        former.leave()

    def _next(self, former: Attachment, cause: StoreError, began: float, deadline: float) -> Restart:
        """Attaches to the daemons that come, until one stays. Raises StoreError."""
        while True:
            attachment = self._wait_for_daemon(former, cause, began, deadline)
            try:
                newest, again = self._take_up(attachment)
                self._hand_over_again(attachment, deadline)
            except StoreError as error:
                over = attachment.session.ends_within(_SHOWS_SECONDS) if error.code in _MAY_BE_THE_END else False
                attachment.close()
                if not over:
                    raise
                former, cause = attachment, error
                continue
            except BaseException:
                attachment.close()
                raise
            return Restart(seconds=time.monotonic() - began, step=newest, handed_over_again=again)

    def _wait_for_daemon(self, former: Attachment, cause: StoreError, began: float, deadline: float) -> Attachment:
        """Returns an attachment to another daemon than that of `former`. Raises StoreError."""
        reason = cause
        while not self._closing.is_set() and (remaining := deadline - time.monotonic()) > 0:
            try:
                wait_until_serving(self._address, min(remaining, _LOOK_SECONDS), self._credentials)
                attachment = self._attach(on_lost=self._on_lost)
            except (StoreUnavailableError, StoreTimeoutError) as error:
                reason = error
                self._closing.wait(_PAUSE_SECONDS)
                continue
            if attachment.epoch != former.epoch:
                return attachment
            attachment.close()
            if time.monotonic() > began + _STOPPING_SECONDS:
                raise cause
            self._closing.wait(_PAUSE_SECONDS)
        if self._closing.is_set():
            raise cause
        raise StoreUnavailableError(
            grpc.StatusCode.UNAVAILABLE,
            f"the store daemon at {self._address} went away, and no other one served there within the "
            f"paramserver.reattach_timeout_seconds of this run ({reason.message})",
        )

    def _take_up(self, attachment: Attachment) -> tuple[int | None, int | None]:
        """Makes this rank known to a new daemon.

        Returns:
            The newest commit that the daemon has, and the one that is to be handed over again, if one is.

        Raises:
            StoreError: this rank cannot go on with that daemon; or it has gone, too.
        """
        membership = self._membership
        assert membership is not None
        newest = self._open_job(attachment, membership)
        with self.changed:
            vote = self.journal.vote
            if vote is not None and newest == vote.step:
                self.journal.settle(vote.step)
            self._check(newest)
            again = self.journal.step
        attachment.call(attachment.stub.RegisterShards, pb.RegisterShardsRequest(groups=membership.groups))
        return newest, again

    def _hand_over_again(self, attachment: Attachment, deadline: float) -> None:
        """Gives a new daemon what the last one had not committed, and makes it the present one.

        The training thread may go on writing into the journal until then, so the last look at it and the exchange are
        one act. Raises StoreError.
        """
        while True:
            with self.changed:
                self._check_kept()
                vote = self.journal.replay(attachment)
                if vote is None:
                    self.current = attachment
                    self.journal.awaits_commit = True
                    if attachment.session.failure is not None:
                        self._on_lost(attachment, attachment.session.failure)
                    self.changed.notify_all()
                    return
            # Not under the lock: the training thread of a rank that has not voted yet needs it.
            self._wait_for_commit(vote, deadline)

    def _wait_for_commit(self, vote: Vote, deadline: float) -> None:
        """Waits until the other ranks of the node have voted, too, and the store has the commit. Raises StoreError."""
        while not vote.call.done() and time.monotonic() < deadline and not self._closing.is_set():
            self._closing.wait(_LOOK_AT_VOTE_SECONDS)
        if not vote.call.done():
            raise self._cannot(
                f"commit {vote.step} was handed over again, but not by all ranks within "
                "paramserver.reattach_timeout_seconds"
            )
        Pending(vote.call, lambda _: None).wait()
        with self.changed:
            self.journal.settle(vote.step)

    def _open_job(self, attachment: Attachment, membership: Membership) -> int | None:
        """Returns the newest commit of the job. Raises DaemonRestartedError where the job is not this rank's."""
        request = pb.OpenJobRequest()
        request.CopyFrom(membership.job)
        # A daemon that does not have the job must not begin it anew.
        request.resume = pb.RESUME_POLICY_MUST
        try:
            opened = attachment.call(attachment.stub.OpenJob, request)
        except StoreError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                raise self._cannot(f"it does not have the job of this run ({error.message})") from error
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                raise self._cannot(error.message) from error
            raise
        name = opened.layouts[-1].layout if opened.layouts else None
        if name != membership.layout:
            raise self._cannot(
                f"its job {membership.job.job!r} has another history than this run's: it has another state directory, "
                "or another run has laid the job out anew"
            )
        newest: int | None = max((commit.step for commit in opened.committed), default=None)
        return newest

    def _check(self, newest: int | None) -> None:
        """Raises DaemonRestartedError unless this rank can go on from the newest commit of a store."""
        journal = self.journal
        if newest != journal.acknowledged:
            is_older = newest is None or (journal.acknowledged or 0) > newest
            why = (
                'with paramserver.durability other than "step", commits are gone with the memory of the daemon'
                if is_older
                else "another run has gone on"
            )
            raise self._cannot(f"its newest commit is {newest}, and this run is at {journal.acknowledged}: {why}")

    def _check_kept(self) -> None:
        """Raises DaemonRestartedError where what was handed over is not in the journal."""
        journal = self.journal
        if journal.unkept_bytes:
            raise self._cannot(
                f"commit {journal.step} was under way, and its gradients, {journal.unkept_bytes} bytes of this rank or "
                "more, were larger than paramserver.kept_gradients: raise that to go on here"
            )

    def _cannot(self, why: str) -> DaemonRestartedError:
        return DaemonRestartedError(
            grpc.StatusCode.UNAVAILABLE,
            f"the store daemon at {self._address} was restarted, and this run cannot go on with it: {why}. "
            "What was not committed is gone; restart the job, it resumes from the last commit",
        )
