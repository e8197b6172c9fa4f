"""The layout of a job of a StoreClient: how its tensors are divided into shard groups.

A large tensor is cut into shards, each of which is a group of its own. Many small tensors are packed into one group,
because a group costs the store some kilobytes of memory, a page on NVMe and two calls, however small it is. This module
owns no connection.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.alignment import round_up
from trainer_client.client.store_client.types import Placement, TensorSpec, durability_to_proto, kind_spec
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.errors import ConfigError

# The largest size of a pack. To put one small tensor, the client writes its whole pack. This costs little, because the
# store verifies and writes at least 128 KiB at a time in any case.
PACK_BYTES = 128 << 10
# The name of the layout of every job that a StoreClient writes.
PACKED = "packed"


@dataclass(slots=True, kw_only=True)
class Pack:
    """A shard group of small tensors with one dtype.

    Attributes:
        name: name of the group.
        dtype: dtype of its tensors.
        positions: the element at which each tensor begins, by the tensor's name.
        numel: number of elements of the group, with padding.
    """

    name: str
    dtype: torch.dtype
    positions: dict[str, int] = field(default_factory=dict)
    numel: int = 0


@dataclass(frozen=True, kw_only=True)
class JobLayout:
    """The description of a job, which the store gets each time the job is opened.

    Attributes:
        name: the job's name.
        tensors: the job's tensors, by name.
        durability: "step", "snapshot:N" or "none".
        placement: the home of the job's tensors: "nvme" or "host".
        shard_bytes: the largest size of a shard.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    durability: str
    placement: Placement
    shard_bytes: int

    def open_request(self) -> pb.OpenJobRequest:
        """Return the request that opens the job. Raise ConfigError if the store cannot keep the job."""
        if not self.tensors:
            raise ConfigError(f"job {self.name!r} has no tensors; name at least one, with its shape and type")
        return pb.OpenJobRequest(
            job=self.name,
            run_id=secrets.token_hex(16),
            world_size=1,
            attached_ranks=1,
            parameters=[spec.to_proto(fqn) for fqn, spec in self.tensors.items()],
            durability=durability_to_proto(self.durability),
            resume=pb.RESUME_POLICY_AUTO,
            layout=PACKED,
        )

    @cached_property
    def packs(self) -> dict[str, Pack]:
        """The pack that each small tensor belongs to, by the tensor's name.

        The packs do not depend on the order of `tensors`, so each client that opens the job finds the same packs.
        """
        packs: dict[str, Pack] = {}
        filling: dict[torch.dtype, Pack] = {}
        numbers = itertools.count()
        pack_bytes = min(PACK_BYTES, self.shard_bytes)
        for fqn, spec in sorted(self.tensors.items()):
            numel, itemsize = round_up(spec.numel, ELEMENT_ALIGNMENT), spec.dtype.itemsize
            if numel * itemsize > pack_bytes // 2:
                continue
            pack = filling.get(spec.dtype)
            if pack is None or (pack.numel + numel) * itemsize > pack_bytes:
                # A pack is named `[packed N]`. The group of a large tensor is named `fqn[start:end]`, so no such group
                # has the name of a pack.
                pack = filling[spec.dtype] = Pack(name=f"[packed {next(numbers)}]", dtype=spec.dtype)
            pack.positions[fqn] = pack.numel
            pack.numel += numel
            packs[fqn] = pack
        return packs

    def shards(self, fqn: str) -> list[tuple[str, int, int]]:
        """Return (group name, start, end) for each shard of a tensor that is not packed.

        A shard has the tensor's elements [start, end). It raises ConfigError if `shard_bytes` is too small.
        """
        spec = self.tensors[fqn]
        length = self.shard_bytes // spec.dtype.itemsize // ELEMENT_ALIGNMENT * ELEMENT_ALIGNMENT
        if length <= 0:
            raise ConfigError(f"shard_bytes {self.shard_bytes} must hold {ELEMENT_ALIGNMENT} elements of {spec.dtype}")
        ends = [*range(length, spec.numel, length), spec.numel]
        ranges = itertools.pairwise([0, *ends])
        return [(str(ShardGroupName(unit=fqn, start=start, stop=end)), start, end) for start, end in ranges]

    def groups(self) -> Iterator[pb.ShardGroup]:
        """Yield the messages that declare the job's shard groups to the store: the shards, and the packs."""
        yield from (self._group_of(pack) for pack in _distinct(self.packs.values()))
        for fqn, spec in self.tensors.items():
            for group, start, end in self.shards(fqn) if fqn not in self.packs else ():
                yield pb.ShardGroup(
                    name=group,
                    numel=round_up(end - start, ELEMENT_ALIGNMENT),
                    shards=[pb.Shard(fqn=fqn, offset=start, numel=end - start, position=0)],
                    kinds=[kind_spec(spec.dtype, self.placement)],
                )

    def _group_of(self, pack: Pack) -> pb.ShardGroup:
        return pb.ShardGroup(
            name=pack.name,
            numel=pack.numel,
            shards=[
                pb.Shard(fqn=fqn, numel=self.tensors[fqn].numel, position=position)
                for fqn, position in pack.positions.items()
            ],
            kinds=[kind_spec(pack.dtype, self.placement)],
        )


def _distinct(packs: Iterable[Pack]) -> Iterator[Pack]:
    """Yield each pack once, in the order of first occurrence: several tensors have the same pack."""
    return iter({pack.name: pack for pack in packs}.values())
