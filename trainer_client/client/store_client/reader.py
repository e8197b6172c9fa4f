"""The reader of a committed step of a job: whole tensors or ranges of them, even while a trainer commits more steps.

This module owns the reader in the store and the leases of prefetched parts. The store brings a tensor into the arena
part by part; each part is leased and copied out, through this process's mapping or, on another node, by a stream. After
a restart of the daemon the same step is opened again, if the store still has it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import grpc
import torch

from paramserver.contract import kinds
from paramserver.contract.buffer_names import has_buffers
from paramserver.contract.limits import GATHER_ALIGNMENT_BYTES, READ_BLOCK_BYTES
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.alignment import round_up
from trainer_client.client.store_client.connection import Call, Connection, LeaseRequest, StoreSession, Timeout
from trainer_client.client.store_client.types import (
    Kind,
    StoredTensor,
    bytes_of,
    check_name,
    check_values,
    kind_to_proto,
)
from trainer_client.client.transport.channel import CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS
from trainer_client.errors import ConfigError, StoreError, StoreNotFoundError

# The largest part of a tensor that one lease has. A tensor is read in parts, so that it may be larger than the arena.
# Parts begin at multiples of READ_BLOCK_BYTES.
_MOST_PART_BYTES = 16 << 20
# The number of parts of tensors that one reader has in the arena at once: it copies one part while the store brings the
# next ones. Together the parts take at most 1 / _ARENA_SHARE of the arena.
_PARTS_UNDER_WAY = 4
_ARENA_SHARE = 16
# The number of parts of tensors that `prefetch` may hold in the arena, besides those that are being read.
_PARTS_AHEAD = 16
# The number of tensors that the store returns in one response of ListStoredTensors; a longer list takes several calls.
_PAGE = 1000
# `get_many` reads small tensors together with one lease of at most BATCHED_RANGES ranges. The store requires that each
# range begins at a multiple of GATHER_ALIGNMENT_BYTES in the lease. A tensor is read with leases of its own if it is
# larger than 1 / _BATCHED_SHARE of what one lease of this reader may have.
BATCHED_RANGES = 4096
_BATCHED_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Elements `[offset, offset + numel)` of one kind of a flattened tensor, which the store has in `dtype`."""

    fqn: str
    kind: kinds.Kind
    dtype: torch.dtype
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to_proto(self, reader_id: int) -> pb.TensorRange:
        return pb.TensorRange(fqn=self.fqn, kind=self.kind, offset=self.offset, numel=self.numel, reader_id=reader_id)

    def to_want(self, reader_id: int) -> pb.AcquireLeasesRequest.Want:
        return pb.AcquireLeasesRequest.Want(range=self.to_proto(reader_id), mode=pb.LEASE_MODE_READ)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Parts of tensors that the reader reads with one lease, because a request for each small part would be slow.

    Attributes:
        parts: the parts, at least one.
        places: the first byte of each part in the lease.
    """

    parts: list[TensorPart] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of the lease that all parts of the batch share, in bytes."""
        return self.places[-1] + self.parts[-1].nbytes

    def to_want(self, reader_id: int) -> pb.AcquireLeasesRequest.Want:
        if len(self.parts) == 1:
            return self.parts[0].to_want(reader_id)
        ranges = [part.to_proto(reader_id) for part in self.parts]
        return pb.AcquireLeasesRequest.Want(ranges=ranges, mode=pb.LEASE_MODE_READ)


def batches(parts: Iterable[TensorPart], most_bytes: int, most_parts: int = BATCHED_RANGES) -> Iterator[Batch]:
    """Group parts, in their order, into batches of at most `most_bytes`; a larger part is a batch of its own."""
    batch = Batch()
    for part in parts:
        start = round_up(batch.nbytes, GATHER_ALIGNMENT_BYTES) if batch.parts else 0
        if batch.parts and (start + part.nbytes > most_bytes or len(batch.parts) == most_parts):
            yield batch
            batch, start = Batch(), 0
        batch.parts.append(part)
        batch.places.append(start)
    if batch.parts:
        yield batch


T = TypeVar("T")
WantedT = TypeVar("WantedT", TensorPart, Batch)


