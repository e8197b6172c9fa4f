"""This rank's partition of each kind of state of a flat group, in the store or on the device.

Initial values, access between two steps and a resume in another layout read and write partitions here. A training step
uses only the partitions that live on the device. This module owns these tensors, and the knowledge which of them are
newer than the store's version.

[Note: values that are copied later] The states that live on an accelerator are copied into the store's memory while the
next step computes. This is safe, because nothing reads them in the store before they are committed, and because the
trainer waits for the commit before its next update or another change of the states. At stages 0 to 2, the script may
change parameters at any moment. So the store gets them from a second copy on the device, which is freed when it was
read. If the device has no room for the second copy, these parameters are handed over at once. Parameters whose home is
the store are also handed over at once, because the next forward reads them in the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from paramserver.contract.kinds import MASTER, PARAM, Kind
from trainer_client.base.device import CPU
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.journal import Value
from trainer_client.client.transport.later_commit import LaterValues
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.home import Home
from trainer_client.training.model.flat_group import Digests, FlatGroup
from trainer_client.training.model.placement import GroupPlacement, Residence
from trainer_client.training.ranks.collectives import Collectives


class PlacedGroup(Protocol):
    """The interface of a flat group that has a placement, for functions that need no values of its states.

    It is PlacedStates, or a group of the plan of run/device_budget.py.
    """

    @property
    def group(self) -> FlatGroup: ...

    @property
    def placement(self) -> GroupPlacement: ...


class GroupStates(Protocol):
    """The interface by which other modules read and hand over a flat group's states, of the kinds `group.kinds`."""

    @property
    def group(self) -> FlatGroup: ...

    def read(self, kind: Kind) -> torch.Tensor:
        """Return the newest values of a kind in this rank's partition, as a copy on the CPU.

        The result is [partition_numel], of dtype `group.dtype_of(kind)`.

        If this rank always has the whole parameters, the values include what the script has changed in them in place.
        """

    def hand_over(
        self,
        values: Mapping[Kind, torch.Tensor],
        step: int,
        again: Callable[[], Mapping[Kind, torch.Tensor]] | None = None,
    ) -> None:
        """Hand `values` [partition_numel] of some kinds over for the uncommitted `step`, converted to their dtypes.

        A state that was never handed over or updated is zero. Every rank has to call `refill` afterwards. For `again`
        see `StepCalls.put`.
        """

    def refill(self) -> None:
        """After `hand_over`, gather the other ranks' new partitions into the whole tensors that this rank keeps.

        At stage 3 a rank keeps no whole tensors, so nothing is gathered. All ranks must call this.
        """


