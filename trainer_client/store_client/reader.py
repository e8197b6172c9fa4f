"""A committed step of a job, held for reading: whole tensors or ranges of them, whatever is trained meanwhile.

Owns the reader in the store and the leases of what was prefetched. A tensor is brought into the arena part by part,
leased, and copied out of it: from this process's mapping, or on another node as a stream. After a restart of the daemon
the same step is held again, if it is still there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import torch

from paramserver.contract import kinds
from paramserver.contract.limits import GATHER_ALIGNMENT_BYTES
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import ConfigError, StoreError, StoreNotFoundError
from trainer_client.model.layout import round_up
from trainer_client.store_client.connection import Call, Connection, Link, Timeout, release, result_of
from trainer_client.store_client.types import Kind, StoredTensor, bytes_of, kind_to_proto
from trainer_client.transport.channel import CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS

# A part is brought into the arena at once, so that a tensor may be larger than the arena. They begin at multiples of
# this, as the store's blocks do.
_PART_UNIT_BYTES = 64 << 10
_MOST_PART_BYTES = 16 << 20
# What one reader has in the arena at most, as a share of it: one part is copied while others come.
_PARTS_UNDER_WAY = 4
_ARENA_SHARE = 16
# Parts that `prefetch` may hold besides.
_PARTS_AHEAD = 16
_PAGE = 1000
# What `get_many` reads together: ranges in one lease, each from a multiple of some bytes on (the store's rule), and how
# large a tensor may be beside others, as a share of a part.
_BATCHED_RANGES = 4096
_BATCHED_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements `[offset, offset + numel)` of a tensor."""

    fqn: str
    kind: kinds.Kind
    offset: int
    numel: int

    def to_proto(self, reader_id: int) -> pb.TensorRange:
        return pb.TensorRange(fqn=self.fqn, kind=self.kind, offset=self.offset, numel=self.numel, reader_id=reader_id)

    def to_want(self, reader_id: int) -> pb.AcquireLeasesRequest.Want:
        return pb.AcquireLeasesRequest.Want(range=self.to_proto(reader_id), mode=pb.LEASE_MODE_READ)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Whole tensors that are read with one lease. `places`: of each, the byte in the lease where it begins."""

    parts: list[Part] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def to_want(self, reader_id: int) -> pb.AcquireLeasesRequest.Want:
        ranges = [part.to_proto(reader_id) for part in self.parts]
        return pb.AcquireLeasesRequest.Want(ranges=ranges, mode=pb.LEASE_MODE_READ)


WantedT = TypeVar("WantedT", Part, Batch)


class _Held:
    """The reader as one session has it, and the parts that were asked for ahead, by futures of their leases."""

    def __init__(self, link: Link, reader_id: int) -> None:
        self.link = link
        self.reader_id = reader_id
        self.ahead: dict[Part, Any] = {}

    def lease(self, wanted: Part | Batch, timeout_seconds: float) -> Any:
        """A future of a lease on the part or the batch; a part is taken from those asked for ahead if it is there."""
        if isinstance(wanted, Part) and wanted in self.ahead:
            return self.ahead.pop(wanted)
        request = pb.AcquireLeasesRequest(wants=[wanted.to_want(self.reader_id)])
        return self.link.begin("AcquireLeases", request, timeout_seconds)

    def give_back(self, leased: Any) -> None:
        """Returns the lease of a future, when it is granted."""

        def on_done(future: Any) -> None:
            with contextlib.suppress(StoreError):
                release(self.link, [result_of(future).leases[0].lease_id])

        leased.add_done_callback(on_done)


class StoreReaderSync:
    """A held step. Made by StoreClientSync.read; may be used from several threads."""

    def __init__(
        self, connection: Connection, job: str, step: int | None, call: Call, layout: str | None = None
    ) -> None:
        """`layout`: the partition to read the step from, where it is not the job's newest."""
        self._connection = connection
        self._layout = layout
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._tensors: dict[str, StoredTensor] = {}
        self._closed = False
        self._part_bytes = 0
        self._step = step
        self.job = job
        self._connection.resume(call, lambda link: self._attach(link, call))

    @property
    def step(self) -> int:
        """The step that it holds."""
        assert self._step is not None
        return self._step

    def __enter__(self) -> StoreReaderSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the step; idempotent."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, None
        if held is None:
            return
        for leased in held.ahead.values():
            held.give_back(leased)
        request = pb.CloseReaderRequest(reader_id=held.reader_id)
        with contextlib.suppress(StoreError):  # gone with its session
            held.link.call("CloseReader", request, Call(None, CONTROL_DEADLINE_SECONDS))

    def tensors(self, prefix: str = "", *, timeout: Timeout = None) -> list[StoredTensor]:
        """The tensors whose names begin with `prefix`, by name.

        Raises:
            StoreError: the daemon cannot be reached.
        """
        return self.tensors_within(Call(timeout, CONTROL_DEADLINE_SECONDS), prefix)

    def tensors_within(self, call: Call, prefix: str) -> list[StoredTensor]:
        """`tensors`, as a part of a call."""
        return self._connection.resume(call, lambda link: list_tensors(link, self.job, prefix, call, self._layout))

    def client_state(self, rank: int, *, timeout: Timeout = None) -> bytes:
        """What a rank of the job gave to the commit of the step, which is its trainer's business.

        Raises:
            StoreNotFoundError: this store had no such rank.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        call = Call(timeout, CONTROL_DEADLINE_SECONDS)

        def attempt(link: Link) -> bytes:
            request = pb.ReadClientStateRequest(reader_id=self._attach(link, call).reader_id, rank=rank)
            return bytes(link.call("ReadClientState", request, call).client_state)

        return self._connection.resume(call, attempt)

    def get(
        self,
        fqn: str,
        *,
        kind: Kind = "param",
        offset: int | None = None,
        numel: int | None = None,
        out: torch.Tensor | None = None,
        timeout: Timeout = None,
    ) -> torch.Tensor:
        """A tensor as it was at the step.

        Args:
            offset, numel: in elements of the flattened tensor; the result is 1-D then. By default all, in its shape.
            out: where to put it: contiguous, on the CPU, of the same type and as many elements.
            timeout: seconds, or a timedelta.

        Raises:
            ConfigError: the range leaves the tensor, or `out` does not fit.
            StoreNotFoundError: the job has no such tensor, this store not all of it, or after a restart of the daemon
                the step is gone.
            StoreBudgetError: the store's host memory had no room for it for too long.
            DataLossError: it is damaged.
            StoreTimeoutError, StoreUnavailableError: the store did not answer in time.
        """
        return self.get_within(
            Call(timeout, LEASE_DEADLINE_SECONDS), fqn, kind=kind, offset=offset, numel=numel, out=out
        )

    def get_within(
        self, call: Call, fqn: str, *, kind: Kind, offset: int | None, numel: int | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """`get`, as a part of a call."""
        whole, dtype, target = self._describe(call, fqn, kind, offset, numel)
        shape = whole if offset is None and numel is None else (target.numel,)
        result = torch.empty(shape, dtype=dtype) if out is None else _check_out(out, dtype, target)
        remaining = deque(_cut(target, self._part_bytes // dtype.itemsize))
        filled = bytes_of(result)

        def attempt(link: Link) -> None:
            # What was copied before a break of the connection is not copied again.
            start = target.numel - sum(part.numel for part in remaining)
            _copy_out(self._attach(link, call), call, remaining, filled[start * dtype.itemsize :])

        self._connection.resume(call, attempt)
        return result

    def get_many(
        self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout = None
    ) -> dict[str, torch.Tensor]:
        """Tensors as they were at the step, by name. Thousands of small ones come with one call of the store.

        Raises:
            StoreNotFoundError, StoreBudgetError, DataLossError, StoreTimeoutError, StoreUnavailableError: as `get`.
        """
        return self.get_many_within(Call(timeout, LEASE_DEADLINE_SECONDS), fqns, kind)

    def get_many_within(self, call: Call, fqns: Iterable[str], kind: Kind) -> dict[str, torch.Tensor]:
        """`get_many`, as a part of a call."""
        names = list(dict.fromkeys(fqns))
        self._look_up(call, names)
        described = {fqn: self._describe(call, fqn, kind, None, None) for fqn in names}
        small = {
            fqn: target
            for fqn, (_, dtype, target) in described.items()
            if target.numel * dtype.itemsize <= self._part_bytes // _BATCHED_SHARE
        }
        found: dict[str, torch.Tensor] = {}
        remaining = deque(
            _batches(small.values(), {fqn: d.itemsize for fqn, (_, d, _) in described.items()}, self._part_bytes)
        )

        def take(held: _Held, batch: Batch, lease: pb.Lease) -> None:
            data = torch.empty(lease.size_bytes, dtype=torch.uint8)
            held.link.copy_out(call, lease, data)
            for part, start in zip(batch.parts, batch.places, strict=True):
                shape, dtype, _ = described[part.fqn]
                # A copy: one tensor that is kept is not to keep all others of its batch.
                found[part.fqn] = data[start : start + part.numel * dtype.itemsize].clone().view(dtype).view(shape)

        self._connection.resume(call, lambda link: _take_each(self._attach(link, call), call, remaining, take))
        for fqn in names:
            if fqn not in found:
                found[fqn] = self.get_within(call, fqn, kind=kind, offset=None, numel=None, out=None)
        return {fqn: found[fqn] for fqn in names}

    def prefetch(self, fqns: Iterable[str], *, kind: Kind = "param", timeout: Timeout = None) -> None:
        """Has the store bring tensors into its host memory, for the next `get` of each.

        Does not wait for them. What is more than a part of that memory is left for `get` itself.

        Raises:
            StoreNotFoundError: the job has no such tensor.
            StoreUnavailableError: the daemon cannot be reached.
        """
        self.prefetch_within(Call(timeout, CONTROL_DEADLINE_SECONDS), fqns, kind)

    def prefetch_within(self, call: Call, fqns: Iterable[str], kind: Kind) -> None:
        """`prefetch`, as a part of a call."""
        targets = [self._describe(call, fqn, kind, None, None) for fqn in fqns]

        def attempt(link: Link) -> None:
            held = self._attach(link, call)
            for _, dtype, target in targets:
                for part in _cut(target, self._part_bytes // dtype.itemsize):
                    if len(held.ahead) >= _PARTS_AHEAD:
                        return
                    if part not in held.ahead:
                        held.ahead[part] = held.lease(part, LEASE_DEADLINE_SECONDS)

        self._connection.resume(call, attempt)

    def _attach(self, link: Link, call: Call) -> _Held:
        """The reader in this session, opened again if the last session has ended."""
        with self._lock:
            if self._closed:
                raise ConfigError(f"the reader of step {self._step} of job {self.job!r} was closed; open another")
            if self._held is not None and self._held.link is link:
                return self._held
            again = self._held is not None
            try:
                request = pb.OpenReaderRequest(job=self.job, step=self._step, layout=self._layout)
                opened = link.call("OpenReader", request, call)
            except StoreNotFoundError as error:
                if not again:
                    raise
                raise StoreNotFoundError(
                    error.code,
                    f"the store daemon was restarted, and step {self._step} of job {self.job!r} is gone "
                    f"({error.message}); open another reader",
                ) from error
            self._step = opened.step
            self._part_bytes = self._part_bytes or _part_bytes(link)
            self._held = _Held(link, opened.reader_id)
            return self._held

    def _look_up(self, call: Call, fqns: Iterable[str]) -> None:
        """Makes known what the store says of tensors, as far as there are such."""
        unknown = [fqn for fqn in fqns if fqn not in self._tensors]
        if not unknown:
            return
        # By name the tensor itself is the first one whose name begins like its own.
        limit = 1 if len(unknown) == 1 else None
        first, last = min(unknown), max(unknown)
        prefix = first[: next((i for i, c in enumerate(first) if last[i : i + 1] != c), len(first))]
        found = self._connection.resume(
            call, lambda link: list_tensors(link, self.job, prefix, call, self._layout, limit)
        )
        self._tensors |= {tensor.fqn: tensor for tensor in found}

    def _describe(
        self, call: Call, fqn: str, kind: Kind, offset: int | None, numel: int | None
    ) -> tuple[tuple[int, ...], torch.dtype, Part]:
        """The shape of a tensor, the type of one kind of it, and the range of it that is meant."""
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
        return tensor.shape, tensor.kinds[kind], Part(fqn=fqn, kind=wire_kind, offset=first, numel=count)


def list_tensors(
    link: Link, job: str, prefix: str, call: Call, layout: str | None = None, limit: int | None = None
) -> list[StoredTensor]:
    """The tensors of a job, in its newest layout or another one, whose names begin with `prefix`: all of them, or the
    first `limit`. Raises StoreError."""
    tensors: list[StoredTensor] = []
    token = ""
    while True:
        request = pb.ListStoredTensorsRequest(
            job=job, fqn_prefix=prefix, page_size=limit or _PAGE, page_token=token, layout=layout
        )
        response = link.call("ListStoredTensors", request, call)
        tensors += [StoredTensor.from_proto(tensor) for tensor in response.tensors]
        token = response.next_page_token
        if not token or limit is not None:
            return tensors


def _copy_out(held: _Held, call: Call, remaining: deque[Part], target: torch.Tensor) -> None:
    """Copies parts one after the other, and takes each off `remaining`."""
    start = 0

    def take(held: _Held, part: Part, lease: pb.Lease) -> None:
        nonlocal start
        held.link.copy_out(call, lease, target[start : start + lease.size_bytes])
        start += lease.size_bytes

    _take_each(held, call, remaining, take)


def _take_each(
    held: _Held, call: Call, remaining: deque[WantedT], take: Callable[[_Held, WantedT, pb.Lease], None]
) -> None:
    """Leases what is in `remaining`, one after the other, and removes each from there when `take` has its bytes; the
    next ones are on their way meanwhile."""
    under_way: deque[Any] = deque()
    try:
        while remaining:
            while len(under_way) < min(_PARTS_UNDER_WAY, len(remaining)):
                under_way.append(held.lease(remaining[len(under_way)], call.left_seconds))
            (lease,) = result_of(under_way[0]).leases
            take(held, remaining[0], lease)
            held.give_back(under_way.popleft())
            remaining.popleft()
    finally:
        for leased in under_way:
            held.give_back(leased)


def _batches(parts: Iterable[Part], itemsizes: Mapping[str, int], most_bytes: int) -> Iterator[Batch]:
    """Cuts whole tensors into batches of at most so many bytes, as the store lays them out in a lease."""
    batch, end = Batch(), 0
    for part in parts:
        start, nbytes = round_up(end, GATHER_ALIGNMENT_BYTES), part.numel * itemsizes[part.fqn]
        if batch.parts and (start + nbytes > most_bytes or len(batch.parts) == _BATCHED_RANGES):
            yield batch
            batch, start = Batch(), 0
        batch.parts.append(part)
        batch.places.append(start)
        end = start + nbytes
    if batch.parts:
        yield batch


def _part_bytes(link: Link) -> int:
    share = link.arena_bytes // _ARENA_SHARE // _PARTS_UNDER_WAY
    return max(_PART_UNIT_BYTES, min(_MOST_PART_BYTES, share // _PART_UNIT_BYTES * _PART_UNIT_BYTES))


def _cut(whole: Part, part_numel: int) -> list[Part]:
    """A range in parts that begin at multiples of `part_numel` elements, but for the first."""
    end = whole.offset + whole.numel
    cuts = [whole.offset, *range((whole.offset // part_numel + 1) * part_numel, end, part_numel), end]
    return [
        Part(fqn=whole.fqn, kind=whole.kind, offset=first, numel=last - first)
        for first, last in itertools.pairwise(cuts)
    ]


def _check_out(out: torch.Tensor, dtype: torch.dtype, target: Part) -> torch.Tensor:
    if out.dtype != dtype or out.numel() != target.numel or not out.is_contiguous() or out.device.type != "cpu":
        raise ConfigError(
            f"out is of {out.dtype}, {out.numel()} elements on {out.device}, contiguous: {out.is_contiguous()}; "
            f"{target.fqn!r} needs {target.numel} contiguous elements of {dtype} on the CPU"
        )
    return out
