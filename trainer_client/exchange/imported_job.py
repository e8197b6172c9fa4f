"""The writing of a checkpoint into a store, in pieces, as a job that a trainer can resume.

The job has one rank, a layout of its own and one commit. A trainer with any number of ranks converts the job to its own
layout, as it converts a job of another number of ranks (training/run/relayout.py). The job exists from the commit on.
This module must never hold more than one piece of a tensor.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.durability import durable_every_steps
from paramserver.contract.kinds import KINDS
from paramserver.contract.limits import ELEMENT_ALIGNMENT
from paramserver.contract.tiers import TIERS
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.alignment import round_up
from trainer_client.client.store_client.staging import registrations
from trainer_client.client.store_client.types import Kind, Placement, durability_to_proto
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import ConfigError
from trainer_client.exchange.checkpoint import CheckpointTensor, Values

# The import divides tensors into shard groups of at most this number of elements, so a slab in fp32 has at most 8 MiB.
# The import leases one slab at a time, so it never takes more than 8 MiB of the arena.
_GROUP_NUMEL = 2 << 20
# The name of an imported job's layout begins with this word. A trainer's layout cannot have such a name, because its
# name begins with a fingerprint in hexadecimal digits.
_LAYOUT = "imported"
_NONCE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """Elements [offset, offset + numel) of a flattened tensor, whose first is element `position` of their group."""

    tensor: CheckpointTensor
    offset: int
    numel: int
    position: int


@dataclass(slots=True, kw_only=True)
class _Group:
    """A shard group of the imported job: its tensors share a dtype, and have optimizer states of the same kinds."""

    name: str
    dtype: torch.dtype
    kinds: tuple[Kind, ...]
    numel: int = 0
    shards: list[_Shard] = field(default_factory=list)

    def dtype_of(self, kind: Kind) -> torch.dtype:
        return self.dtype if kind == "param" else torch.float32

    def add(self, tensor: CheckpointTensor, offset: int, numel: int) -> None:
        self.shards.append(_Shard(tensor=tensor, offset=offset, numel=numel, position=self.numel))
        self.numel += round_up(numel, ELEMENT_ALIGNMENT)


class ImportedJob:
    """A new job for a checkpoint's tensors: its layout, which the constructor makes, and `write`, which stores it.

    Args:
        name: the job's name.
        tensors: the job's parameters.
        dtype: the dtype in which the model computes; None: that of the file, or fp32 if the store has no such dtype.
        device: the home of the tensors, as for a StoreClient.
        durability: "step", "snapshot:N" or "none". A trainer that resumes from the job must have the same durability in
            its config.

    Raises:
        ConfigError: the store cannot keep a tensor.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[CheckpointTensor],
        *,
        dtype: torch.dtype | None,
        device: Placement,
        durability: str,
    ) -> None:
        self._name = name
        self._tensors = tensors
        self._placement = TIERS[device]
        self._durability = durability_to_proto(durability)
        self._dtypes = {tensor.name: _dtype_of(tensor, dtype) for tensor in tensors}
        self._groups = list(self._cut())

    @property
    def size_bytes(self) -> int:
        """The number of bytes that `write` writes."""
        return sum(group.numel * group.dtype_of(kind).itemsize for group in self._groups for kind in group.kinds)

    def write(
        self, store: RankStore, step: int, client_state: bytes, on_written: Callable[[int], None] = lambda nbytes: None
    ) -> int:
        """Write the tensors, commit them, and return the step of the commit.

        If `write` raises an error and the session ends, the store has nothing of the job.

        Args:
            store: a new session with the store.
            step: the number of steps that the checkpoint's run had made. The commit has this number, unless it is 0 or
                the number of a commit that the job's durability would not make durable.
            client_state: the encoded state that the commit stores for rank 0.
            on_written: called after each slab, with the number of bytes that were written for it.

        Raises:
            JobConflictError: the store has a job of this name.
            ImportCheckpointError: the checkpoint's files are damaged.
            StoreError: the store failed, or has no room.
        """
        number = self._number(step)
        store.job.open(self._request())
        # If the session ends before the layout's first commit, the store frees the layout and all bytes of it. So a
        # failed import leaves nothing in the store.
        store.job.begin_layout(number)
        for registration in registrations(map(self._to_proto, self._groups)):
            store.job.register_shards(registration.groups)
        for group in self._groups:
            for kind in group.kinds:
                self._write(store, group, kind, number)
                on_written(group.numel * group.dtype_of(kind).itemsize)
        # `wait_for_copies` does nothing, because the CPU has written all values, so no device is still copying.
        store.steps.commit(number, client_state, number, wait_for_copies=lambda: None).wait()
        return number

    def _number(self, step: int) -> int:
        every = max(1, durable_every_steps(self._durability))
        return max(1, -(-step // every)) * every

    def _request(self) -> pb.OpenJobRequest:
        return pb.OpenJobRequest(
            job=self._name,
            run_id=secrets.token_hex(16),
            world_size=1,
            attached_ranks=1,
            parameters=[
                pb.Parameter(
                    fqn=tensor.name,
                    shape=tensor.shape,
                    dtype=WIRE_DTYPES[self._dtypes[tensor.name]],
                    trainable=tensor.trainable,
                )
                for tensor in self._tensors
            ],
            durability=self._durability,
            resume=pb.RESUME_POLICY_NEVER,
            layout=f"{_LAYOUT}-{secrets.token_hex(_NONCE_BYTES)}",
        )

    def _cut(self) -> Iterator[_Group]:
        """Divide the elements of all tensors among shard groups of the job, and yield these groups."""
        filling: dict[tuple[torch.dtype, tuple[Kind, ...]], _Group] = {}
        number = 0
        for tensor in self._tensors:
            dtype = self._dtypes[tensor.name]
            has_master = bool(tensor.states) and dtype != torch.float32
            kinds: tuple[Kind, ...] = ("param", *(("master",) if has_master else ()), *tensor.states)
            for offset in range(0, tensor.numel, _GROUP_NUMEL):
                numel = min(_GROUP_NUMEL, tensor.numel - offset)
                group = filling.get((dtype, kinds))
                if group is not None and group.numel + numel > _GROUP_NUMEL:
                    yield group
                    group = None
                if group is None:
                    group = filling[dtype, kinds] = _Group(name=f"[{_LAYOUT} {number}]", dtype=dtype, kinds=kinds)
                    number += 1
                group.add(tensor, offset, numel)
        yield from filling.values()

    def _to_proto(self, group: _Group) -> pb.ShardGroup:
        return pb.ShardGroup(
            name=group.name,
            numel=group.numel,
            shards=[
                pb.Shard(fqn=shard.tensor.name, offset=shard.offset, numel=shard.numel, position=shard.position)
                for shard in group.shards
            ],
            kinds=[
                pb.KindSpec(kind=KINDS[kind], dtype=WIRE_DTYPES[group.dtype_of(kind)], placement=self._placement)
                for kind in group.kinds
            ],
        )

    def _write(self, store: RankStore, group: _Group, kind: Kind, step: int) -> None:
        """Read one kind of a group from the files into leased memory of the store, and publish it as a slab."""
        slab = SlabName(group=group.name, kind=KINDS[kind])
        leases = store.leases.acquire_write([slab], step).wait()
        try:
            (leased,) = leases
            # The leased memory may still have bytes of another session. The tensors do not overwrite the padding
            # between them, so all of the memory is zeroed first.
            values = leased.data.zero_().view(group.dtype_of(kind))
            for shard in group.shards:
                source = _source(shard.tensor, kind)
                source.read(values[shard.position : shard.position + shard.numel], shard.offset)
            store.leases.publish(leases)
        except BaseException:
            store.leases.release_quietly(leases)
            raise


def _source(tensor: CheckpointTensor, kind: Kind) -> Values:
    return tensor.weight if kind in ("param", "master") else tensor.states[kind]


def _dtype_of(tensor: CheckpointTensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the store keeps the weight.

    Raise ConfigError if the store cannot keep elements of the tensor's dtype.
    """
    found = tensor.weight.dtype
    if not found.is_floating_point:
        raise ConfigError(f"tensor {tensor.name!r} is of {found}, and a parameter has floating-point numbers")
    if dtype is not None:
        return dtype
    if found.itemsize == 1:
        raise ConfigError(
            f"tensor {tensor.name!r} is of {found}, which the store does not keep: choose a dtype (--dtype)"
        )
    return found if found in WIRE_DTYPES else torch.float32
