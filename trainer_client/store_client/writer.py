"""A job that one process writes: tensors are put, and committed together as the next step.

Owns a session of its own, for the store takes one job for each, and the puts of the step under way. What cannot be
known to be whole is never committed: after a failed put the step is given up, and the caller is told to put it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import grpc
import torch

from paramserver.contract.kinds import PARAM
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import (
    ConfigError,
    JobConflictError,
    StepAbortedError,
    StoreError,
    StoreUnavailableError,
)
from trainer_client.store_client.connection import Call, Connection, Link, Timeout, release, result_of, resume
from trainer_client.store_client.job_layout import PACKED, JobLayout
from trainer_client.store_client.packing import Filling, Packing
from trainer_client.store_client.types import TensorSpec, bytes_of
from trainer_client.transport.channel import COMMIT_DEADLINE_SECONDS, CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS

# Elements that are stored and leased together: enough to keep a device busy, little enough for a small host budget.
DEFAULT_SHARD_BYTES = 16 << 20
# Shards that are filled, or on their way to the devices, at once.
_SHARDS_UNDER_WAY = 4
_ARENA_SHARE = 4
# How long another session may seem to hold the job: the store notices the end of a broken one within that time.
_HAND_OVER_SLACK_SECONDS = 5.0
_HAND_OVER_LOOK_SECONDS = 0.1


class StoreWriterSync:
    """An opened job. Made by StoreClientSync.open; its calls wait for each other."""

    def __init__(self, connection: Connection, layout: JobLayout, call: Call) -> None:
        self._connection = connection
        self._layout = layout
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._committed: int | None = None
        self._put: set[str] = set()
        self._packing = Packing()
        # Whether small tensors share groups: in jobs of earlier versions they do not.
        self._packed = True
        # Why the step under way cannot be committed.
        self._failure: StoreError | None = None
        self._closed = False
        self._attach(call)

    @property
    def name(self) -> str:
        """Of the job."""
        return self._layout.name

    @property
    def step(self) -> int | None:
        """The newest committed step; None: none yet."""
        return self._committed

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What the job was opened with."""
        return self._layout.tensors

    def __enter__(self) -> StoreWriterSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session; what was put and not committed is discarded. Idempotent."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.close()

    def put(self, tensors: Mapping[str, torch.Tensor], *, timeout: Timeout = None) -> None:
        """Gives tensors their values of the next step, which `commit` makes the newest one.

        Each tensor is put whole, once in a step; one that is not put keeps its value. The first step needs all of them.
        Many tensors in one call are faster than one call for each. A small tensor is copied, and may stay in this
        process until `commit`: the store keeps many of them as one group, which is handed over when it is whole.

        Args:
            tensors: of the shapes and types that the job was opened with, on any device.

        Raises:
            ConfigError: a tensor is not the job's, or was put in this step already.
            StepAbortedError: puts of this step were lost, with the daemon or by a failure: put them all again, after
                `roll_back` where the message says so.
            StoreBudgetError: the store's memory or disk had no room; the step is given up.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time; the step is given up.
        """
        self.put_within(Call(timeout, LEASE_DEADLINE_SECONDS), tensors)

    def commit(self, *, timeout: Timeout = None) -> int:
        """Makes what was put the job's newest step, all of it or nothing; the step.

        If the daemon dies meanwhile, this waits for its restart and finds out whether the step is there.

        Raises:
            StepAbortedError: it is not: put again.
            StoreTimeoutError, StoreUnavailableError: it could not be found out in time: `step` tells, once the store
                answers `roll_back`.
            StoreError: the store refuses; the step is given up.
        """
        return self.commit_within(Call(timeout, COMMIT_DEADLINE_SECONDS))

    def roll_back(self, *, timeout: Timeout = None) -> int | None:
        """Discards what was put since the last commit; the newest committed step.

        Raises:
            StoreError: the daemon cannot be reached, or refuses.
        """
        return self.roll_back_within(Call(timeout, CONTROL_DEADLINE_SECONDS))

    def put_within(self, call: Call, tensors: Mapping[str, torch.Tensor]) -> None:
        """`put`, as a part of a call."""
        for fqn, tensor in tensors.items():
            self._check_tensor(fqn, tensor)
        with self._lock:
            call.check()
            if twice := self._put & tensors.keys():
                raise ConfigError(f"tensor {min(twice)!r} was put since the last commit; commit before it is put again")
            link = self._usable_link(call)
            try:
                self._put |= tensors.keys()
                self._send(link, call, tensors)
            except StoreError as error:
                self._failure = error
                raise
            except BaseException:
                self._failure = StoreUnavailableError(grpc.StatusCode.CANCELLED, "a put was cancelled")
                raise

    def commit_within(self, call: Call) -> int:
        """`commit`, as a part of a call."""
        with self._lock:
            call.check()
            link = self._usable_link(call)
            step = self._next_step
            self._check_initial_values()
            try:
                self._send_incomplete(link, call)
                link.call("CommitStep", pb.CommitStepRequest(step=step, settled_step=step), call)
            except StoreUnavailableError as error:
                # Whether it was committed is known when the job is open again.
                self._failure = error
                self._reopen(call)
                if self._committed != step:
                    raise StepAbortedError(
                        grpc.StatusCode.ABORTED,
                        f"the connection to the store was lost while step {step} of job {self.name!r} was committed, "
                        "and it is not there: put its tensors again",
                    ) from error
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

    def roll_back_within(self, call: Call) -> int | None:
        """`roll_back`, as a part of a call."""
        with self._lock:
            self._reopen(call)
            return self._committed

    @property
    def _next_step(self) -> int:
        return 0 if self._committed is None else self._committed + 1

    def _usable_link(self, call: Call) -> Link:
        """The session. Raises StepAbortedError where the step under way has lost something."""
        if self._closed:
            raise ConfigError(f"job {self.name!r} was closed; open it again")
        if self._failure is not None:
            raise StepAbortedError(
                grpc.StatusCode.ABORTED,
                f"step {self._next_step} of job {self.name!r} cannot be committed, because a put or the commit failed "
                f"({self._failure.message}): call roll_back, then put its tensors again",
            ) from self._failure
        if self._link is not None and self._link.goes_on(call):
            return self._link
        lost = sorted(self._put)
        self._reopen(call)
        if lost:
            raise StepAbortedError(
                grpc.StatusCode.ABORTED,
                f"the session with the store has ended, and what was put for step {self._next_step} of job "
                f"{self.name!r} is gone ({', '.join(lost[:5])}{', ...' if lost[5:] else ''}): put it again",
            )
        assert self._link is not None
        return self._link

    def _reopen(self, call: Call) -> None:
        """Begins the next step anew, on a new session: the store discards what the last one has left behind."""
        if self._link is not None:
            self._link.close()
        self._attach(call)

    def _attach(self, call: Call) -> None:
        """Opens the job on a session of its own."""
        request = self._layout.open_request()

        def attempt(link: Link) -> None:
            response = self._open_once_free(link, request, call)
            packed = all(layout.layout == PACKED for layout in response.layouts[-1:])
            for registration in self._layout.register_requests(packed=packed):
                link.call("RegisterShards", registration, call)
            self._packed = packed
            self._committed = max((commit.step for commit in response.committed), default=None)
            self._link = link
            self._put.clear()
            self._packing.clear()
            self._failure = None

        def with_link(link: Link) -> None:
            try:
                attempt(link)
            except BaseException:
                link.close()
                raise

        resume(call, self._connection.new_link, with_link)

    def _open_once_free(self, link: Link, request: pb.OpenJobRequest, call: Call) -> Any:
        """Opens the job; waits a little where a session that has just broken seems to hold it still."""
        # The daemon ends a session whose client is silent, or whose stream broke, within this time.
        give_up_at = time.monotonic() + link.heartbeat_timeout_seconds + _HAND_OVER_SLACK_SECONDS
        while True:
            try:
                return link.call("OpenJob", request, call)
            except JobConflictError:
                # Only where this writer had it: another one's conflict does not pass by itself.
                if self._link is None or time.monotonic() > give_up_at:
                    raise
            call.pause(_HAND_OVER_LOOK_SECONDS)

    def _send(self, link: Link, call: Call, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hands tensors over to the store, but for packs of which a part was not put yet."""
        packs = self._layout.packs if self._packed else {}
        small = ((packs[fqn], fqn, tensor) for fqn, tensor in tensors.items() if fqn in packs)
        whole = [(filling.pack.name, bytes_of(filling.values)) for filling in self._packing.put(call, small)]
        large = (
            (group, bytes_of(flat[start:end]))
            for fqn, tensor in tensors.items()
            if fqn not in packs
            for flat in (tensor.detach().reshape(-1),)
            for group, start, end in self._layout.shards(fqn)
        )
        self._send_groups(link, call, deque([*whole, *large]))

    def _check_initial_values(self) -> None:
        """Raises JobConflictError, naming a tensor, where a part of a pack is not put before the first commit."""
        for filling in self._packing.incomplete() if self._committed is None else ():
            raise JobConflictError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"tensor {min(filling.missing)!r} of job {self.name!r} has no initial values; put it before step "
                f"{self._next_step} is committed",
            )

    def _send_incomplete(self, link: Link, call: Call) -> None:
        """Hands over the packs of which only a part was put: the rest stays as it was committed last."""
        numels = {fqn: self.tensors[fqn].numel for filling in self._packing.incomplete() for fqn in filling.missing}
        ready: deque[tuple[str, torch.Tensor]] = deque()
        for filling in self._packing.incomplete():
            filling.complete(self._read_committed(link, call, filling), numels)
            ready.append((filling.pack.name, bytes_of(self._packing.take(filling).values)))
        self._send_groups(link, call, ready)

    def _read_committed(self, link: Link, call: Call, filling: Filling) -> torch.Tensor:
        """The bytes of a pack as they were committed last, uint8."""
        slab = pb.SlabName(group=filling.pack.name, kind=PARAM)
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_READ, as_of_step=self._committed)
        (lease,) = link.call("AcquireLeases", pb.AcquireLeasesRequest(wants=[want]), call).leases
        try:
            stored = torch.empty(lease.size_bytes, dtype=torch.uint8)
            link.copy_out(call, lease, stored)
        finally:
            release(link, [lease.lease_id])
        return stored

    def _send_groups(self, link: Link, call: Call, wanted: deque[tuple[str, torch.Tensor]]) -> None:
        """Fills leases one after the other; the next ones, and the publications of the last ones, are under way."""
        limit = max(1, min(_SHARDS_UNDER_WAY, link.arena_bytes // _ARENA_SHARE // self._layout.shard_bytes))
        leasing: deque[tuple[torch.Tensor, Any]] = deque()
        publishing: deque[Any] = deque()
        try:
            while wanted or leasing:
                while wanted and len(leasing) + len(publishing) < limit:
                    group, source = wanted.popleft()
                    leasing.append((source, self._lease(link, group, call)))
                if not leasing:
                    result_of(publishing.popleft())
                    continue
                source, leased = leasing[0]
                (lease,) = result_of(leased).leases
                leasing.popleft()
                publishing.append(self._fill(link, call, lease, source))
            for published in publishing:
                result_of(published)
        finally:
            for _, leased in leasing:
                leased.add_done_callback(lambda done: _give_back(link, done))

    def _lease(self, link: Link, group: str, call: Call) -> Any:
        slab = pb.SlabName(group=group, kind=PARAM)
        want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE, step=self._next_step)
        return link.begin("AcquireLeases", pb.AcquireLeasesRequest(wants=[want]), call.left_seconds)

    def _fill(self, link: Link, call: Call, lease: pb.Lease, source: torch.Tensor) -> Any:
        """Puts bytes into a write lease, and begins its publication."""
        releases = [pb.ReleaseLeasesRequest.Release(lease_id=lease.lease_id, publish=True)]
        try:
            link.copy_in(call, lease, source)
            return link.begin("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases), call.left_seconds)
        except BaseException:
            release(link, [lease.lease_id])
            raise

    def _check_tensor(self, fqn: str, tensor: torch.Tensor) -> None:
        spec = self._layout.tensors.get(fqn)
        if spec is None:
            raise ConfigError(f"job {self.name!r} was opened without a tensor {fqn!r}")
        if TensorSpec.of(tensor) != spec:
            raise ConfigError(
                f"tensor {fqn!r} is of {tensor.dtype}, shape {list(tensor.shape)}; job {self.name!r} was opened with "
                f"{spec.dtype}, shape {list(spec.shape)}"
            )


def _give_back(link: Link, leased: Any) -> None:
    """Returns a lease that came when nobody wanted it any more."""
    if not leased.cancelled() and leased.exception() is None:
        release(link, [leased.result().leases[0].lease_id])
