"""What a StoreClient is told and tells: tensors, jobs and commits, in torch's words rather than the wire's.

Plain records and their way to and from the wire. Holds no connection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from paramserver.contract import kinds
from paramserver.contract.dtypes import TORCH_DTYPES, WIRE_DTYPES
from paramserver.contract.durability import parse_durability
from paramserver.contract.kinds import KINDS, StoredKind
from paramserver.contract.tiers import TIERS, Tier
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import ConfigError

Kind: TypeAlias = StoredKind
Placement = Literal["nvme", "host"]

_KINDS: dict[Kind, kinds.Kind] = {name: KINDS[name] for name in get_args(StoredKind)}
_KIND_NAMES = {value: name for name, value in _KINDS.items()}
_PLACEMENTS: Mapping[str, Tier] = {name: TIERS[name] for name in get_args(Placement)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to be stored: its shape and its type, one of float32, bfloat16 and float16."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    def to_proto(self, fqn: str) -> pb.Parameter:
        """Raises ConfigError for a tensor that the store cannot keep."""
        if self.dtype not in WIRE_DTYPES:
            raise ConfigError(f"tensor {fqn!r} is of {self.dtype}; the store keeps float32, bfloat16 and float16")
        if not self.numel:
            raise ConfigError(f"tensor {fqn!r} of shape {list(self.shape)} has no elements")
        return pb.Parameter(fqn=fqn, shape=self.shape, dtype=WIRE_DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed step of a job. `durable`: it survives kill -9 and power loss."""

    step: int
    durable: bool
    committed_at_unix_seconds: float

    @classmethod
    def from_proto(cls, message: pb.VersionInfo) -> Commit:
        return cls(
            step=message.step,
            durable=message.durable,
            committed_at_unix_seconds=message.committed_at_unix_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """A partition of a job into shards, by a name that its client has given it, and the committed steps in it."""

    name: str
    world_size: int
    steps: tuple[int, ...]

    @classmethod
    def from_proto(cls, message: pb.StoredLayout) -> StoredLayout:
        return cls(name=message.layout, world_size=message.world_size, steps=tuple(message.steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job of the store.

    Attributes:
        step: the newest committed one; None: none yet.
        layouts: that have committed steps, the newest one last: one, but for the moment in which a job goes over to
            another number of ranks.
    """

    name: str
    world_size: int
    step: int | None
    durable: bool
    layouts: tuple[StoredLayout, ...]

    @classmethod
    def from_proto(cls, message: pb.StoredJob) -> StoredJob:
        return cls(
            name=message.name,
            world_size=message.world_size,
            step=message.committed_step if message.HasField("committed_step") else None,
            durable=message.durable,
            layouts=tuple(StoredLayout.from_proto(layout) for layout in message.layouts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor that the store has elements of.

    Attributes:
        kinds: what is stored of it ("param", and of a trained one "master" and the optimizer's states), with the types.
        held: the element ranges, as (offset, numel), that this store has: all of it, unless the ranks of the job are
            attached to several stores.
    """

    fqn: str
    shape: tuple[int, ...]
    trainable: bool
    kinds: Mapping[Kind, torch.dtype]
    held: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """That of kind "param"."""
        return self.kinds["param"]

    @classmethod
    def from_proto(cls, message: pb.StoredTensor) -> StoredTensor:
        return cls(
            fqn=message.parameter.fqn,
            shape=tuple(message.parameter.shape),
            trainable=message.parameter.trainable,
            kinds={_KIND_NAMES[k.kind]: TORCH_DTYPES[k.dtype] for k in message.kinds},
            held=tuple((r.offset, r.numel) for r in message.held),
        )


def kind_to_proto(kind: str) -> kinds.Kind:
    """Raises ConfigError for a word that is no kind."""
    if kind not in _KINDS:
        raise ConfigError(f"kind {kind!r} is none of {', '.join(_KINDS)}")
    return _KINDS[kind]


def kind_from_proto(kind: kinds.Kind) -> Kind:
    return _KIND_NAMES[kind]


def kind_spec(dtype: torch.dtype, placement: str) -> pb.KindSpec:
    """How a tensor's only kind is kept. Raises ConfigError for a word that is no placement."""
    if placement not in _PLACEMENTS:
        raise ConfigError(f"placement {placement!r} is none of {', '.join(_PLACEMENTS)}")
    return pb.KindSpec(kind=kinds.PARAM, dtype=WIRE_DTYPES[dtype], placement=_PLACEMENTS[placement])


def durability_to_proto(durability: str) -> pb.Durability:
    """`step`, `snapshot:N` or `none`. Raises ConfigError for anything else."""
    try:
        return parse_durability(durability)
    except ValueError:
        raise ConfigError(
            f"durability {durability!r}: write 'step', 'snapshot:N' with a positive N, or 'none'"
        ) from None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, uint8, 1-D, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)
