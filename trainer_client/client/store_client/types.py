"""Records in the public calls of a StoreClient: tensors, jobs and commits, with torch's types.

This module also converts the records to and from the messages of the wire protocol. It holds no connection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

from paramserver.contract import kinds
from paramserver.contract.dtypes import TORCH_DTYPES, WIRE_DTYPES
from paramserver.contract.kinds import KINDS, StoredKind
from paramserver.contract.tiers import TIERS, Tier
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.errors import ConfigError

Kind: TypeAlias = StoredKind
Placement = Literal["nvme", "host"]

_KINDS: dict[Kind, kinds.Kind] = {name: KINDS[name] for name in get_args(StoredKind)}
_KIND_NAMES = {value: name for name, value in _KINDS.items()}
_PLACEMENTS: Mapping[str, Tier] = {name: TIERS[name] for name in get_args(Placement)}


def check_name(what: str, name: object) -> None:
    """Check that a name is text that can be sent. `what` says what it names.

    Raises:
        ConfigError: it is not a str, or has characters that UTF-8 cannot encode (halves of a surrogate pair).
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of a {what} is a str, and {name!r} is of type {type(name).__name__}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name {name!r} of a {what} cannot be encoded as UTF-8; choose another name") from None


def check_values(what: str, tensor: object) -> None:
    """Check that an argument is a tensor whose memory holds all its elements. `what` names the argument.

    Raises:
        ConfigError: it is no tensor, or it is sparse, or on the meta device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{what} is of type {type(tensor).__name__}; give a torch.Tensor (torch.as_tensor makes one)")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{what} is sparse ({tensor.layout}), and the store keeps dense tensors; give its to_dense()")
    if tensor.is_meta:
        raise ConfigError(f"{what} is on the meta device, so it has no values; give a tensor that has some")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor to be stored; the dtype is float32, bfloat16 or float16."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec with the shape and the dtype of `tensor`."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)

    @classmethod
    def given(cls, fqn: str, value: TensorSpec | torch.Tensor) -> TensorSpec:
        """Return the spec that a caller gives for a tensor: a TensorSpec, or a tensor, which may be on the meta device.

        Raises:
            ConfigError: `value` is neither of them, or the tensor's name cannot be sent.
        """
        check_name("tensor", fqn)
        if not isinstance(value, TensorSpec | torch.Tensor):
            raise ConfigError(f"tensor {fqn!r}: give a TensorSpec or a torch.Tensor, not a {type(value).__name__}")
        return cls.of(value) if isinstance(value, torch.Tensor) else value

    def to_proto(self, fqn: str) -> pb.Parameter:
        """Return the wire's message for a tensor of this spec. Raise ConfigError if the store cannot keep it."""
        if self.dtype not in WIRE_DTYPES:
            raise ConfigError(f"tensor {fqn!r} is of {self.dtype}; the store keeps float32, bfloat16 and float16")
        if not self.numel:
            raise ConfigError(f"tensor {fqn!r} of shape {list(self.shape)} has no elements")
        return pb.Parameter(fqn=fqn, shape=self.shape, dtype=WIRE_DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A committed step of a job.

    Attributes:
        step: the number of the step.
        durable: whether it survives kill -9 of the daemon and power loss.
        committed_at_unix_seconds: time of the commit, by the daemon's clock.
    """

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
    """A layout of a job: one way in which its tensors are cut into shards.

    Attributes:
        name: the layout's name, which the client that created it has chosen.
        world_size: number of ranks that the tensors are sharded over.
        steps: the committed steps that are stored in this layout.
        rolled_back: by the name of each roll-back that an operator has made, the step to which it has returned the job.
    """

    name: str
    world_size: int
    steps: tuple[int, ...]
    rolled_back: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, message: pb.StoredLayout) -> StoredLayout:
        return cls(
            name=message.layout,
            world_size=message.world_size,
            steps=tuple(message.steps),
            rolled_back={mark.name: mark.step for mark in message.rolled_back},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job of the store.

    Attributes:
        name: the job's name.
        world_size: number of ranks that its tensors are sharded over.
        step: the newest settled step, which all nodes of the job have committed; None: there is none yet.
        durable: whether that step survives kill -9 of the daemon and power loss.
        newest: the newest step that this store has committed, which is above `step` until all nodes have it; None:
            nothing is committed yet.
        layouts: the layouts that have committed steps, the newest one last. There are two only while a job goes over
            to another number of ranks.
    """

    name: str
    world_size: int
    step: int | None
    durable: bool
    newest: int | None
    layouts: tuple[StoredLayout, ...]

    @classmethod
    def from_proto(cls, message: pb.StoredJob) -> StoredJob:
        newest = message.committed_step if message.HasField("committed_step") else None
        step, durable = newest, message.durable
        if message.unsettled:
            step = message.settled.step if message.HasField("settled") else None
            durable = message.settled.durable
        return cls(
            name=message.name,
            world_size=message.world_size,
            step=step,
            durable=durable,
            newest=newest,
            layouts=tuple(StoredLayout.from_proto(layout) for layout in message.layouts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a job, of which this store has at least some elements.

    Attributes:
        fqn: the tensor's name, as in `named_parameters()`.
        shape: the tensor's shape.
        trainable: whether the optimizer updates it.
        kinds: the dtype of each stored kind: "param" and, if the tensor is trained, "master" and the optimizer's
            states.
        held: the element ranges, as (offset, numel), that this store has. They cover the tensor, unless the ranks of
            the job are attached to several stores.
        index: its place in the order in which the writer of the job has named its tensors, which for a trainer is the
            model's order.
    """

    fqn: str
    shape: tuple[int, ...]
    trainable: bool
    kinds: Mapping[Kind, torch.dtype]
    held: tuple[tuple[int, int], ...]
    index: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the store has the tensor's values, those of kind "param"."""
        return self.kinds["param"]

    @classmethod
    def from_proto(cls, message: pb.StoredTensor) -> StoredTensor:
        return cls(
            fqn=message.parameter.fqn,
            shape=tuple(message.parameter.shape),
            trainable=message.parameter.trainable,
            kinds={_KIND_NAMES[k.kind]: TORCH_DTYPES[k.dtype] for k in message.kinds},
            held=tuple((r.offset, r.numel) for r in message.held),
            index=message.index,
        )


def kind_to_proto(kind: str) -> kinds.Kind:
    """Return the number that the wire protocol has for a kind. Raise ConfigError if `kind` names no kind."""
    if kind not in _KINDS:
        raise ConfigError(f"kind {kind!r} is none of {', '.join(_KINDS)}")
    return _KINDS[kind]


def kind_from_proto(kind: kinds.Kind) -> Kind:
    """Return the name of a kind, given the number that the wire protocol has for it."""
    return _KIND_NAMES[kind]


def kind_spec(dtype: torch.dtype, placement: str) -> pb.KindSpec:
    """Return the spec of kind "param", the only kind that a StoreClient writes.

    Raises:
        ConfigError: `placement` is not a placement.
    """
    if placement not in _PLACEMENTS:
        raise ConfigError(f"placement {placement!r} is none of {', '.join(_PLACEMENTS)}")
    return pb.KindSpec(kind=kinds.PARAM, dtype=WIRE_DTYPES[dtype], placement=_PLACEMENTS[placement])


def durability_to_proto(durability: str) -> pb.Durability:
    """Return the wire's message for `step`, `snapshot:N` or `none`. Raise ConfigError for anything else."""
    if durability == "step":
        return pb.Durability(step=pb.Durability.Step())
    if durability == "none":
        return pb.Durability(none=pb.Durability.Volatile())
    word, _, number = durability.partition(":")
    if word == "snapshot" and number.isdecimal() and int(number) > 0:
        return pb.Durability(snapshot=pb.Durability.Snapshot(every_steps=int(number)))
    raise ConfigError(f"durability {durability!r}: write 'step', 'snapshot:N' with a positive N, or 'none'")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a 1-D uint8 tensor that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8)