class _Held:
    """The reader as one session of the client has it: the store's number of it, and its prefetched leases.

    After a restart of the daemon, the client has another session, and StoreReaderSync makes another object.
    """

    def __init__(self, session: StoreSession, reader_id: int) -> None:
        self.session = session
        self.reader_id = reader_id
        # The lease requests that `prefetch` has made, by what they read. `_lock` guards this dict, because several
        # threads may use the reader.
        self._ahead: dict[TensorPart | Batch, LeaseRequest] = {}
        self._lock = threading.Lock()

    def request(self, wanted: TensorPart | Batch, call: Call) -> LeaseRequest:
        """Return the request that `prefetch` has made for the lease of `wanted`. If there is none, request it now."""
        with self._lock:
            prefetched = self._ahead.pop(wanted, None)
        # If the store has refused the prefetched lease, such as for want of room, a new request may succeed now. So
        # only a prefetched request that has not failed is returned.
        if prefetched is not None and not prefetched.has_failed:
            return prefetched
        return LeaseRequest(self.session, [wanted.to_want(self.reader_id)], call)

    def prefetch(self, part: TensorPart) -> bool:
        """Request the lease of a part, so that the store reads the bytes before `request` needs them.

        Return False, and request nothing, if _PARTS_AHEAD parts are requested already.
        """
        with self._lock:
            if part not in self._ahead:
                if len(self._ahead) >= _PARTS_AHEAD:
                    return False
                call = Call(None, LEASE_DEADLINE_SECONDS)
                self._ahead[part] = LeaseRequest(self.session, [part.to_want(self.reader_id)], call)
            return True

    def release_ahead(self) -> None:
        """Release the leases that `prefetch` has requested and `request` has not returned."""
        with self._lock:
            unused, self._ahead = self._ahead, {}
        for request in unused.values():
            request.give_back()


