"""The question whether a rank can go on with the next daemon, or with another session of the same one.

This module owns the comparison of the daemon's job with this run, and the errors that say why the rank cannot go on. It
must never attach, nor change the journal: attachments.py [Note: attaching again] says what the answer is used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from paramserver.contract.sizes import shown_size
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.journal import Journal
from trainer_client.errors import (
    DaemonRestartedError,
    SessionEndedError,
    StepAbortedError,
    StoreError,
    StoreUnavailableError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The job that this rank has opened. After a restart of the daemon, the rank opens the job with the new daemon.

    Attributes:
        job: the request that opened the rank's job.
        layouts: the layouts from which this run can go on. If the newest committed layout of the new daemon has
            another name, the rank refuses that daemon, because another run has laid the job out anew. If None is in
            the sequence, the rank also accepts a daemon whose job has no committed layout.
    """

    job: pb.OpenJobRequest
    layouts: Sequence[str | None]


class Continuation:
    """The conditions on which one rank goes on with a daemon that does not have the rank's former session.

    Args:
        address: address of the daemon.
        journal: what this rank has handed over for the commit under way. The caller of `check_newest` and `check_kept`
            holds `Attachments.changed`, the lock of the journal.

    Attributes:
        ended: the error with which the daemon has ended this rank's session, if the rank attaches to the same daemon
            again; None: the rank attaches to another daemon. The caller sets it before it calls `open_job`.
    """

    def __init__(self, address: str, journal: Journal) -> None:
        self.ended: SessionEndedError | None = None
        self._address = address
        self._journal = journal

    def open_job(self, attachment: Attachment, membership: Membership) -> tuple[int | None, str | None]:
        """Open the job, and return its newest commit and the name of that commit's layout.

        Raises:
            DaemonRestartedError, SessionEndedError: it is not the job of this run, or other ranks of the run have gone.
        """
        request = pb.OpenJobRequest()
        request.CopyFrom(membership.job)
        # With RESUME_POLICY_MUST, a daemon that does not have the job refuses to open it, instead of creating a new
        # one. This rank has a commit, if any is acknowledged, so the job must exist.
        has_commit = self._journal.acknowledged is not None
        request.resume = pb.RESUME_POLICY_MUST if has_commit else pb.RESUME_POLICY_AUTO
        request.comes_back = self.ended is not None
        try:
            opened = attachment.call(attachment.stub.OpenJob, request)
        except StoreError as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                raise self.impossible(f"it does not have the job of this run ({error.message})") from None
            if error.code is grpc.StatusCode.FAILED_PRECONDITION or isinstance(error, StepAbortedError):
                raise self.impossible(error.message) from None
            raise
        name = opened.layouts[-1].layout if opened.layouts else None
        if name not in membership.layouts:
            raise self.impossible(
                f"its job {membership.job.job!r} has another history than this run's: it has another state directory, "
                "or another run has laid the job out anew"
            )
        return newest_of(opened), name

    def check_newest(self, newest: int | None) -> None:
        """Raise DaemonRestartedError unless `newest`, a daemon's newest commit, is the last acknowledged one."""
        journal = self._journal
        # After another rank has begun a new layout of the job, the daemon shows no commit of the job until the new
        # layout has one. So a missing commit is accepted here.
        is_begun = journal.layout_begun is not None and newest is None
        if newest != journal.acknowledged and (newest is None or newest != journal.returns_to) and not is_begun:
            is_older = newest is None or (journal.acknowledged or 0) > newest
            why = (
                'with paramserver.durability other than "step", commits are gone with the memory of the daemon'
                if is_older
                else "another run has continued the job"
            )
            raise self.impossible(f"its newest commit is {newest}, and this run is at {journal.acknowledged}: {why}")

    def check_kept(self) -> None:
        """Raise DaemonRestartedError if the journal lacks bytes that were handed over."""
        journal = self._journal
        if journal.state.lacks_bytes:
            what = "first values" if journal.is_filling else "gradients"
            raise self.impossible(
                f"commit {journal.step} was under way, and its {what}, {shown_size(journal.unkept_bytes)} of this "
                f"rank or more, were {self._not_kept}"
            )

    def gradient_lost(self, group: str) -> StoreUnavailableError:
        """Return the error for a gradient that only the lost daemon, or the session that has ended, had."""
        return self.impossible(
            f"the gradient of {group} was parked there, and the gradients of this rank were {self._not_kept}"
        )

    def activations_lost(self) -> StoreUnavailableError:
        """Return the error for activations that only the lost daemon, or the session that has ended, had."""
        return self.impossible("it had activations of this rank's forward, of which the rank has kept no copies")

    @property
    def _not_kept(self) -> str:
        if self._journal.is_useful:
            return "larger than paramserver.kept_gradients: raise that to go on here"
        return 'not kept, because paramserver.durability is not "step"'

    def impossible(self, why: str) -> StoreUnavailableError:
        """Return the error which says that this rank cannot go on with the daemon, for the reason `why`."""
        if self.ended is not None:
            return SessionEndedError(
                self.ended.code,
                f"this process was silent, or its connection broken, for longer than the store daemon at "
                f"{self._address} waits, and this run cannot go on with another session: {why}. What was not committed "
                "is discarded; restart the job, it resumes from the last commit",
            )
        return DaemonRestartedError(
            grpc.StatusCode.UNAVAILABLE,
            f"the store daemon at {self._address} was restarted, and this run cannot go on with it: {why}. "
            "What was not committed is gone; restart the job, it resumes from the last commit",
        )


def newest_of(opened: pb.OpenJobResponse) -> int | None:
    """Return the number of the newest commit of a job, from the response that opened it; None without a commit."""
    newest: int | None = max((commit.step for commit in opened.committed), default=None)
    return newest
