"""Flat groups: the flat buffers in which the gathered parameters of units lie, and the groups' names in the store.

This module owns the flat buffers and the parameters' `.data`. It must never know where a partition comes from, nor when
a partition is needed.

[Note: released parameters] A flat buffer frees its memory and is refilled in place (see flat_memory.py). Tensors that
autograd has saved from the parameters (F.linear saves a view of its weight) share the buffer's storage, so they have
the right values again when the buffer is refilled. Because `.data` is assigned, the version counters of parameter and
buffer are separate, and autograd does not take a refill for an in-place change. A tensor with a freed storage must not
be read, because it may be a null pointer with a shape. So the data of a released parameter is one NaN, expanded to the
parameter's shape, and its class is `ReleasedParameter`. If a function of torch needs the values, this class has them
gathered (see `gather_on_use`), or raises an error.

[Note: changes in place] The script may change gathered parameters in place. torch's version counters do not show all of
these changes, for example not those through `parameter.data` or through an array of numpy that shares the memory. So
the digests of copied bytes are compared. For mapped bytes, the kernel says which pages this process has written to. If
a rank always has the whole parameters (stages 0 to 2), the changes count: see step/in_place.py. At stage 3 the memory
is given up after each use and the changes would be lost, so a change is an error: see `Unit.require_unchanged`.

[Note: autocast] Within `torch.autocast`, torch keeps a low-precision copy of each fp32 parameter that was used, until
the outermost context of autocast ends. The copies would take memory for released units, and would have old values after
an update. They are therefore dropped when parameters are released, and when an update or the user replaces values
(hooks.py), so that a context of autocast may contain `engine.step()`. torch can only drop all copies at once, which
takes 0.3 us; parameters that are still gathered are cast again at their next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from paramserver.contract import tiers
from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.kinds import GRAD, MASTER, PARAM, Kind
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.device import CPU
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.shard_group_name import ShardGroupName
from trainer_client.config.home import Home
from trainer_client.errors import ConfigError, ReleasedParameterError
from trainer_client.training.model.availability import hide_status, part_of, show_part
from trainer_client.training.model.digests import digest_on_device
from trainer_client.training.model.flat_memory import FlatMemory
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.placement import GroupPlacement, Residence
from trainer_client.training.model.released import release, restore
from trainer_client.training.model.slot_table import ShardRange, make_slot_table
from trainer_client.training.model.whole import hide_whole, show_whole

Digests: TypeAlias = tuple[int, ...] | torch.Tensor
"""The digests of a group's parameters.

