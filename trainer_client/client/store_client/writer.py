"""The writer of a job in one process: it puts tensors, and commits them together as the next step.

This module owns a session of its own, because the store allows one open job for each session, and the puts of the step
under way. It must never commit a step that may be incomplete: after a failed put the step is abandoned, and an error
tells the caller to put its tensors again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import torch

from paramserver.contract.kinds import PARAM
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.connection import Call, Connection, LeaseRequest, StoreSession, Timeout, resume
from trainer_client.client.store_client.job_layout import PACKED, JobLayout
from trainer_client.client.store_client.packing import Filling, Packing
from trainer_client.client.store_client.staging import commit_step, put_slabs, registrations
from trainer_client.client.store_client.types import TensorSpec, bytes_of, check_values
from trainer_client.client.transport.channel import (
    COMMIT_DEADLINE_SECONDS,
    CONTROL_DEADLINE_SECONDS,
    LEASE_DEADLINE_SECONDS,
)
from trainer_client.errors import (
    ConfigError,
    JobConflictError,
    StepAbortedError,
    StoreError,
    StoreNotFoundError,
    StoreUnavailableError,
)

# The default size of a shard, into which the writer cuts tensors: large enough to keep a device busy, and small enough
# for a small host budget.
DEFAULT_SHARD_BYTES = 16 << 20
# The most shards that are leased or being published at once. Together they take at most 1 / _ARENA_SHARE of the arena,
# unless one shard alone is larger.
_SHARDS_UNDER_WAY = 4
_ARENA_SHARE = 4
# After a break of the connection, the daemon may treat the writer's former session as open for the heartbeat time-out
# plus this many seconds, so the writer waits that long until it can open the job again.
_HAND_OVER_SLACK_SECONDS = 5.0
_HAND_OVER_LOOK_SECONDS = 0.1


class StoreWriterSync:
    """A job that is open for writing; StoreClientSync.open makes it. Calls from several threads wait for each other."""

    def __init__(self, connection: Connection, layout: JobLayout, call: Call) -> None:
        self._connection = connection
        self._layout = layout
        self._lock = threading.RLock()
        self._session: StoreSession | None = None
        # Whether this writer has tried to open the job before. If so, the daemon may still hold the job for a former
        # session of this writer, and it is worth waiting until the daemon ends that session.
        self._has_tried = False
        self._committed: int | None = None
        self._put: set[str] = set()
        self._packing = Packing()
        # The error because of which the step under way cannot be committed; None if it can be committed.
        self._failure: StoreError | None = None
        self._closed = False
        self._attach(call)

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._layout.name

    @property
    def step(self) -> int | None:
        """The number of the job's newest committed step; None if no step is committed yet."""
        return self._committed

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The specs that the job was opened with, by name of the tensor."""
        return self._layout.tensors

    def __enter__(self) -> StoreWriterSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session; tensors that were put but not committed are discarded. A repeated call has no effect."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()

    def put(self, tensors: Mapping[str, torch.Tensor], *, timeout: Timeout | Call = None) -> None:
        """Put the values that tensors will have in the next step, which `commit` then commits.

        Each tensor is put whole and at most once in a step. A tensor that is not put keeps its value, but the first
        step needs all of them. One call with many tensors is faster than many calls. Small tensors are copied, and may
        stay in this process until `commit`, because they are sent in groups.

        Args:
            tensors: by name, with the shapes and dtypes that the job was opened with, on any device.
            timeout: deadline of the call in seconds, or as a timedelta.

        Raises:
            ConfigError: a tensor is not the job's, or was put in this step already.
            StepAbortedError: earlier puts of this step were lost, because the daemon was restarted or a put failed: put
                all tensors of the step again, after `roll_back` if the message says so.
            StoreBudgetError: the store's memory or disk had no room; the step is abandoned.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time; the step is abandoned.
        """
        call = Call.of(timeout, LEASE_DEADLINE_SECONDS)
        for fqn, tensor in tensors.items():
            self._check_tensor(fqn, tensor)
        with self._lock:
            call.check()
            if twice := self._put & tensors.keys():
                raise ConfigError(f"tensor {min(twice)!r} was put since the last commit; commit before it is put again")
            session = self._usable_session(call)
            try:
                self._put |= tensors.keys()
                self._send(session, call, tensors)
            except StoreError as error:
                self._failure = error
                if self._has_ended(session, error, call):
                    self._begin_again(call)
                raise
            except BaseException:
                self._failure = StoreUnavailableError(grpc.StatusCode.CANCELLED, "a put was cancelled")
                raise

    def commit(self, *, timeout: Timeout | Call = None) -> int:
        """Commit the values that were put as the job's next step, atomically, and return the step's number.

        If the daemon dies meanwhile, this waits for its restart and finds out whether the step was committed.

        Raises:
            StepAbortedError: the step was not committed: put its tensors again.
            StoreTimeoutError, StoreUnavailableError: it could not be found out in time whether the step was committed.
                Call `roll_back` once the store answers again; then `step` is the newest committed step.
            StoreError: the store refuses; the step is abandoned.
        """
        call = Call.of(timeout, COMMIT_DEADLINE_SECONDS)
        with self._lock:
            call.check()
            session = self._usable_session(call)
            step = self._next_step
            self._check_initial_values()
            try:
                self._send_incomplete(session, call)
                commit_step(step, [(session, b"")], step, call)
            except (StoreUnavailableError, StoreNotFoundError) as error:
                self._failure = error
                if isinstance(error, StoreNotFoundError) and not self._has_ended(session, error, call):
                    raise
                # The call CommitStep got no answer, so the writer opens the job again: the response names the newest
                # committed step, which shows whether this step was committed.
                self._reopen(call)
                if self._committed != step:
                    raise StepAbortedError(
                        grpc.StatusCode.ABORTED,
                        f"the commit of step {step} of job {self.name!r} got no answer ({error.message}), and the step "
                        "is not there: put its tensors again",
                    ) from None
            except BaseException as error:
                self._failure = (
                    error
                    if isinstance(error, StoreError)
                    else StoreUnavailableError(grpc.StatusCode.CANCELLED, "a commit was cancelled")
                )
                raise
            self._committed = step
            self._put.clear()
            self._packing.clear()
            return step

    def roll_back(self, *, timeout: Timeout | Call = None) -> int | None:
        """Discard the values that were put since the last commit.

        Return the newest committed step; None if there is none.

        Raises:
            StoreError: the daemon cannot be reached, or refuses.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        with self._lock:
            self._check_open()
            self._reopen(call)
            return self._committed

    @property
    def _next_step(self) -> int:
        return 0 if self._committed is None else self._committed + 1

    def _usable_session(self, call: Call) -> StoreSession:
        """Return the writer's session, or another one if it has ended.

        Raises:
            StepAbortedError: tensors that were put for the step under way are lost.
        """
        self._check_open()
        if self._failure is not None:
            raise StepAbortedError(
                grpc.StatusCode.ABORTED,
                f"step {self._next_step} of job {self.name!r} cannot be committed, because a put or the commit failed "
                f"({self._failure.message}): call roll_back, then put its tensors again",
            ) from self._failure
        if self._session is not None and self._session.goes_on(call):
            return self._session
        self._begin_again(call)
        assert self._session is not None
        return self._session

    def _has_ended(self, session: StoreSession, error: StoreError, call: Call) -> bool:
        """Return whether a call has failed with `error` because the store does not know `session` any more."""
        return isinstance(error, StoreNotFoundError) and not session.is_known(call)

    def _begin_again(self, call: Call) -> None:
        """Open the job on another session, because the writer's session has ended.

        Raises:
            StepAbortedError: tensors had been put in the ended session, so they are lost.
        """
        lost = sorted(self._put)
        self._reopen(call)
        if lost:
            raise StepAbortedError(
                grpc.StatusCode.ABORTED,
                f"the session with the store has ended, and what was put for step {self._next_step} of job "
                f"{self.name!r} is gone ({', '.join(lost[:5])}{', ...' if lost[5:] else ''}): put it again",
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"job {self.name!r} was closed; open it again")

    def _reopen(self, call: Call) -> None:
        """Open the job again on a new session. The store discards the puts of the former session."""
        if self._session is not None:
            self._session.close()
        self._attach(call)

    def _attach(self, call: Call) -> None:
        """Open the job on a new session that only this writer uses. It can raise StoreError."""

        def attempt(session: StoreSession) -> None:
            # Each attempt to open the job uses a new session, and so a new run, because a run whose only rank has gone
            # can commit nothing any more.
            response = self._open_once_free(session, self._layout.open_request(), call)
            if any(layout.layout != PACKED for layout in response.layouts[-1:]):
                raise JobConflictError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"job {self.name!r} was not stored by a StoreClient, or by one of an earlier version, so its "
                    "tensors are in other groups and cannot be written: read it, and put them into another job",
                )
            for registration in registrations(self._layout.groups()):
                session.call("RegisterShards", registration, call)
            self._committed = max((commit.step for commit in response.committed), default=None)
            self._session = session
            self._put.clear()
            self._packing.clear()
            self._failure = None

        def with_session(session: StoreSession) -> None:
            try:
                attempt(session)
            except BaseException:
                session.close()
                raise
            finally:
                self._has_tried = True

        resume(call, lambda: self._connection.new_session(call), with_session)

    def _open_once_free(self, session: StoreSession, request: pb.OpenJobRequest, call: Call) -> Any:
        """Open the job and return the response; wait while this writer's own broken session still holds the job."""
        # The daemon ends a session at most this many seconds after the client has gone silent or the session's stream
        # has broken.
        silent_seconds = session.session.welcome.heartbeat_timeout_millis / 1000
        give_up_at = time.monotonic() + silent_seconds + _HAND_OVER_SLACK_SECONDS
        while True:
            try:
                return session.call("OpenJob", request, call)
            except JobConflictError:
                # It helps to wait for the job only if a former session of this writer holds it, because the daemon will
                # end that session. If this is the writer's first attempt, another client holds the job, so the error is
                # raised.
                if not self._has_tried or time.monotonic() > give_up_at:
                    raise
            call.pause(_HAND_OVER_LOOK_SECONDS)

    def _send(self, session: StoreSession, call: Call, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors to the store. A small tensor stays in this process until all tensors of its pack were put."""
        packs = self._layout.packs
        small = ((packs[fqn], fqn, tensor) for fqn, tensor in tensors.items() if fqn in packs)
        whole = [(filling.pack.name, bytes_of(filling.values)) for filling in self._packing.put(call, small)]
        large = (
            (group, bytes_of(flat[start:end]))
            for fqn, tensor in tensors.items()
            if fqn not in packs
            for flat in (tensor.detach().reshape(-1),)
            for group, start, end in self._layout.shards(fqn)
        )
        self._send_groups(session, call, [*whole, *large])

    def _check_initial_values(self) -> None:
        """Before the first commit, raise JobConflictError if a small tensor was not put yet.

        The message names the tensor. Small tensors are sent to the store in packs (groups of several small tensors, see
        job_layout.py), so a pack with a missing tensor would be written without its initial values.
        """
        for filling in self._packing.incomplete() if self._committed is None else ():
            raise JobConflictError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"tensor {min(filling.missing)!r} of job {self.name!r} has no initial values; put it before step "
                f"{self._next_step} is committed",
            )

    def _send_incomplete(self, session: StoreSession, call: Call) -> None:
        """Send the packs of which only some tensors were put. Their other tensors keep the last committed values."""
        numels = {fqn: self.tensors[fqn].numel for filling in self._packing.incomplete() for fqn in filling.missing}
        ready: list[tuple[str, torch.Tensor]] = []
        for filling in self._packing.incomplete():
            filling.complete(self._read_committed(session, call, filling), numels)
            ready.append((filling.pack.name, bytes_of(self._packing.take(filling).values)))
        self._send_groups(session, call, ready)

    def _read_committed(self, session: StoreSession, call: Call, filling: Filling) -> torch.Tensor:
        """Return the bytes (uint8) that the newest committed step has for the pack of `filling`."""
        slab = pb.SlabName(group=filling.pack.name, kind=PARAM)
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_READ, as_of_step=self._committed)
        request = LeaseRequest(session, [want], call)
        try:
            (lease,) = request.granted()
            stored = torch.empty(lease.size_bytes, dtype=torch.uint8)
            session.copy_out(call, lease, stored)
        finally:
            request.give_back()
        return stored

    def _send_groups(self, session: StoreSession, call: Call, groups: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Put shard groups into the step under way. Each is given as its name and its bytes (uint8)."""
        limit = max(1, min(_SHARDS_UNDER_WAY, session.arena_bytes // _ARENA_SHARE // self._layout.shard_bytes))
        slabs = (pb.SlabName(group=name, kind=PARAM) for name, _ in groups)
        contents = ([(0, source)] for _, source in groups)
        put_slabs(session, self._next_step, slabs, contents, lambda: call, most=limit, ahead=limit)

    def _check_tensor(self, fqn: str, tensor: torch.Tensor) -> None:
        spec = self._layout.tensors.get(fqn)
        if spec is None:
            raise ConfigError(f"job {self.name!r} was opened without a tensor {fqn!r}")
        check_values(f"tensor {fqn!r}", tensor)
        if TensorSpec.of(tensor) != spec:
            raise ConfigError(
                f"tensor {fqn!r} is of {tensor.dtype}, shape {list(tensor.shape)}; job {self.name!r} was opened with "
                f"{spec.dtype}, shape {list(spec.shape)}"
            )