class PlacedStates:
    """The states of a flat group; each kind lives in the store or on the device, as `placement` says.

    Attributes:
        group: the flat group.
        placement: the homes of the group's kinds.
        held: the tensors of the kinds that live on the device, each [slot_table.numel] if states are replicated, else
            [partition_numel].
    """

    def __init__(self, group: FlatGroup, placement: GroupPlacement, store: RankStore, collectives: Collectives) -> None:
        self.group = group
        self.placement = placement
        self.held: dict[Kind, torch.Tensor] = {}
        self._store = store
        self._collectives = collectives
        # This rank's part of the values that are newer than the store's version of them, by kind, [partition_numel]
        # each. `flush` hands them over to the store.
        self._newer: dict[Kind, torch.Tensor] = {}
        self._loading: Pending[list[LeasedBytes]] | None = None
        # The digests of the parameters at the last `note_parameters`, with which a later check finds changes by the
        # script. None if the engine has changed the parameters since, or if this rank does not always have the whole
        # parameters.
        self._noted: Digests | None = None
        replicated = placement.residence is Residence.REPLICATED
        self._own = slice(group.start, group.stop) if replicated else slice(None)
        if placement.parameters is Home.DEVICE:
            group.keep(placement.residence)
            assert group.partition is not None
            self.held[PARAM] = group.flat if replicated else group.partition
        if placement.optimizer is Home.DEVICE:
            numel = group.slot_table.numel if replicated else group.slot_table.partition_numel
            for kind in group.kinds[1:]:
                self.held[kind] = torch.zeros(numel, dtype=group.dtype_of(kind), device=group.device)

    @property
    def is_in_store(self) -> bool:
        """Whether an update of this group changes bytes in the store, so that every step has to be committed."""
        return is_in_store(self)

    @property
    def gives_gradients(self) -> bool:
        """Whether this rank hands gradients of the group over to the store, or parks them there, before the step."""
        on_device = self.placement.gradients is Home.DEVICE and self.placement.optimizer is Home.DEVICE
        return self.group.trainable and not on_device

    @property
    def given_gradient_bytes(self) -> int:
        """Bytes of the group's gradient that this rank gives the store in a step; 0 if it gives the store none."""
        group = self.group
        return group.slot_table.partition_numel * group.gradient_dtype.itemsize if self.gives_gradients else 0

    @property
    def is_always_there(self) -> bool:
        """Whether a rank always has the whole parameters, so that the script can change them at any moment."""
        return self.placement.residence is not Residence.SHARDED

    @torch.no_grad()
    def read(self, kind: Kind) -> torch.Tensor:
        self.group.take_back()
        values = self.held[kind][self._own].to("cpu", copy=True) if kind in self.held else self._read_stored(kind)
        if kind == MASTER and PARAM in self.held and self.is_always_there:
            return _with_changes(values, self.held[PARAM][self._own].to("cpu"))
        return values

    def note_parameters(self) -> None:
        """Keep digests of the parameters, with which `find_changes` compares. Idempotent until the engine changes them.

        Without effect if this rank does not always have the whole parameters.
        """
        if self.is_always_there and self._noted is None:
            self._noted = self.group.digests()

    def find_changes(self) -> list[bool] | torch.Tensor:
        """Return for each parameter whether the script has changed it since `note_parameters`.

        On an accelerator there is one answer for all parameters of the group, a 0-D tensor on the device, so that the
        call does not wait for the device. It can raise ConfigError, see `FlatGroup.take_back`.
        """
        if self._noted is None:
            return []
        self.group.take_back()
        now = self.group.digests()
        if isinstance(now, torch.Tensor) or isinstance(self._noted, torch.Tensor):
            return torch.as_tensor(now != self._noted)
        return [before != after for before, after in zip(self._noted, now, strict=True)]

    @torch.no_grad()
    def adopt(self, step: int) -> None:
        """Take over the values that the script has given parameters in place. Every rank has to `refill` afterwards.

        The values become a part of the uncommitted `step`: at once if the store updates the group, else when `flush`
        hands the step over. An element of the fp32 master weight is set to the parameter's element only if the
        parameter's element is not the rounded master weight.
        """
        if self.is_in_store:
            self.hand_over({kind: self.read(kind) for kind in self.group.weight_kinds}, step)
            return
        self._noted = None
        if (master := self.held.get(MASTER)) is not None:
            master.copy_(_with_changes(master, self.held[PARAM]))
            self._newer[MASTER] = master[self._own]
        self._newer[PARAM] = self.held[PARAM][self._own]

    @torch.no_grad()
    def hand_over(
        self,
        values: Mapping[Kind, torch.Tensor],
        step: int,
        again: Callable[[], Mapping[Kind, torch.Tensor]] | None = None,
    ) -> None:
        if PARAM in values:
            self._noted = None
        for kind in self.held.keys() & values.keys():
            self.held[kind][self._own].copy_(values[kind])
            self._newer.pop(kind, None)
        self._store.steps.put(self._named(values), step, None if again is None else lambda: self._named(again()))

    def refill(self) -> None:
        residence = self.placement.residence
        if residence is Residence.RESIDENT and self.group.partition is not None:
            self._collectives.all_gather_flat(self.group.flat, self.group.partition)
        elif residence is Residence.REPLICATED:
            for tensor in self.held.values():
                self._collectives.all_gather_flat(tensor, tensor[self._own])

    @torch.no_grad()
    def load(self) -> None:
        """Fill the kinds that live on the device from the store's newest step. Every rank then has to `refill`."""
        for kind, tensor in self.held.items():
            tensor[self._own].copy_(self._read_stored(kind))

    def start_load_parameters(self) -> None:
        """Request the updated parameters, if they live on the device and the store updates them. It does not wait.

        A repeated call has no effect until `load_parameters` or `release_parameter_leases`.
        """
        if self.group.partition is not None and self.placement.optimizer is not Home.DEVICE and self._loading is None:
            self._loading = self._store.leases.acquire_read([self.group.slab(PARAM)], position=0)

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Copy the parameters that `start_load_parameters` has requested. Every rank has to `refill` afterwards."""
        pending, self._loading = self._loading, None
        if pending is not None and self.group.partition is not None:
            self._noted = None
            with self._store.leases.holding(pending) as (leased,):
                target = self.group.partition.view(torch.uint8)
                for piece in leased.pieces():
                    target[piece].copy_(leased.data[piece])

    def release_parameter_leases(self) -> None:
        """Release the leases of `start_load_parameters`, if `load_parameters` has not used them. Idempotent."""
        pending, self._loading = self._loading, None
        if pending is not None:
            pending.release_when_granted()

    def note_update(self, parameters: torch.Tensor | None = None) -> None:
        """Note that an update on the device has changed the kinds that live there, so `flush` has to hand them over.

        Args:
            parameters: [partition_numel], the updated parameters if their home is the store, else None.
        """
        self._noted = None
        self._newer = {kind: tensor[self._own] for kind, tensor in self.held.items()}
        if parameters is not None:
            self._newer[PARAM] = parameters

    @torch.no_grad()
    def flush(self, step: int) -> LaterValues | None:
        """Hand over, as versions of `step`, the values on the device that are newer than the store's.

        Return the values that are not handed over yet. The caller may hand them over while the next step computes; see
        [Note: values that are copied later].
        """
        newer, self._newer = self._newer, {}
        later = {kind: values for kind, values in newer.items() if kind in self.held and values.device.type != CPU}
        unchanging = dict(later)
        if PARAM in later and self.placement.residence is not Residence.SHARDED:
            try:
                unchanging[PARAM] = self._copy_on_device(later[PARAM])
            except torch.OutOfMemoryError:
                del later[PARAM], unchanging[PARAM]
        if at_once := {kind: values for kind, values in newer.items() if kind not in later}:
            self._store.steps.put(self._named(at_once), step)
        return LaterValues(values=self._named(unchanging), kept=self._named(later)) if later else None

    def _copy_on_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def _read_stored(self, kind: Kind) -> torch.Tensor:
        with self._store.leases.holding(self._store.leases.acquire_read([self.group.slab(kind)], position=0)) as (
            leased,
        ):
            values: torch.Tensor = leased.data.view(self.group.dtype_of(kind)).clone()
        return values

    def _named(self, values: Mapping[Kind, torch.Tensor]) -> Sequence[Value]:
        dtype_of, slab = self.group.dtype_of, self.group.slab
        return [Value(slab=slab(kind), dtype=dtype_of(kind), values=partition) for kind, partition in values.items()]


def _with_changes(master: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weights [n]; where a parameter is not the rounded weight, return the parameter's value."""
    bits = {2: torch.int16, 4: torch.int32}[parameters.itemsize]
    is_same = master.to(parameters.dtype).view(bits) == parameters.view(bits)
    return torch.where(is_same, master, parameters.float())