class StoreReaderSync:
    """A reader of one committed step; StoreClientSync.read opens it. Several threads may use it."""

    def __init__(
        self,
        connection: Connection,
        job: str,
        step: int | None,
        call: Call,
        layout: str | None = None,
        kept: str | None = None,
        *,
        settled: bool = True,
    ) -> None:
        """Open the reader, with which the store keeps the step until `close`.

        Args:
            step: the step; None: the newest settled one.
            layout: the name of the layout of the step; None: the job's newest layout that has such a step.
            kept: the name of a kept step, instead of `step` and `layout`.
            settled: without `step`, False: the newest step of this store, although other nodes of the job may lack it.
        """
        check_name("job", job)
        check_name("layout", layout or "")
        check_name("kept step", kept or "")
        self._connection = connection
        self._settled = settled
        self._layout = layout
        self._kept = kept
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._tensors: dict[str, StoredTensor] = {}
        self._closed = False
        self._part_bytes = 0
        self._step = step
        self._ranks: tuple[int, ...] = ()
        self.job = job
        self._connection.resume(call, lambda session: self._attach(session, call))

    @property
    def step(self) -> int:
        """The number of the step that this reader reads."""
        assert self._step is not None
        return self._step

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that stored a client state in this store with the commit of the step, in ascending order."""
        return self._ranks

    def __enter__(self) -> StoreReaderSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the reader, after which the store may delete the step. A repeated call has no effect."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, None
        if held is None:
            return
        held.release_ahead()
        request = pb.CloseReaderRequest(reader_id=held.reader_id)
        # The call CloseReader fails if the session has ended. The error is ignored, because the store's reader has
        # ended with the session.
        with contextlib.suppress(StoreError):
            held.session.call("CloseReader", request, Call(None, CONTROL_DEADLINE_SECONDS))

    def tensors(self, prefix: str = "", *, timeout: Timeout | Call = None) -> list[StoredTensor]:
        """Return the tensors whose names begin with `prefix`, sorted by name.

        The entries with large buffers of ranks, which are no tensors of the model, are left out.

        Raises:
            StoreError: the daemon cannot be reached.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        found = self._connection.resume(
            call, lambda session: list_tensors(session, self.job, prefix, call, self._layout, self._kept)
        )
        # The descriptions of the found tensors (shape, dtype and so on) are kept, so that `get` does not have to ask
        # the store for them.
        self._tensors |= {tensor.fqn: tensor for tensor in found}
        return [tensor for tensor in found if not has_buffers(tensor.fqn)]

    def client_state(self, rank: int, *, timeout: Timeout | Call = None) -> bytes:
        """Return the client state of a rank: the bytes that its trainer stored with the commit of the step.

        Raises:
            StoreNotFoundError: the rank was not attached to this store when the step was committed.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)

        def attempt(session: StoreSession) -> bytes:
            request = pb.ReadClientStateRequest(reader_id=self._attach(session, call).reader_id, rank=rank)
            return bytes(session.call("ReadClientState", request, call).client_state)

        return self._connection.resume(call, attempt)

    def get(
        self,
        fqn: str,
        *,
        kind: Kind = "param",
        offset: int | None = None,
        numel: int | None = None,
        out: torch.Tensor | None = None,
        timeout: Timeout | Call = None,
    ) -> torch.Tensor:
        """Return a tensor, or a range of it, as it was at the step.

        Args:
            fqn: the tensor's name.
            kind: "param", or for a trained tensor "master" or an optimizer state.
            offset: first element of a range of the flattened tensor; None: 0.
            numel: number of elements of the range; None: up to the tensor's end. If `offset` or `numel` is given, the
                result is 1-D, otherwise it has the tensor's shape.
            out: a contiguous CPU tensor with the same dtype and number of elements, which is filled and returned.
            timeout: deadline of the call in seconds, or as a timedelta.

        Raises:
            ConfigError: the range exceeds the tensor, or `out` does not fit.
            StoreNotFoundError: the job has no such tensor, this store does not have all of it, or the step is gone
                after a restart of the daemon.
            StoreBudgetError: the store's host memory had no room for the bytes for too long.
            DataLossError: the stored bytes are damaged.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call.of(timeout, LEASE_DEADLINE_SECONDS)
        whole, target = self._describe(call, fqn, kind, offset, numel)
        shape = whole if offset is None and numel is None else (target.numel,)
        result = torch.empty(shape, dtype=target.dtype) if out is None else _check_out(out, target)
        filled = bytes_of(result)

        def copy(session: StoreSession, call: Call, part: TensorPart, lease: pb.Lease) -> None:
            start = (part.offset - target.offset) * part.dtype.itemsize
            session.copy_out(call, lease, filled[start : start + lease.size_bytes])

        for _ in self.leased(_cut(target, self._part_bytes), copy, lambda: call):
            pass
        return result

    def get_many(
        self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout | Call = None
    ) -> dict[str, torch.Tensor]:
        """Return tensors as they were at the step, by name. One request to the store reads thousands of small ones.

        Raises:
            StoreNotFoundError, StoreBudgetError, DataLossError, StoreTimeoutError, StoreUnavailableError: see `get`.
        """
        call = Call.of(timeout, LEASE_DEADLINE_SECONDS)
        names = list(dict.fromkeys(fqns))
        self._look_up(call, names)
        described = {fqn: self._describe(call, fqn, kind, None, None) for fqn in names}
        most_bytes = self._part_bytes // _BATCHED_SHARE
        small = (part for _, part in described.values() if part.nbytes <= most_bytes)
        found: dict[str, torch.Tensor] = {}

        def copy(session: StoreSession, call: Call, batch: Batch, lease: pb.Lease) -> None:
            data = torch.empty(lease.size_bytes, dtype=torch.uint8)
            session.copy_out(call, lease, data)
            for part, start in zip(batch.parts, batch.places, strict=True):
                # Each tensor is cloned, because a view would keep the memory of all tensors that were read with the
                # same lease alive.
                values = data[start : start + part.nbytes].clone().view(part.dtype)
                found[part.fqn] = values.view(described[part.fqn][0])

        for _ in self.leased(batches(small, self._part_bytes), copy, lambda: call):
            pass
        for fqn in names:
            if fqn not in found:
                found[fqn] = self.get(fqn, kind=kind, timeout=call)
        return {fqn: found[fqn] for fqn in names}

    def prefetch(self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout | Call = None) -> None:
        """Let the store bring tensors into its host memory, for the next `get` of each. It does not wait.

        At most _PARTS_AHEAD parts are prefetched; `get` reads the others when it is called.

        Raises:
            StoreNotFoundError: the job has no such tensor.
            StoreUnavailableError: the daemon cannot be reached.
        """
        call = Call.of(timeout, CONTROL_DEADLINE_SECONDS)
        targets = [self._describe(call, fqn, kind, None, None) for fqn in fqns]

        def attempt(session: StoreSession) -> None:
            held = self._attach(session, call)
            for _, target in targets:
                for part in _cut(target, self._part_bytes):
                    if not held.prefetch(part):
                        return

        self._connection.resume(call, attempt)

    def leased(
        self,
        wanted: Iterable[WantedT],
        use: Callable[[StoreSession, Call, WantedT, pb.Lease], T],
        new_call: Callable[[], Call],
        most: int = _PARTS_UNDER_WAY,
    ) -> Generator[T, None, None]:
        """Lease parts of the step one after the other, and yield for each what `use` returns.

        While `use` or the caller of this iterator works on a part, the store brings the next parts. After a break of
        the connection, the parts that were not used yet are leased again. However the iterator ends, it leaves no lease
        behind.

        Args:
            wanted: the parts.
            use: copies the bytes of a part's lease, which is released when `use` returns. If the connection breaks,
                `use` is called again for the same part.
            new_call: returns the call whose deadline limits the wait for the next part.
            most: the most parts that are leased at once.

        Raises:
            StoreError: the store failed or refused, or a deadline has passed.
        """
        waiting = iter(wanted)
        parts: deque[WantedT] = deque()
        # The lease requests for the first parts in `parts`: lease request number i is for part number i.
        requests: deque[LeaseRequest] = deque()

        def give_back() -> None:
            while requests:
                requests.popleft().give_back()

        def attempt(call: Call, session: StoreSession) -> T:
            held = self._attach(session, call)
            if requests and requests[0].session is not session:
                give_back()
            if requests and requests[0].has_failed:
                # The store may have refused the lease request for the next part long ago for want of room, and may have
                # the room now. So the request is made again.
                requests[0] = held.request(parts[0], call)
            for part in itertools.islice(parts, len(requests), None):
                requests.append(held.request(part, call))
            try:
                (lease,) = requests[0].granted()
                result = use(session, call, parts[0], lease)
            except StoreError:
                # A failed lease request cannot be waited for again, so all requests are given back, and the next
                # attempt makes new ones.
                give_back()
                raise
            parts.popleft()
            requests.popleft().give_back()
            return result

        try:
            while True:
                parts.extend(itertools.islice(waiting, most - len(parts)))
                if not parts:
                    return
                call = new_call()
                yield self._connection.resume(call, partial(attempt, call))
        finally:
            give_back()

    def on_session(self, call: Call, attempt: Callable[[StoreSession, int], T]) -> T:
        """Call `attempt` with the session and the reader's number in it, and return its result.

        `attempt` is called again after each break of the connection, so it must be idempotent.

        Raises:
            StoreError: the store refuses, or the deadline has passed.
        """
        return self._connection.resume(call, lambda session: attempt(session, self._attach(session, call).reader_id))

    def _attach(self, session: StoreSession, call: Call) -> _Held:
        """Return this reader as `session` has it. If the session does not have it yet, open the step there first.

        It can raise StoreError.
        """
        with self._lock:
            if self._closed:
                raise ConfigError(f"the reader of step {self._step} of job {self.job!r} was closed; open another")
            if self._held is not None and self._held.session is session:
                return self._held
            again = self._held is not None
            try:
                step = self._step if self._kept is None else None
                request = pb.OpenReaderRequest(
                    job=self.job,
                    step=step,
                    layout=self._layout,
                    kept=self._kept,
                    unsettled=not self._settled and step is None,
                )
                opened = session.call("OpenReader", request, call)
            except StoreNotFoundError as error:
                if not again:
                    raise
                raise StoreNotFoundError(
                    error.code,
                    f"the store daemon was restarted, and step {self._step} of job {self.job!r} is gone "
                    f"({error.message}); open another reader",
                ) from None
            self._step = opened.step
            self._ranks = tuple(opened.ranks)
            self._part_bytes = self._part_bytes or _part_bytes(session)
            self._held = _Held(session, opened.reader_id)
            return self._held

    def _look_up(self, call: Call, fqns: Iterable[str]) -> None:
        """Request the shapes and kinds of tensors from the store, and keep them for `_describe`.

        A name that the job does not have is ignored here; `_describe` reports it.
        """
        names = list(fqns)
        for fqn in names:
            check_name("tensor", fqn)
        unknown = [fqn for fqn in names if fqn not in self._tensors]
        if not unknown:
            return
        # If only one tensor is unknown, the list from the store needs one entry only: the store sorts by name, so the
        # tensor comes before all others whose names begin with its name.
        limit = 1 if len(unknown) == 1 else None
        first, last = min(unknown), max(unknown)
        prefix = first[: next((i for i, c in enumerate(first) if last[i : i + 1] != c), len(first))]
        found = self._connection.resume(
            call, lambda session: list_tensors(session, self.job, prefix, call, self._layout, self._kept, limit)
        )
        self._tensors |= {tensor.fqn: tensor for tensor in found}

    def _describe(
        self, call: Call, fqn: str, kind: Kind, offset: int | None, numel: int | None
    ) -> tuple[tuple[int, ...], TensorPart]:
        """Return a tensor's shape, and the range of its `kind` that `offset` and `numel` select."""
        wire_kind = kind_to_proto(kind)
        self._look_up(call, [fqn])
        tensor = self._tensors.get(fqn)
        if tensor is None or kind not in tensor.kinds:
            what = f"tensor {fqn!r}" if tensor is None else f"kind {kind!r} of tensor {fqn!r}"
            raise StoreNotFoundError(grpc.StatusCode.NOT_FOUND, f"job {self.job!r} has no {what} on this store")
        first = offset or 0
        count = tensor.numel - first if numel is None else numel
        if first < 0 or count <= 0 or first + count > tensor.numel:
            raise ConfigError(
                f"elements [{first}, {first + count}) are no range of tensor {fqn!r} of {tensor.numel} elements"
            )
        part = TensorPart(fqn=fqn, kind=wire_kind, dtype=tensor.kinds[kind], offset=first, numel=count)
        return tensor.shape, part


