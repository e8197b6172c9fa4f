"""Flat groups: the memory that the parameters of a unit live in while they are gathered, and what the store calls it.

Owns the flat buffers and the parameters' `.data`. Must never know where a chunk comes from, nor when it is needed.

[Note: released parameters] A flat buffer gives its memory back and is refilled in place (see flat_memory.py): tensors
that autograd saved from the parameters (F.linear saves a view of its weight) share the storage and are right again once
it is refilled. `.data` assignment keeps the version counters of parameter and buffer apart, so a refill does not look
like an in-place change to autograd. A tensor with a freed storage must not be read: it may be a null pointer with a
shape. Released parameters therefore show a NaN of their shape, expanded from one element, and are
`ReleasedParameter`s: who wants the values has them gathered by `want`, or gets an error.

[Note: autocast] Within `torch.autocast` torch keeps the low-precision copy of each fp32 parameter until the outermost
context ends, whatever becomes of the parameter's values. So the copies are dropped where values are released, and where
an update or the user replaces them (hooks.py): a context may contain `engine.step()`, and released units stay released.
torch can only drop all copies at once, which takes 0.3 us; what is still gathered is cast again at its next use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from paramserver.contract import tiers
from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.kinds import GRAD, MASTER, PARAM, Kind
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.config.home import Home
from trainer_client.errors import ReleasedParameterError
from trainer_client.model.flat_memory import FlatMemory
from trainer_client.model.layout import ShardRange, flat_layout
from trainer_client.model.parameters import ModelParameter
from trainer_client.model.placement import GroupPlacement, Residence
from trainer_client.model.released import release, restore
from trainer_client.transport.group_names import group_name
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import Slab

# What lives on the device is in the store only as of the last commit.
_TIERS = {home: tiers.NVME if home is Home.DEVICE else tiers.TIERS[home.value] for home in Home}


class FlatGroup:
    """Parameters of a unit in one flat buffer; see layout.py [Note: flat groups].

    Attributes:
        unit: name of the unit.
        want: called when a released parameter's values are wanted, with the name of torch's function; gathers the
            group, or raises.
        trainable: whether the store has optimizer states of the parameters, and takes gradients of them. Those of a
            trainable group may be frozen for a while.
        shards: the parameter ranges in this rank's chunk, by position.
        name: of the rank's shard group in the store; says which part of the flat buffer it is, not whose. It ends in
            `suffix`, which tells groups of one unit apart that differ in dtype.
        state_kinds: the optimizer's states, fp32; none for a frozen group.
        gradient_dtype: of KIND_GRAD, by default as the parameters.
        flat: the flat buffer [layout.numel], without memory while released.
        chunk: this rank's part [layout.chunk] of the parameters, where they live on the device; None: the store has it.
    """

    def __init__(
        self,
        *,
        unit: str,
        parameters: Sequence[ModelParameter],
        dtype: torch.dtype,
        trainable: bool,
        state_kinds: Sequence[Kind],
        rank: int,
        world_size: int,
        device: torch.device,
        gradient_dtype: torch.dtype | None = None,
        suffix: str = "",
    ) -> None:
        self.parameters = tuple(parameters)
        self.dtype = dtype
        self.gradient_dtype = gradient_dtype or dtype
        self.trainable = trainable
        self.state_kinds = tuple(state_kinds) if trainable else ()
        self.layout = flat_layout([(p.fqn, p.shape.numel()) for p in parameters], world_size)
        self.start, self.stop = self.layout.chunk_range(rank)
        self.unit = unit
        self.want: Callable[[ModelParameter, str], None] = _refuse
        self._suffix = suffix
        self.name = self.name_of(rank)
        self.shards = self.shards_of(rank)
        self.device = device
        self.chunk: torch.Tensor | None = None
        # Views are made while the storage has its size: torch checks their bounds then, and only then.
        firsts = [slot.position for slot in self.layout.slots if slot.numel]
        self._memory = FlatMemory(self.layout.numel, dtype, device, marks=firsts)
        self.flat = self._memory.tensor
        self._whole = self.pieces(self.flat)
        nan = torch.full((), torch.nan, dtype=dtype, device=device)
        self._released = [nan.expand(parameter.shape) for parameter in self.parameters]
        self._memory.give_back()

    @property
    def has_master(self) -> bool:
        return self.trainable and self.dtype != torch.float32

    @property
    def weight_kinds(self) -> tuple[Kind, ...]:
        """The kinds that hold the weight: the parameter, and the master weight where there is one."""
        return (PARAM, MASTER) if self.has_master else (PARAM,)

    @property
    def weight_kind(self) -> Kind:
        """The kind that holds the weight which the optimizer updates."""
        return self.weight_kinds[-1]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is kept of the group beyond a step: the parameter, the master weight and the optimizer's states."""
        return (*self.weight_kinds, *self.state_kinds)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's part of the parameters."""
        return self.layout.chunk * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the flat buffer while it is gathered."""
        return self.layout.numel * self.dtype.itemsize

    def dtype_of(self, kind: Kind) -> torch.dtype:
        if kind == GRAD:
            return self.gradient_dtype
        return self.dtype if kind == PARAM else torch.float32

    def name_of(self, rank: int) -> str:
        """The name of a rank's shard group in the store."""
        start, stop = self.layout.chunk_range(rank)
        return group_name(self.unit, start, stop, trainable=self.trainable, suffix=self._suffix)

    def shards_of(self, rank: int) -> tuple[ShardRange, ...]:
        return self.layout.shards_of(rank)

    def slab(self, kind: Kind, rank: int | None = None) -> Slab:
        """The slab of a kind of this rank's chunk, or of another rank's."""
        return Slab(group=self.name if rank is None else self.name_of(rank), kind=kind)

    def to_proto(self, placement: GroupPlacement) -> pb.ShardGroup:
        """The declaration of this rank's shard group."""
        optimizer = _TIERS[placement.optimizer]
        param = _TIERS[placement.parameters]
        if self.trainable and placement.parameters is Home.DEVICE:
            # Where the update runs in the store, they are a part of what it updates.
            param = optimizer
        kinds = [
            pb.KindSpec(
                kind=kind,
                dtype=WIRE_DTYPES[self.dtype_of(kind)],
                placement=param if kind == PARAM else optimizer,
            )
            for kind in self.kinds
        ]
        if self.trainable:
            dtype = WIRE_DTYPES[self.dtype_of(GRAD)]
            kinds.append(pb.KindSpec(kind=GRAD, dtype=dtype, placement=tiers.HOST))
        shards = [pb.Shard(fqn=s.fqn, offset=s.offset, numel=s.numel, position=s.position) for s in self.shards]
        return pb.ShardGroup(name=self.name, numel=self.layout.chunk, shards=shards, kinds=kinds)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` [layout.numel] as the group's parameters."""
        return [
            flat[slot.position : slot.position + slot.numel].view(parameter.shape)
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
        ]

    def keep(self, residence: Residence) -> None:
        """The parameters live on the device from now on: this rank's chunk, or the whole flat buffer; uninitialised."""
        if residence is Residence.SHARDED:
            self.chunk = torch.zeros(self.layout.chunk, dtype=self.dtype, device=self.device)
        else:
            self._memory.take()
            self.chunk = self.flat[self.start : self.stop]

    @torch.no_grad()
    def take_over(self) -> None:
        """Gives the parameters' own memory back: from now on they live in the flat buffer."""
        if self._memory.is_there:
            self._point_to(self._whole)
        else:
            self.free()

    @torch.no_grad()
    def allocate(self) -> None:
        """Gives the flat buffer its memory, to be filled by the caller, and shows it in the parameters."""
        self._memory.take()
        self._point_to(self._whole)

    def show(self, rank: int, leased: LeasedBytes) -> bool:
        """Shows a rank's chunk in its place of the flat buffer, after `allocate`, without copying it: the lease must be
        held until the group is freed or owned. False where it has to be copied."""
        first, last = self.layout.chunk_range(rank)
        size = self.dtype.itemsize
        return leased.source is not None and self._memory.show(first * size, (last - first) * size, leased.source)

    @torch.no_grad()
    def own(self) -> None:
        """Copies what is shown: no lease need be held any more."""
        self._memory.own()

    def hide(self) -> None:
        """Releases the parameters; their memory stays until `free`, and `allocate` shows it again."""
        torch.clear_autocast_cache()
        self._point_to(self._released)
        for parameter in self.parameters:
            release(parameter.tensor, partial(self._want, parameter))

    def free(self) -> None:
        """Releases the parameters, and gives their memory back."""
        self.hide()
        self._memory.give_back()

    def contains(self, tensor: nn.Parameter) -> bool:
        return any(parameter.tensor is tensor for parameter in self.parameters)

    def holds_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view of the gathered flat buffer."""
        if not self._memory.is_there or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    def _want(self, parameter: ModelParameter, function: str) -> None:
        self.want(parameter, function)

    def _point_to(self, tensors: Sequence[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            restore(parameter.tensor)
            parameter.tensor.data = tensor


def _refuse(parameter: ModelParameter, function: str) -> None:
    raise ReleasedParameterError(parameter.fqn, function)
