"""The store as one rank of a training run uses it: typed calls, and leases as tensors.

`RankStore` is the connection, and its parts have the calls: about the job, about leases on slabs, on gradients and on
activations, and about the end of a step. The parts own the rules for a restart of the daemon: which calls are repeated
with the next daemon, and which calls the journal keeps. They must never block in a method that says that it does not
wait, nor swallow a failure: if a call fails that the caller does not wait for, the next call raises its error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from paramserver.contract.bearer import TraceParent
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.recorder import Recorder
from trainer_client.client.transport.activation_leases import ActivationLeases
from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments, Restart, Survival
from trainer_client.client.transport.credentials import NO_CREDENTIALS, Credentials
from trainer_client.client.transport.gradient_leases import GradientLeases
from trainer_client.client.transport.job_calls import JobCalls
from trainer_client.client.transport.later_commit import LaterCommits
from trainer_client.client.transport.pinning import PinDriver
from trainer_client.client.transport.planes import Plane
from trainer_client.client.transport.session import OnRankGone
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.client.transport.step_calls import StepCalls

T = TypeVar("T")


class RankStore:
    """One rank's connection to the store, which outlives restarts of the daemon if it is given a `survival`.

    See [Note: attaching again] in attachments.py.

    Attributes:
        job: the calls about the rank's job.
        leases: the leases on slabs.
        gradients: the leases on gradients, and their updates.
        activations: the leases for activations.
        steps: the calls that end a step.

    Args:
        address: `unix:/path` or `host:port`.
        client: name of this client, shown to people who operate the daemon.
        credentials: token and TLS files to connect with.
        prefer_streams: use gRPC streams even if the arena can be mapped.
        driver: registers the store's shared memory with this rank's device; None: this rank registers nothing.
        recorder: records waits and moved bytes.
        survival: how long to wait for the next daemon, and how many bytes to keep for it; None: the rank ends with its
            daemon.
        trace_parent: adds the span of the step under way to every call; None: the calls have no trace.
        on_rank_gone: called, on a thread of its own, when another rank of the run has lost or closed its session.

    Raises:
        ConfigError: the address or the credentials cannot be used.
        StoreError: the daemon cannot be reached, or refuses the credentials.
    """

    def __init__(
        self,
        address: str,
        client: str,
        credentials: Credentials = NO_CREDENTIALS,
        *,
        prefer_streams: bool = False,
        driver: PinDriver | None = None,
        recorder: Recorder | None = None,
        survival: Survival | None = None,
        trace_parent: TraceParent | None = None,
        on_rank_gone: OnRankGone = lambda _who, _is_closed: None,
    ) -> None:
        self.address = address
        self.credentials = credentials
        self.trace_parent = trace_parent
        recorder = recorder or Recorder()
        attach = partial(
            Attachment,
            address,
            client,
            credentials,
            prefer_streams=prefer_streams,
            driver=driver,
            trace_parent=trace_parent,
            on_rank_gone=on_rank_gone,
            patience_seconds=0.0 if survival is None else survival.timeout_seconds,
        )
        self._attachments = Attachments(attach, address, credentials, recorder, survival)
        # The thread that sends gradients to the store, so that the training thread does not wait for them.
        self._sender = ThreadPoolExecutor(1, "paramserver-hand-over")
        self._later_commits = LaterCommits(recorder)
        self.job = JobCalls(self._attachments)
        self.gradients = GradientLeases(self._attachments, self._sender, recorder)
        relieve = self.gradients.relieve_if_pressed
        self.leases = SlabLeases(self._attachments, self._later_commits, relieve, recorder)
        self.activations = ActivationLeases(self._attachments, self._sender, relieve)
        self.steps = StepCalls(self._attachments, self.leases, self._later_commits, recorder)

    @property
    def reattach_seconds(self) -> float:
        """How long this rank waits for the next daemon when its own is gone; 0: it ends with its daemon."""
        return self._attachments.reattach_seconds

    def settle(self, layout: str) -> None:
        """Accept from now on only daemons whose job has the newest layout `layout`, which is committed now."""
        self._attachments.settle(layout)

    def stop_reattaching(self) -> None:
        """Treat the loss of the daemon as final from now on: calls that wait for the next daemon fail. Idempotent."""
        self._attachments.stop_reattaching()

    def close(self) -> None:
        """End the session, and with it all leases; idempotent."""
        self._later_commits.close()
        self._sender.shutdown(cancel_futures=True)
        self.activations.close()
        self._attachments.close()
        self._later_commits.join()

    @property
    def end_session(self) -> Callable[[], None]:
        """A function that ends the session at once, and with it all leases.

        The function does not refer to this object, so a holder of the function does not keep the object alive.
        """
        return self._attachments.close

    @property
    def restarts(self) -> Sequence[Restart]:
        """The restarts of the daemon after which this rank has gone on with the new daemon, in their order."""
        return tuple(self._attachments.restarts)

    @property
    def session_id(self) -> str:
        return self._attachments.current.session_id

    @property
    def epoch(self) -> str:
        """The random name that the daemon gave itself at its start. It changes when the daemon is restarted."""
        return self._attachments.current.epoch

    @property
    def arena_bytes(self) -> int:
        return self._attachments.current.arena_bytes

    @property
    def plane(self) -> Plane:
        return self._attachments.current.plane

    def repeat_over_restarts(self, act: Callable[[], T]) -> T:
        """Call `act`, and call it again with the next daemon each time a daemon was lost during the call.

        `act` may use sessions of its own with the same daemon. `act` must be idempotent.

        Returns:
            The result of the call of `act` that did not fail.

        Raises:
            StoreError: `act` has failed although the daemon is there, or no daemon came in time.
        """
        return self._attachments.retry_over_restarts(lambda _: act())

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities of the daemon, by the names of paramserver/contract/capabilities.py."""
        return self._attachments.current.capabilities

    def read_counters(self) -> Future[pb.ReadCountersResponse]:
        """Request the counters of the store's tiers since the daemon's start. It does not wait.

        If the call fails, only its future has the error; later calls of this rank are not affected.
        """
        at = self._attachments.current
        return at.begin(at.stub.ReadCounters, pb.ReadCountersRequest())

    def collect_spans(self, *, ends: bool) -> Future[pb.CollectSpansResponse]:
        """Request the spans that the store has recorded for the job since the last call. It does not wait.

        The first call begins the recording, and one with `ends` ends it. A failure is treated as in `read_counters`.
        """
        at = self._attachments.current
        return at.begin(at.stub.CollectSpans, pb.CollectSpansRequest(ends=ends))