def is_in_store(placed: PlacedGroup) -> bool:
    """Return whether an update of the group changes bytes in the store, so that every step has to be committed."""
    on_device = placed.placement.parameters is Home.DEVICE and placed.placement.optimizer is Home.DEVICE
    return placed.group.trainable and not on_device


def placement_bytes(states: Iterable[PlacedGroup]) -> dict[str, dict[str, int]]:
    """Return for "parameters", "gradients" and "optimizer" how many bytes of this rank live in each home."""
    totals: dict[str, Counter[str]] = {"parameters": Counter(), "gradients": Counter(), "optimizer": Counter()}
    for state in states:
        group, placement = state.group, state.placement
        partition, whole = group.slot_table.partition_numel, group.slot_table.numel
        resident = placement.residence is not Residence.SHARDED
        replicated = placement.residence is Residence.REPLICATED
        totals["parameters"][placement.parameters.value] += (whole if resident else partition) * group.dtype.itemsize
        if group.trainable:
            kept = sum(group.dtype_of(kind).itemsize for kind in group.kinds[1:])
            totals["gradients"][placement.gradients.value] += partition * group.gradient_dtype.itemsize
            totals["optimizer"][placement.optimizer.value] += (whole if replicated else partition) * kept
    return {kind: dict(counter) for kind, counter in totals.items()}