On the CPU there is one digest of each parameter. On an accelerator there is one of them all, 0-D int64 on the device.
"""

GatherOnUse: TypeAlias = Callable[[ModelParameter, str], AbstractContextManager[Callable[[Any], None]] | None]

# The tier where the store keeps a kind of state, by the home of the state. A trainer writes states whose home is the
# device to the store only for commits, so NVMe is enough for them.
_TIERS = {home: tiers.NVME if home is Home.DEVICE else tiers.TIERS[home.value] for home in Home}


class FlatGroup:
    """Parameters of a unit in one flat buffer; see slot_table.py [Note: flat groups].

    Attributes:
        unit: name of the unit.
        parameters: the parameters, in the order of their places in the flat buffer.
        dtype: dtype of the flat buffer.
        trainable: whether the store has optimizer states of the parameters and takes gradients of them. Parameters of a
            trainable group may still be frozen for some steps.
        slot_table: the places of the parameters in the flat buffer, and the ranks' partitions.
        start, stop: the elements [start, stop) of the flat buffer are this rank's partition.
        shards: the parts of parameters in this rank's partition.
        name: name of this rank's shard group in the store. It is made of the unit's name and the range of elements,
            and of a suffix if the dtype of the parameters or of reductions is not the usual one. It does not have the
            rank's number.
        state_kinds: the kinds of the optimizer's fp32 states; none for a frozen group.
        gradient_dtype: dtype of the kind "grad"; by default the dtype of the parameters.
        reduction_dtype: dtype in which gradients are added over ranks; by default the dtype of the parameters.
        device: the device of the flat buffer.
        flat: the flat buffer [slot_table.numel], without memory while the group is released.
        partition: this rank's part [partition_numel] of the parameters if they live on the device; None: they live in
            the store.
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
        reduction_dtype: torch.dtype | None = None,
        suffix: str = "",
    ) -> None:
        self.parameters = tuple(parameters)
        self.dtype = dtype
        self.gradient_dtype = gradient_dtype or dtype
        self.reduction_dtype = reduction_dtype or dtype
        self.trainable = trainable
        self.state_kinds = tuple(state_kinds) if trainable else ()
        self.slot_table = make_slot_table(
            [(p.fqn, p.shape.numel()) for p in parameters], world_size, [p.first for p in parameters]
        )
        self.start, self.stop = self.slot_table.partition_range(rank)
        self.unit = unit
        self._gather_on_use: GatherOnUse = _refuse
        self._suffix = suffix
        self.name = self.name_of(rank)
        self.shards = self.shards_of(rank)
        self.device = device
        self.partition: torch.Tensor | None = None
        # The views of the parameters' slots in the flat buffer are made while the buffer's storage has its full size,
        # because torch refuses to make views beyond the end of a storage.
        firsts = [slot.offset for slot in self.slot_table.slots if slot.numel]
        self._memory = FlatMemory(self.slot_table.numel, dtype, device, marks=firsts)
        self.flat = self._memory.tensor
        self._whole = self.pieces(self.flat)
        nan = torch.full((), torch.nan, dtype=dtype, device=device)
        self._released = [nan.expand(parameter.shape) for parameter in self.parameters]
        # The small tensors in `_parts` are made now, before initial values are staged. If a small object was made
        # between the initial values of two partitions, it would lie at the start of the memory that the first partition
        # has freed, and glibc could not give this memory to the second partition.
        numels = {shard.slot: shard.numel for shard in self.shards}
        self._parts = [part_of(numels.get(slot, 0), dtype) for slot in range(len(self.parameters))]
        self._memory.free()
        # Whether this group sets the parameters' `.data` when it gathers and releases them. It no longer does after the
        # engine has left the parameters to the user.
        self._has_parameters = True
        # `_noted` has the digests of the parameters' values after the last gather, with which a later check finds
        # changes by the script. `_doubt` says whether such a check on an accelerator has found a change: a 0-D tensor
        # on the device, so that the check does not wait for the device.
        self._noted: Digests | None = None
        self._doubt: torch.Tensor | None = None

    @property
    def has_master(self) -> bool:
        return self.trainable and self.dtype != torch.float32

    @property
    def weight_kinds(self) -> tuple[Kind, ...]:
        """The kinds that hold the weight: KIND_PARAM, and KIND_MASTER if there is one."""
        return (PARAM, MASTER) if self.has_master else (PARAM,)

    @property
    def weight_kind(self) -> Kind:
        """The kind of the weight that the optimizer updates: KIND_MASTER, or KIND_PARAM for fp32 parameters."""
        return self.weight_kinds[-1]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that stay from step to step: those of the weight, and those of the optimizer's states."""
        return (*self.weight_kinds, *self.state_kinds)

    @property
    def partition_bytes(self) -> int:
        """Bytes of one rank's partition of the parameters."""
        return self.slot_table.partition_numel * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Bytes of the flat buffer while it is gathered."""
        return self.slot_table.numel * self.dtype.itemsize

    def dtype_of(self, kind: Kind) -> torch.dtype:
        if kind == GRAD:
            return self.gradient_dtype
        return self.dtype if kind == PARAM else torch.float32

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's shard group in the store."""
        start, stop = self.slot_table.partition_range(rank)
        variant = ("" if self.trainable else ":frozen") + self._suffix
        return str(ShardGroupName(unit=self.unit, start=start, stop=stop, variant=variant))

    def shards_of(self, rank: int) -> tuple[ShardRange, ...]:
        return self.slot_table.shards_of(rank)

    def slab(self, kind: Kind, rank: int | None = None) -> SlabName:
        """Return the name of the slab with one kind of a rank's partition, by default this rank's."""
        return SlabName(group=self.name if rank is None else self.name_of(rank), kind=kind)

    def to_proto(self, placement: GroupPlacement) -> pb.ShardGroup:
        """Return the declaration of this rank's shard group, for the store."""
        optimizer = _TIERS[placement.optimizer]
        param = _TIERS[placement.parameters]
        if self.trainable and placement.parameters is Home.DEVICE:
            # If the store makes the update, it writes the updated parameters, too, so the store keeps the parameters in
            # the same tier as the optimizer's states.
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
            # If the store makes the update, the rank hands the gradient over to the store. A gradient whose home is the
            # device is then handed over in the store's host tier.
            home = tiers.NVME if placement.gradients is Home.NVME else tiers.HOST
            kinds.append(pb.KindSpec(kind=GRAD, dtype=dtype, placement=home))
        shards = [pb.Shard(fqn=s.fqn, offset=s.offset, numel=s.numel, position=s.partition_offset) for s in self.shards]
        return pb.ShardGroup(name=self.name, numel=self.slot_table.partition_numel, shards=shards, kinds=kinds)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of `flat` [slot_table.numel] with the shapes of the group's parameters."""
        return [
            flat[slot.offset : slot.offset + slot.numel].view(parameter.shape)
            for slot, parameter in zip(self.slot_table.slots, self.parameters, strict=True)
        ]

    def keep(self, residence: Residence) -> None:
        """Keep memory on the device from now on: for this rank's partition at stage 3, else for the whole flat buffer.

        The values are not initialised.
        """
        if residence is Residence.SHARDED:
            self.partition = torch.zeros(self.slot_table.partition_numel, dtype=self.dtype, device=self.device)
        else:
            self._memory.allocate()
            self.partition = self.flat[self.start : self.stop]

    @torch.no_grad()
    def take_over(self) -> None:
        """Free the parameters' own memory; from now on their data is in the flat buffer."""
        if self._memory.is_allocated:
            self._point_to(self._whole)
        else:
            self.free()
            for parameter, part in zip(self.parameters, self._parts, strict=True):
                show_part(parameter.tensor, part)
                if parameter.is_last_tile:
                    hide_whole(parameter.whole, self.dtype, self.device)

    @torch.no_grad()
    def give_up_parameters(self) -> None:
        """Give each parameter memory of its own on the CPU, uninitialised and in its dtype, for the user.

        A tiled parameter then has whole memory, and its tiles have none. From now on, `allocate` and `free` concern the
        flat buffer only, and do not change the parameters.
        """
        self._point_to(
            [
                torch.empty(parameter.shape, dtype=self.dtype) if parameter.tile_of is None else released
                for parameter, released in zip(self.parameters, self._released, strict=True)
            ]
        )
        for parameter in self.parameters:
            hide_status(parameter.tensor)
            if parameter.is_last_tile:
                show_whole(parameter.whole, torch.empty(parameter.whole.shape, dtype=self.dtype))
                hide_status(parameter.whole.tensor)
        self._has_parameters = False

    def leave_parameters(self) -> None:
        """Leave resident parameters, with their memory and values, to the user; this group changes them no more."""
        for parameter in self.parameters:
            hide_status(parameter.tensor)
        self._has_parameters = False

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the flat buffer, unless it has memory, and make the parameters views of it.

        A buffer that is allocated now is uninitialised, so the caller has to fill it. After `release_parameters` the
        buffer still has its memory with the values, so the caller need not fill it.
        """
        self._memory.allocate()
        self._point_to(self._whole)

    def map_partition(self, rank: int, leased: LeasedBytes) -> bool:
        """Map a rank's leased partition at its offset in the flat buffer, instead of copying it.

        Call this after `allocate`. The lease has to be held until `free` or `copy_mapped`. Return False if the
        partition cannot be mapped, so that the caller has to copy it.
        """
        first, last = self.slot_table.partition_range(rank)
        size = self.dtype.itemsize
        return leased.source is not None and self._memory.map_range(first * size, (last - first) * size, leased.source)

    @torch.no_grad()
    def copy_mapped(self) -> None:
        """Replace mapped partitions by copies, so that their leases can be released."""
        self._memory.copy_mapped()
        self.note_values()

    def release_parameters(self) -> None:
        """Make the parameters `ReleasedParameter`s without values, but keep the flat buffer with its values.

        The next `allocate` makes the parameters views of the buffer again, so no gather is needed.
        """
        torch.clear_autocast_cache()
        if not self._has_parameters:
            return
        self._point_to(self._released)
        for parameter in self.parameters:
            release(parameter.tensor, partial(self._on_released_access, parameter))

    @contextmanager
    def showing(self, parameter: ModelParameter, values: torch.Tensor) -> Iterator[None]:
        """Make `values` the data of a released parameter within the context, so that torch can read its values."""
        restore(parameter.tensor)
        parameter.tensor.data = values
        try:
            yield
        finally:
            self.release_parameters()

    def free(self) -> None:
        """Make the parameters `ReleasedParameter`s without values, and free the memory of the flat buffer."""
        self.release_parameters()
        self._memory.free()
        self._noted = None

    def gather_on_use(self, gather: GatherOnUse) -> None:
        """Have `gather` called, with the function's name, when a function of torch needs a released parameter's values.

        `gather` has to gather the group, or raise; see released.release for what it returns. Until this method is
        called, each such use raises ReleasedParameterError.
        """
        self._gather_on_use = gather

    def contains(self, tensor: nn.Parameter) -> bool:
        return any(parameter.tensor is tensor for parameter in self.parameters)

    def holds_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of the gathered flat buffer."""
        if not self._memory.is_allocated or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    def displaced(self) -> Iterator[tuple[ModelParameter, torch.Tensor]]:
        """Yield the parameters whose `.data` the script has replaced, each with the view of its slot in the buffer.

        Nothing is yielded if the flat buffer has no memory.
        """
        pairs = zip(self.parameters, self._whole, strict=True) if self._memory.is_allocated else ()
        yield from ((each, own) for each, own in pairs if each.tensor.data_ptr() != own.data_ptr())

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy the values of displaced parameters into their slots, and make the parameters views of the slots again.

        Raises:
            ConfigError: a parameter has another shape, dtype or device now.
        """
        for parameter, own in self.displaced():
            values = parameter.tensor.detach()
            if (values.shape, values.dtype, values.device) != (own.shape, own.dtype, own.device):
                raise ConfigError(
                    f"parameter {parameter.fqn} has become a tensor of {values.dtype} on {values.device} with shape "
                    f"{list(values.shape)}, because something was assigned to its `.data`, and the engine trains it as "
                    f"one of {own.dtype} on {own.device} with shape {list(own.shape)}: assign a tensor of that kind"
                )
            own.copy_(values)
            parameter.tensor.data = own

    def digests(self) -> Digests:
        """Return digests of the parameters' bytes in the flat buffer, which must have memory.

        On the CPU there is one digest for each parameter, on an accelerator one digest of the whole buffer. Mapped
        bytes are left out; see [Note: changes in place].
        """
        if not self.slot_table.numel:
            return ()
        if self.device.type != CPU:
            return self._memory.digest_on_device()
        return tuple(self._memory.digest(part) for part in self._slots_in_bytes())

    def _slots_in_bytes(self) -> list[slice]:
        size = self.dtype.itemsize
        return [slice(slot.offset * size, (slot.offset + slot.numel) * size) for slot in self.slot_table.slots]

    def digests_of_each(self) -> list[int]:
        """Return the digest of each parameter in the flat buffer. On an accelerator, this waits for the device."""
        digests = self.digests()
        if isinstance(digests, torch.Tensor):
            slots = self.slot_table.slots
            each = [digest_on_device(self.flat[slot.offset : slot.offset + slot.numel]) for slot in slots]
            return [int(digest) for digest in torch.stack(each).tolist()]
        return list(digests)

    def note_values(self) -> None:
        """Keep the digests of the values that the flat buffer has now, so that `find_changed` can compare with them."""
        self._noted = self.digests()

    def find_changed(self) -> ModelParameter | None:
        """Return a parameter that the script has changed, or given other memory, since `note_values`; None if none.

        On an accelerator, a changed value is only noted on the device, so that this call does not wait for the device;
        see `take_doubt`.
        """
        if (displaced := next(self.displaced(), None)) is not None:
            return displaced[0]
        if not self._memory.is_allocated or self._noted is None:
            return None
        now, noted = self.digests(), self._noted
        if isinstance(now, torch.Tensor) or isinstance(noted, torch.Tensor):
            different = torch.as_tensor(now != noted)
            self._doubt = different if self._doubt is None else self._doubt | different
            return None
        copied = (each for each, *digests in zip(self.parameters, noted, now, strict=True) if len(set(digests)) > 1)
        mapped = (self.parameters[slot] for slot in self._memory.find_changed(self._slots_in_bytes()))
        return next(copied, None) or next(mapped, None)

    def take_doubt(self) -> bool:
        """Wait for the device, and return whether a `find_changed` since the last call has found a change on it."""
        doubt, self._doubt = self._doubt, None
        return doubt is not None and bool(doubt)

    def _on_released_access(
        self, parameter: ModelParameter, function: str
    ) -> AbstractContextManager[Callable[[Any], None]] | None:
        return self._gather_on_use(parameter, function)

    def _point_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Set each parameter's `.data` to its tensor in `tensors`. If the user has the parameters now, do nothing."""
        if not self._has_parameters:
            return
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            restore(parameter.tensor)
            parameter.tensor.data = tensor


def _refuse(parameter: ModelParameter, function: str) -> NoReturn:
    raise ReleasedParameterError(parameter.fqn, function)
