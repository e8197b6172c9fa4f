"""Units: the parameters that are gathered and released together, and the memory they live in.

Owns which module is a unit, the flat buffers, and the parameters' `.data`. Must never hold a lease longer than it takes
to copy the bytes out, nor decide when to gather: that is the hooks' business.

[Note: released parameters] A flat buffer is freed by resizing its storage to 0 and refilled in place: tensors that
autograd saved from the parameters (F.linear saves a view of its weight) share the storage and are right again once it
is refilled. `.data` assignment keeps the version counters of parameter and buffer apart, so a refill does not look like
an in-place change to autograd. A tensor with a freed storage must not be read, it is a null pointer with a shape.
Released parameters therefore show a NaN of their shape, expanded from one element: whoever reads a weight outside of
its unit gets NaN, not a crash.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.channel import Pending
from trainer_client.collectives import Collectives
from trainer_client.errors import ConfigError
from trainer_client.layout import flat_layout
from trainer_client.planes import LeasedBytes
from trainer_client.precision import PrecisionPolicy
from trainer_client.rank_store import RankStore, Slab

ROOT_NAME = "(root)"

PROTO_DTYPES = {
    torch.float32: pb.DTYPE_FLOAT32,
    torch.bfloat16: pb.DTYPE_BFLOAT16,
    torch.float16: pb.DTYPE_FLOAT16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of the model.

    Attributes:
        index: in the model's order, frozen parameters included.
        shape: of the whole parameter (`tensor` keeps its shape too, but not always its memory).
    """

    index: int
    fqn: str
    tensor: nn.Parameter
    shape: torch.Size


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    fqn: str  # "" is the root
    module: nn.Module
    parameters: tuple[ModelParameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    param: pb.Tier
    optimizer: pb.Tier


class UnitState(enum.Enum):
    SHARDED = enum.auto()
    """No memory on the device: the parameters are in the store only."""

    FETCHING = enum.auto()
    """As SHARDED, with read leases requested or held: this rank's chunks are pinned in the store's host tier."""

    GATHERED = enum.auto()
    """The whole parameters of the unit are in the flat buffers; no lease is held."""


def list_parameters(model: nn.Module) -> list[ModelParameter]:
    """The model's parameters in its order; a tied one appears once, under its first FQN.

    Raises:
        ConfigError: names a parameter that the store cannot hold.
    """
    parameters = []
    for index, (fqn, tensor) in enumerate(model.named_parameters()):
        if not tensor.is_floating_point():
            raise ConfigError(f"parameter {fqn} has dtype {tensor.dtype}: only floating-point parameters are honoured")
        if tensor.is_meta:
            raise ConfigError(f"parameter {fqn} is on the meta device: materialise the model before initialize()")
        parameters.append(ModelParameter(index=index, fqn=fqn, tensor=tensor, shape=tensor.shape))
    return parameters


def find_units(model: nn.Module, parameters: Sequence[ModelParameter]) -> list[UnitSpec]:
    """The root unit, then the model's blocks in its order.

    The elements of the outermost ModuleLists whose elements are of one class are units; everything else belongs to the
    root, and so do parameters that are reachable from two units.
    """
    blocks = dict(_blocks(model))
    holders: dict[int, set[str]] = {}
    for fqn, block in blocks.items():
        for tensor in block.parameters():
            holders.setdefault(id(tensor), set()).add(fqn)
    # A tied parameter that the model also holds outside of the block is in use beyond the block's forward.
    outside: set[int] = set()
    for fqn, tensor in model.named_parameters(remove_duplicate=False):
        if not any(fqn.startswith(f"{block}.") for block in blocks):
            outside.add(id(tensor))
    members: dict[str, list[ModelParameter]] = {fqn: [] for fqn in ("", *blocks)}
    for parameter in parameters:
        held_by = holders.get(id(parameter.tensor), set())
        own = len(held_by) == 1 and id(parameter.tensor) not in outside
        members[next(iter(held_by)) if own else ""].append(parameter)
    root = UnitSpec(fqn="", module=model, parameters=tuple(members[""]))
    return [
        root,
        *(UnitSpec(fqn=fqn, module=block, parameters=tuple(members[fqn])) for fqn, block in blocks.items()),
    ]


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _is_uniform(child):
            for index, element in enumerate(child):
                yield f"{fqn}.{index}", element
        else:
            yield from _blocks(child, f"{fqn}.")


def _is_uniform(modules: nn.ModuleList) -> bool:
    """Whether the elements are blocks of one kind. Containers have no forward of their own and cannot be hooked."""
    classes = {type(module) for module in modules}
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return (
        len(classes) == 1
        and not issubclass(next(iter(classes)), containers)
        and all(next(module.parameters(), None) is not None for module in modules)
    )


class FlatGroup:
    """Parameters of a unit in one flat buffer; see layout.py [Note: flat groups].

    Attributes:
        shards: the parameter ranges in this rank's chunk, by position.
        name: of the rank's shard group in the store; says which part of the flat buffer it is, not whose.
        flat: the flat buffer [layout.numel], without memory while released.
    """

    def __init__(
        self,
        *,
        name: str,
        parameters: Sequence[ModelParameter],
        dtype: torch.dtype,
        trainable: bool,
        collectives: Collectives,
    ) -> None:
        self.parameters = tuple(parameters)
        self.dtype = dtype
        self.trainable = trainable
        self.layout = flat_layout([(p.fqn, p.shape.numel()) for p in parameters], collectives.world_size)
        self.shards = self.layout.shards_of(collectives.rank)
        self._collectives = collectives
        self.start, self.stop = self.layout.chunk_range(collectives.rank)
        self.name = f"{name}[{self.start}:{self.stop}]" + ("" if trainable else ":frozen")
        self.flat = torch.empty(0, dtype=dtype, device=collectives.device)
        self._whole: list[torch.Tensor] = []
        self._released: list[torch.Tensor] = []

    @property
    def param(self) -> Slab:
        return self.slab(pb.KIND_PARAM)

    @property
    def has_master(self) -> bool:
        return self.trainable and self.dtype != torch.float32

    @property
    def chunk_bytes(self) -> int:
        return self.layout.chunk * self.dtype.itemsize

    def slab(self, kind: pb.Kind) -> Slab:
        return Slab(group=self.name, kind=kind)

    def to_proto(self, placement: Placement) -> pb.ShardGroup:
        """The declaration of this rank's shard group."""
        dtype = PROTO_DTYPES[self.dtype]
        kinds = [pb.KindSpec(kind=pb.KIND_PARAM, dtype=dtype, placement=placement.param)]
        if self.trainable:
            states = [pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ]
            if self.has_master:
                states.insert(0, pb.KIND_MASTER)
            kinds += [pb.KindSpec(kind=k, dtype=pb.DTYPE_FLOAT32, placement=placement.optimizer) for k in states]
            kinds.append(pb.KindSpec(kind=pb.KIND_GRAD, dtype=dtype, placement=pb.TIER_HOST))
        shards = [pb.Shard(fqn=s.fqn, offset=s.offset, numel=s.numel, position=s.position) for s in self.shards]
        return pb.ShardGroup(name=self.name, numel=self.layout.chunk, shards=shards, kinds=kinds)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` [layout.numel] as the group's parameters."""
        return [
            flat[slot.position : slot.position + slot.numel].view(parameter.shape)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
        ]

    @torch.no_grad()
    def initial_chunk(self) -> torch.Tensor:
        """This rank's chunk of rank 0's initial weights: fp32, on the CPU, padding zero. A collective."""
        flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=self._collectives.device)
        for piece, parameter in zip(self.pieces(flat), self.parameters, strict=True):
            piece.copy_(parameter.tensor)
        self._collectives.broadcast(flat)
        return flat[self.start : self.stop].cpu()

    @torch.no_grad()
    def take_over(self) -> None:
        """Gives the parameters' own memory back: from now on they live in the flat buffer, released."""
        # Views are made while the storage has its size: torch checks their bounds then, and only then.
        self.flat = torch.empty(self.layout.numel, dtype=self.dtype, device=self._collectives.device)
        self._whole = self.pieces(self.flat)
        nan = torch.full((1,), torch.nan, dtype=self.dtype, device=self._collectives.device)
        self._released = [nan.expand(parameter.shape) for parameter in self.parameters]
        self.free()

    @torch.no_grad()
    def fill(self, chunk: torch.Tensor) -> None:
        """Gathers the flat buffer from every rank's chunk [layout.chunk]. A collective."""
        self.flat.untyped_storage().resize_(self.layout.numel * self.dtype.itemsize)
        self._collectives.all_gather_flat(self.flat, chunk)
        self._point_to(self._whole)

    def free(self) -> None:
        self._point_to(self._released)
        self.flat.untyped_storage().resize_(0)

    def _point_to(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.tensor.data = tensor


class Unit:
    """A unit and its flat groups; gather is split into start and wait, both idempotent.

    Attributes:
        index: in the list of units; the root is 0.
    """

    def __init__(
        self, index: int, spec: UnitSpec, policy: PrecisionPolicy, store: RankStore, collectives: Collectives
    ) -> None:
        self.index = index
        self.fqn = spec.fqn
        self.module = spec.module
        self.state = UnitState.SHARDED
        self._store = store
        self._pending: Pending[list[LeasedBytes]] | None = None
        self.groups = tuple(
            FlatGroup(
                name=spec.fqn or ROOT_NAME,
                parameters=members,
                dtype=policy.compute_dtype,
                trainable=trainable,
                collectives=collectives,
            )
            for trainable in (True, False)
            if (members := [p for p in spec.parameters if p.tensor.requires_grad == trainable])
        )

    @property
    def is_root(self) -> bool:
        return self.index == 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes that this rank fetches for one gather."""
        return sum(group.chunk_bytes for group in self.groups)

    def slabs(self) -> Iterable[Slab]:
        return [group.param for group in self.groups]

    def start_gather(self, position: int) -> None:
        """Asks for this rank's chunks. Does not wait."""
        if self.state is not UnitState.SHARDED:
            return
        if self.groups:
            self._pending = self._store.acquire_read(self.slabs(), position)
        self.state = UnitState.FETCHING

    def wait_gather(self, next_use: int | None) -> None:
        """Makes the parameters whole, after `start_gather`. A collective.

        Args:
            next_use: the position at which the unit is needed again, for the store's placement.
        """
        if self.state is UnitState.GATHERED:
            return
        if leases := self._take_leases():
            for group, leased in zip(self.groups, leases, strict=True):
                group.fill(leased.data.view(group.dtype))
            self._store.check_leases()
            self._store.release(leases, next_use)
        self.state = UnitState.GATHERED

    def release(self) -> None:
        """Gives the memory back, or the leases of a gather that nobody waited for."""
        if self.state is UnitState.GATHERED:
            for group in self.groups:
                group.free()
        elif leases := self._take_leases():
            self._store.release(leases)
        self.state = UnitState.SHARDED

    def _take_leases(self) -> list[LeasedBytes]:
        pending, self._pending = self._pending, None
        return pending.wait() if pending else []
