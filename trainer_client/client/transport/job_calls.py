"""The calls of one rank about its job: opening it, its layout, the return to an earlier step, and kept steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.continuation import Membership, newest_of
from trainer_client.client.transport.journal import HandOver, LayoutBegun, Registered
from trainer_client.errors import StoreError, StoreNotFoundError

# The deadline of KeepStep. It is long, because the store may have to write a whole step to NVMe before it keeps the
# step.
KEEPING_DEADLINE_SECONDS = 3600.0


class JobCalls:
    """The job of one rank, as the store has it.

    Args:
        attachments: the rank's connection.
    """

    def __init__(self, attachments: Attachments) -> None:
        self._attachments = attachments
        self._request = pb.OpenJobRequest()

    @property
    def run_id(self) -> str:
        """The random name of this run of the job, the same on all ranks; "" before `open`."""
        return self._request.run_id

    def open(self, request: pb.OpenJobRequest) -> pb.OpenJobResponse:
        """Attach this rank to its job, and return the store's answer: the job's layouts and committed steps."""
        self._request = request

        def act(at: Attachment) -> pb.OpenJobResponse:
            response: pb.OpenJobResponse = at.call(at.stub.OpenJob, request)
            stored = response.layouts[-1].layout if response.layouts else None
            membership = Membership(job=request, layouts=(stored, request.layout))
            self._attachments.join(at, membership, newest_of(response))
            return response

        return self._attachments.retry_over_restarts(act)

    def confirm_epoch(self) -> str:
        """Return the epoch (see `RankStore.epoch`) of the daemon that serves now.

        This makes a call whose answer is not used. So if the daemon was restarted, this returns the new epoch.
        """

        def act(at: Attachment) -> str:
            at.call(at.stub.ReadCounters, pb.ReadCountersRequest())
            return at.epoch

        return self._attachments.retry_over_restarts(act)

    def begin_layout(self, first_step: int) -> None:
        """Begin the layout that `open` named, without any bytes; its first commit will be step `first_step`."""
        begun = LayoutBegun(first_step=first_step)
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.layout_begun = begun
        self._declare(at, begun)

    def register_shards(self, groups: Iterable[pb.ShardGroup]) -> None:
        registered = Registered(groups=list(groups))
        with self._attachments.changed:
            at = self._attachments.current
            self._attachments.journal.registered = registered
        self._declare(at, registered)

    def _declare(self, at: Attachment, declaration: HandOver) -> None:
        """Hand the store `declaration`, an entry that the journal has. If the daemon is lost, the next one gets it."""
        try:
            declaration.make(at)
        except StoreError as error:
            self._attachments.outlive(at, error)

    @contextmanager
    def rolling_back(self, step: int) -> Iterator[None]:
        """Expect that another rank rolls the job back to the commit `step` within the context, and is done at its end.

        A daemon that is restarted within the context may have the job as it was before the roll-back, or after it.
        """
        with self._attachments.changed:
            self._attachments.journal.returns_to = step
        yield
        with self._attachments.changed:
            self._attachments.journal.go_on_from(step)
            self._attachments.journal.returns_to = None

    def roll_back(self, step: int) -> None:
        # The call RollBack may be repeated, because a job that was rolled back already stays as it is.
        self._attachments.retry_over_restarts(lambda at: at.call(at.stub.RollBack, pb.RollBackRequest(step=step)))

    def keep_step(self, step: int, name: str, note: str) -> admin_pb.KeepStepResponse:
        """Have the store keep a committed step of the job under a name; the kept step is durable when this returns.

        Raises:
            StoreBudgetError: the store has no room to keep the step beside those to come.
            StoreError: the store refused or failed the call.
        """
        request = admin_pb.KeepStepRequest(job=self._request.job, step=step, name=name, note=note)
        # The call KeepStep may be repeated with the next daemon, because a repeated KeepStep of the same step has no
        # further effect.
        response: admin_pb.KeepStepResponse = self._attachments.retry_over_restarts(
            lambda at: at.call_without_session(at.admin.KeepStep, request, KEEPING_DEADLINE_SECONDS)
        )
        return response

    def forget_step(self, name: str) -> None:
        """Have the store forget a kept step of the job. It is no error if the store does not have it."""
        request = admin_pb.ForgetStepRequest(job=self._request.job, name=name)
        with suppress(StoreNotFoundError):
            self._attachments.retry_over_restarts(
                lambda at: at.call_without_session(at.admin.ForgetStep, request, KEEPING_DEADLINE_SECONDS)
            )

    def list_kept_steps(self) -> Sequence[admin_pb.KeptStep]:
        """Return the kept steps of the job in this rank's store, by step and name."""
        request = admin_pb.ListKeptStepsRequest(job=self._request.job)
        response: admin_pb.ListKeptStepsResponse = self._attachments.retry_over_restarts(
            lambda at: at.call_without_session(at.admin.ListKeptSteps, request)
        )
        return response.kept