def list_tensors(
    session: StoreSession,
    job: str,
    prefix: str,
    call: Call,
    layout: str | None = None,
    kept: str | None = None,
    limit: int | None = None,
) -> list[StoredTensor]:
    """Return the tensors of a job whose names begin with `prefix`, sorted by name: all, or the first `limit`.

    `kept` names a kept step, `layout` a layout, whose tensors are returned. Without both, the job's newest layout is
    used. It can raise StoreError.
    """
    tensors: list[StoredTensor] = []
    token = ""
    while True:
        request = pb.ListStoredTensorsRequest(
            job=job, fqn_prefix=prefix, page_size=limit or _PAGE, page_token=token, layout=layout, kept=kept
        )
        response = session.call("ListStoredTensors", request, call)
        tensors += [StoredTensor.from_proto(tensor) for tensor in response.tensors]
        token = response.next_page_token
        if not token or limit is not None:
            return tensors


def _part_bytes(session: StoreSession) -> int:
    share = session.arena_bytes // _ARENA_SHARE // _PARTS_UNDER_WAY
    return max(READ_BLOCK_BYTES, min(_MOST_PART_BYTES, share // READ_BLOCK_BYTES * READ_BLOCK_BYTES))


def _cut(whole: TensorPart, part_bytes: int) -> list[TensorPart]:
    """Cut a range into parts. Each but the first begins at a multiple of `part_bytes` bytes of the tensor."""
    end, part_numel = whole.offset + whole.numel, part_bytes // whole.dtype.itemsize
    cuts = [whole.offset, *range((whole.offset // part_numel + 1) * part_numel, end, part_numel), end]
    return [replace(whole, offset=first, numel=last - first) for first, last in itertools.pairwise(cuts)]


def _check_out(out: torch.Tensor, target: TensorPart) -> torch.Tensor:
    check_values("out", out)
    if out.dtype != target.dtype or out.numel() != target.numel or not out.is_contiguous() or out.device.type != "cpu":
        raise ConfigError(
            f"out is of {out.dtype}, {out.numel()} elements on {out.device}, contiguous: {out.is_contiguous()}; "
            f"{target.fqn!r} needs {target.numel} contiguous elements of {target.dtype} on the CPU"
        )
    return out
