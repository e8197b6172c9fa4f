"""The attachments of one rank. When its daemon is restarted or has ended its session, the rank attaches again.

[Note: attaching again] A thread beside the training thread attaches again, because the training thread may be waiting
for other ranks, and the commit under way needs the votes of all ranks of the node. The thread

1. waits for a daemon at the address, and opens the rank's job there if the rank had opened it. The daemon of the lost
   session counts only if it has said that it has ended that session;
2. compares the newest commit of that daemon with the journal (continuation.py). It must be the commit under way or the
   one before it. Otherwise the rank cannot go on, and every later call raises an error with the reason;
3. declares the rank's shard groups, and hands over the journal if the commit under way is missing. If the rank has
   voted for it already, the thread waits for that commit, because until then reads could miss what another rank has not
   handed over again;
4. makes the new attachment current, for which the training thread waits in `outlive`.

The training thread then repeats its own lease requests. Gradients that it has not handed over yet are still in the old
arena, from which it copies them. See tests/integration/test_outliving.py.

[Note: the same daemon] A daemon that has ended a session still runs, and gives the session's memory to others. Three
rules make it safe to go on with another session:

- Parameters that were read in place or copied are used only if `Plane.check` of their own session succeeds afterwards,
  so a rank that was computing with them ends with the error of that check. A device that copies from the arena on its
  own may read later than any check, so a rank with such a device ends in any case.
- The store keeps the ranges of gradients that this process was writing, or has handed over for an early update, until
  the process has unmapped them (paramserver/sessions/quarantine.py). Parked gradients are lost unless the journal has
  them.
- The job is opened with `comes_back`. The daemon allows this only if all ranks of the run at this daemon have lost
  their sessions. If only some of them have, the run ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc

from trainer_client.base.log_context import carried
from trainer_client.base.recorder import Cause, Recorder
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.backoff import Backoff
from trainer_client.client.transport.channel import Pending, wait_until_serving
from trainer_client.client.transport.continuation import Continuation, Membership
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.journal import Journal, JournaledVote
from trainer_client.client.transport.session_state import SessionState
from trainer_client.errors import (
    ConfigError,
    PermissionDeniedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnauthenticatedError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

# The status codes with which a call can fail because the daemon stops. ABORTED and NOT_FOUND are among them because a
# stopping daemon ends one session after the other, and then aborts the steps of the ranks that are still attached.
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
# The longest time that a rank waits, after a failed call, for the session's stream to break. If it does not break, the
# daemon is not lost, and the call's error is raised.
_SHOWS_SECONDS = 2.0
# The longest time for which a stopping daemon still accepts new sessions after it has ended this rank's session, so the
# rank tries for this long to find the next daemon.
_STOPPING_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
# The longest pause between two attempts to attach to the next daemon that were answered by the stopping daemon.
_LONGEST_PAUSE_SECONDS = 2.0
_LOOK_SECONDS = 2.0
_LOOK_AT_VOTE_SECONDS = 0.02
_LOOK_AT_COMMIT_SECONDS = 0.5
# The training thread waits longer than the attaching thread by this time, because the attaching thread knows why the
# rank cannot attach again, and the user is to see that reason.
_SLACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Settings of how a rank outlives the loss of its daemon.

    Attributes:
        timeout_seconds: how long the rank waits for the next daemon.
        kept_bytes: limit, in bytes, for the copies of gradients, and for the first values of a new job or layout, that
            the rank keeps until they are committed.
        durable_every: the number of steps from one durable commit to the next; 0: no commit is durable.
        is_loud: whether this rank logs the restart as a warning; other ranks log it at level INFO.
    """

    timeout_seconds: float
    kept_bytes: int
    durable_every: int
    is_loud: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A loss of the session that this rank has outlived: its daemon was restarted, or has ended the session.

    Attributes:
        seconds: time from the loss of the session until this rank was attached again.
        step: the newest commit that the new session's daemon had; None: it had no commit.
        handed_over_again: the commit under way that the new daemon did not have; None: no commit was under way.
    """

    seconds: float
    step: int | None
    handed_over_again: int | None


class Attachments:
    """The current attachment of one rank, and the thread that replaces it after a restart of the daemon.

    Args:
        attach: opens an attachment; takes `on_lost` by keyword.
        address: address of the daemon.
        credentials: token and TLS files to connect with.
        recorder: records the waits for the next daemon.
        survival: how the rank outlives restarts of the daemon; None: it ends with its daemon.

    Attributes:
        current: the newest attachment that this rank may use.
        journal: what this rank has handed over for the commit under way. A thread holds `changed` while it writes the
            journal, or reads it together with `current`.
        changed: the lock of `current` and `journal`; notified when `current` was replaced, or never will be.
        continuation: says whether this rank can go on with the next daemon, and makes the errors that say why not.
        restarts: the restarts of the daemon that this rank has outlived.
    """

    def __init__(
        self,
        attach: Callable[..., Attachment],
        address: str,
        credentials: Credentials,
        recorder: Recorder,
        survival: Survival | None = None,
    ) -> None:
        self.journal = Journal()
        self.continuation = Continuation(address, self.journal)
        self.restarts: list[Restart] = []
        self._attach = attach
        self._address = address
        self._credentials = credentials
        self._recorder = recorder
        self._survival: Survival | None = None
        self._membership: Membership | None = None
        self._gone: StoreError | None = None
        # The attachment on which the attaching thread needs the entries of the journal that only the training thread
        # can make, and the error with which the training thread failed to make them. Each may be None.
        self._wants_derived: Attachment | None = None
        self._not_derived: StoreError | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition(threading.RLock())
        self.current = attach(on_lost=self._on_lost)
        if survival is not None:
            with self.changed:
                self._survival = survival
                self.journal.open(survival.kept_bytes, durable_every=survival.durable_every)
                if self.current.session.failure is not None:
                    self._on_lost(self.current, self.current.session.failure)

    @property
    def reattach_seconds(self) -> float:
        """The most seconds that this rank waits for the next daemon. If it is 0, the run ends with its daemon."""
        return 0.0 if self._survival is None else self._survival.timeout_seconds

    def comes_back_after(self, attachment: Attachment) -> bool:
        """Return whether this rank begins another session after its daemon has ended the session of `attachment`."""
        return self._survival is not None and attachment.can_come_back

    def join(self, attachment: Attachment, membership: Membership, newest: int | None) -> None:
        """Note the job that this rank has opened on `attachment`, and its newest commit.

        Raises:
            StoreError: the session of `attachment` has ended, so that the job has to be opened on the next attachment.
        """
        with self.changed:
            attachment.session.check()
            self._membership = membership
            self.journal.go_on_from(newest)

    def settle(self, layout: str) -> None:
        """Accept from now on only daemons whose job has `layout` as newest layout, because it is committed now."""
        with self.changed:
            self.journal.is_filling = False
            if self._membership is not None:
                self._membership = replace(self._membership, layouts=(layout,))

    def stop_reattaching(self) -> None:
        """Treat the loss of the daemon as final from now on, and end the thread that attaches again."""
        self._closing.set()
        with self.changed:
            self._survival = None
            self.changed.notify_all()
        self.current.session.lose_patience()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the current attachment, and end the thread that attaches again. Idempotent."""
        self.stop_reattaching()
        self.current.close()

    def outlive(self, former: Attachment, error: StoreError) -> None:
        """Wait until another attachment has replaced `former`, on which a call has failed with `error`.

        Raises:
            StoreError: `error` itself, if the session of `former` has not ended; or the reason why this rank cannot
                attach again.
        """
        if self._survival is None or not may_be_lost(error):
            raise error
        with self._recorder.waiting(Cause.DAEMON, self._address):
            self._outlive(former, error)

    def _outlive(self, former: Attachment, error: StoreError) -> None:
        if self.current is former and not former.session.ends_within(_SHOWS_SECONDS):
            raise error
        with self.changed:
            deadline = time.monotonic() + (self._survival.timeout_seconds + _SLACK_SECONDS if self._survival else 0.0)
            while self.current is former and self._gone is None and self._survival is not None:
                if self._wants_derived is not None:
                    self._derive(self._wants_derived)
                elif not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            if self.current is former:
                raise self._why_gone() or error from None

    def _derive(self, attachment: Attachment) -> None:
        """Hand `attachment` the journal's entries that only the training thread can make.

        If this fails, the thread that attaches again gives up this daemon.
        """
        try:
            self.journal.replay(attachment, derives=True)
        except StoreError as error:
            self._not_derived = error
        except BaseException as error:
            self._not_derived = self.continuation.impossible(f"its first values cannot be made again ({error})")
            raise
        finally:
            self._wants_derived = None
            self.changed.notify_all()

    def retry_over_restarts(self, act: Callable[[Attachment], T]) -> T:
        """Call `act` with the current attachment, and again with the next one if its daemon is lost; return the result.

        `act` must be idempotent. It can raise StoreError.
        """
        while True:
            attachment = self.current
            try:
                return act(attachment)
            except StoreError as error:
                self.outlive(attachment, error)

    @property
    def awaits_commit(self) -> bool:
        """Whether the daemon was restarted since the last commit. If so, reads have to wait for the next commit."""
        with self.changed:
            return self.journal.awaits_commit

    def wait_for_voted_commit(self) -> None:
        """Wait, after a restart of the daemon, for the commit that this rank has voted for.

        Call this before a read of bytes that the commit under way may change. Only that commit shows that the new
        daemon has what all ranks have handed over. Without a restart this returns at once, because the store lets a
        read wait for the updates that it has, and the ranks meet in a collective before any of them reads.

        The other ranks vote as soon as they have attached again. A rank that has ended meanwhile never votes, so this
        waits no longer than a rank may take to attach again. It can raise StoreError.
        """
        with self.changed:
            vote = self.journal.vote if self.journal.awaits_commit else None
        if vote is not None:
            self._wait_for_commit(vote, time.monotonic() + self.reattach_seconds + _SLACK_SECONDS)

    def acknowledge(self, step: int) -> None:
        """Remove what belongs to the commit `step` from the journal, because the store has committed it.

        Any thread may call this.
        """
        with self.changed:
            self.journal.acknowledge(step)
            self.changed.notify_all()

    def wait_until_acknowledged(self, step: int, check: Callable[[], None]) -> None:
        """Wait, on a thread beside the training, until the store has committed a step, also over restarts.

        Args:
            step: the step, for which this rank has voted or will vote.
            check: is called again and again, and raises an error to end the wait. A failed vote raises in the training
                thread.
        """
        with self.changed:
            while (newest := self.journal.acknowledged) is None or newest < step:
                check()
                self.changed.wait(_LOOK_AT_COMMIT_SECONDS)

    def _why_gone(self) -> StoreError | None:
        return None if self._gone is None else type(self._gone)(self._gone.code, self._gone.message)

    def _on_lost(self, attachment: Attachment, error: StoreError) -> None:
        """Start the thread that attaches again. The session's thread calls this when the session has ended."""
        with self.changed:
            if self._survival is None or self.current is not attachment or self._closing.is_set():
                return
            if isinstance(error, UnauthenticatedError | PermissionDeniedError) or (
                attachment.session.state is SessionState.ENDED and not self.comes_back_after(attachment)
            ):
                self._gone = error
                self.changed.notify_all()
                return
            self._thread = threading.Thread(
                target=carried(self._attach_again),
                args=(self._survival, attachment, error),
                name="paramserver-attach",
                daemon=True,
            )
            self._thread.start()

    def _attach_again(self, survival: Survival, former: Attachment, cause: StoreError) -> None:
        began = former.session.left_at
        has_ended = former.session.state is SessionState.ENDED
        now, most_seconds = time.monotonic(), survival.timeout_seconds
        deadline = now + most_seconds
        if not has_ended:
            # The session's stream broke some time ago, and the session has waited for the lost daemon since, so the
            # time-out counts from the break.
            deadline = max(began + most_seconds, now + min(most_seconds, _LOOK_SECONDS))
        level = logging.WARNING if survival.is_loud else logging.INFO
        if has_ended:
            log.log(level, "the store daemon at %s has ended this session; beginning another one", self._address)
        else:
            shown = self._address, most_seconds
            log.log(level, "the store daemon at %s is gone; waiting for the next one, at most %g s", *shown)
        try:
            restart = self._next(former, cause, began, deadline)
        except Exception as failure:
            if not isinstance(failure, StoreError):
                log.exception("attaching again failed")
            error = failure if isinstance(failure, StoreError) else self.continuation.impossible(str(failure))
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
        former.close_session()

    def _next(self, former: Attachment, cause: StoreError, began: float, deadline: float) -> Restart:
        """Attach to the next daemon, and return what this rank has outlived. It can raise StoreError.

        If the next daemon is lost meanwhile, attach to the one after it, until `deadline`.
        """
        while True:
            attachment = self._wait_for_daemon(former, cause, deadline)
            self.continuation.ended = former.session.ended_by(attachment.epoch)
            try:
                newest, again = self._take_up(attachment) if self._membership is not None else (None, None)
                self._hand_over_again(attachment, deadline)
            except StoreError as error:
                over = attachment.session.ends_within(_SHOWS_SECONDS) if may_be_lost(error) else False
                attachment.close()
                if not over:
                    raise
                former, cause = attachment, error
                continue
            except BaseException:
                attachment.close()
                raise
            return Restart(seconds=time.monotonic() - began, step=newest, handed_over_again=again)

    def _wait_for_daemon(self, former: Attachment, cause: StoreError, deadline: float) -> Attachment:
        """Wait until a daemon serves that has not the session of `former`, and return an attachment to it.

        It can raise StoreError.
        """
        reason, backoff = cause.message, Backoff(_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        stops_until = time.monotonic() + _STOPPING_SECONDS
        while not self._closing.is_set() and (remaining := deadline - time.monotonic()) > 0:
            try:
                wait_until_serving(self._address, min(remaining, _LOOK_SECONDS), self._credentials)
                attachment = self._attach(on_lost=self._on_lost)
            except (StoreUnavailableError, StoreTimeoutError) as error:
                reason = error.message
                self._closing.wait(_PAUSE_SECONDS)
                continue
            except ConfigError as error:
                # A credentials file may be only half written yet, so the ConfigError is no reason to give up, and the
                # attempt to attach is repeated.
                reason = str(error)
                self._closing.wait(_PAUSE_SECONDS)
                continue
            if attachment.epoch != former.epoch or former.session.state is SessionState.ENDED:
                return attachment
            attachment.close()
            if time.monotonic() > stops_until:
                raise cause
            self._closing.wait(backoff.next_seconds())
        if self._closing.is_set():
            raise cause
        raise StoreUnavailableError(
            grpc.StatusCode.UNAVAILABLE,
            f"the store daemon at {self._address} went away, and no other one served there within the "
            f"paramserver.reattach_timeout_seconds of this run ({reason})",
        )

    def _take_up(self, attachment: Attachment) -> tuple[int | None, int | None]:
        """Open this rank's job with a new daemon, and compare its newest commit with the journal.

        Returns:
            The newest commit that the daemon has, and the commit that is to be handed over again (each may be None).

        Raises:
            StoreError: this rank cannot go on with that daemon, or the daemon was lost.
        """
        membership = self._membership
        assert membership is not None
        newest, layout = self.continuation.open_job(attachment, membership)
        with self.changed:
            vote = self.journal.vote
            # After a change of the job's layout, the daemon's newest commit may be one of the former layout with the
            # same step number as this rank's vote. So the names of the layouts are compared, too.
            is_own = self.journal.layout_begun is None or layout == membership.job.layout
            if vote is not None and newest == vote.step and is_own:
                self.acknowledge(vote.step)
            self.continuation.check_newest(newest)
            if newest is not None and newest == self.journal.acknowledged and self.continuation.ended is None:
                # The daemon was restarted and still has this rank's last commit, so that commit is durable.
                self.journal.note_durable(newest)
            return newest, self.journal.step

    def _hand_over_again(self, attachment: Attachment, deadline: float) -> None:
        """Hand a new daemon what the last one had not committed, and make `attachment` the current one.

        The training thread may add to the journal meanwhile. The replay that finds nothing more to do and the change of
        `current` therefore happen under one hold of the lock. It raises StoreError.
        """
        while True:
            with self.changed:
                self.continuation.check_kept()
                if not self.journal.replay(attachment):
                    self._wait_until_derived(attachment, deadline)
                    continue
                vote = self.journal.vote
                if vote is None:
                    self.current = attachment
                    self.journal.awaits_commit = True
                    if attachment.session.failure is not None:
                        self._on_lost(attachment, attachment.session.failure)
                    self.changed.notify_all()
                    return
            # The attaching thread waits for the commit without the lock, because training threads need the lock until
            # they have voted.
            self._wait_for_commit(vote, deadline)

    def _wait_until_derived(self, attachment: Attachment, deadline: float) -> None:
        """Wait until the training thread, in `outlive`, has handed over the entries that only it can make.

        It can raise StoreError.
        """
        self._wants_derived, self._not_derived = attachment, None
        self.changed.notify_all()
        self.changed.wait_for(
            lambda: self._wants_derived is None or self._closing.is_set(), max(0.0, deadline - time.monotonic())
        )
        failure = self._not_derived
        if self._wants_derived is not None:
            self._wants_derived = None
            failure = self.continuation.impossible(
                "the first values were not made again within paramserver.reattach_timeout_seconds"
            )
        if failure is not None:
            raise failure

    def _wait_for_commit(self, vote: JournaledVote, deadline: float) -> None:
        """Wait until the store has committed the step of `vote`, for which it needs the votes of all ranks of the node.

        It can raise StoreError.
        """
        while not vote.call.done() and time.monotonic() < deadline and not self._closing.is_set():
            self._closing.wait(_LOOK_AT_VOTE_SECONDS)
        if not vote.call.done():
            raise self.continuation.impossible(
                f"commit {vote.step} was handed over again, but not by all ranks within "
                "paramserver.reattach_timeout_seconds"
            )
        Pending(vote.call, lambda _: None).wait()
        self.acknowledge(vote.step)


def may_be_lost(error: StoreError) -> bool:
    """Return whether a call that failed with `error` may have failed because its daemon stops or is gone."""
    return error.code in _MAY_BE_THE_END
