"""This rank's chunk of every kind of a flat group, wherever it lives: what everything but a training step reads and
writes (initial values, access between steps, another partition on resume), and what a step updates on the device.

Owns the tensors of the kinds that live on the device, and which of them the store does not have yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from paramserver.contract.kinds import PARAM, Kind
from trainer_client.config.home import Home
from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.placement import GroupPlacement, Residence
from trainer_client.ranks.collectives import Collectives
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore, Value


class GroupStates(Protocol):
    """The contract, for the kinds `group.kinds`."""

    @property
    def group(self) -> FlatGroup: ...

    def read(self, kind: Kind) -> torch.Tensor:
        """The newest values [layout.chunk] of `group.dtype_of(kind)`, a copy on the CPU."""

    def stage(self, values: Mapping[Kind, torch.Tensor], step: int) -> None:
        """Makes `values` [layout.chunk] the version of the uncommitted `step` of their kinds, converting the dtype.

        A state that was never staged or updated is zero. To be followed by `refill`, on every rank.
        """

    def refill(self) -> None:
        """Makes what a rank keeps of other ranks' chunks equal to them again, after `stage`. A collective."""


class PlacedStates:
    """Of a group whose kinds live in the store, on the device, or some here and some there.

    Attributes:
        held: the kinds that live on the device: [layout.numel] each where states are replicated, else [layout.chunk].
    """

    def __init__(self, group: FlatGroup, placement: GroupPlacement, store: RankStore, collectives: Collectives) -> None:
        self.group = group
        self.placement = placement
        self.held: dict[Kind, torch.Tensor] = {}
        self._store = store
        self._collectives = collectives
        self._newer: dict[Kind, torch.Tensor] = {}  # than the store's: [layout.chunk] each
        self._loading: Pending[list[LeasedBytes]] | None = None
        replicated = placement.residence is Residence.REPLICATED
        self._own = slice(group.start, group.stop) if replicated else slice(None)
        if placement.parameters is Home.DEVICE:
            group.keep(placement.residence)
            assert group.chunk is not None
            self.held[PARAM] = group.flat if replicated else group.chunk
        if placement.optimizer is Home.DEVICE:
            numel = group.layout.numel if replicated else group.layout.chunk
            for kind in group.kinds[1:]:
                self.held[kind] = torch.zeros(numel, dtype=group.dtype_of(kind), device=group.device)

    @property
    def is_in_store(self) -> bool:
        """Whether an update of the group changes something in the store, which every step has to commit then."""
        on_device = self.placement.parameters is Home.DEVICE and self.placement.optimizer is Home.DEVICE
        return self.group.trainable and not on_device

    def read(self, kind: Kind) -> torch.Tensor:
        if kind in self.held:
            return self.held[kind][self._own].to("cpu", copy=True)
        return self._read_stored(kind)

    @torch.no_grad()
    def stage(self, values: Mapping[Kind, torch.Tensor], step: int) -> None:
        for kind in self.held.keys() & values.keys():
            self.held[kind][self._own].copy_(values[kind])
            self._newer.pop(kind, None)
        self._write(values, step)

    def refill(self) -> None:
        residence = self.placement.residence
        if residence is Residence.RESIDENT and self.group.chunk is not None:
            self._collectives.all_gather_flat(self.group.flat, self.group.chunk)
        elif residence is Residence.REPLICATED:
            for tensor in self.held.values():
                self._collectives.all_gather_flat(tensor, tensor[self._own])

    @torch.no_grad()
    def load(self) -> None:
        """Takes what lives on the device from the store's newest step. To be followed by `refill`, on every rank."""
        for kind, tensor in self.held.items():
            tensor[self._own].copy_(self._read_stored(kind))

    def start_load_parameters(self) -> None:
        """Asks for parameters that live on the device and that the store has updated, if these are such. Does not wait;
        idempotent."""
        if self.group.chunk is not None and self.placement.optimizer is not Home.DEVICE and self._loading is None:
            self._loading = self._store.acquire_read([self.group.slab(PARAM)], position=0)

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Takes what `start_load_parameters` has asked for. To be followed by `refill`, on every rank."""
        pending, self._loading = self._loading, None
        if pending is not None and self.group.chunk is not None:
            with self._store.holding(pending) as (leased,):
                self.group.chunk.copy_(leased.data.view(self.group.dtype))

    def forgo_parameters(self) -> None:
        """Give back what `start_load_parameters` has asked for, where it is not taken any more. Idempotent."""
        pending, self._loading = self._loading, None
        if pending is not None:
            pending.forgo()

    def note_update(self, parameters: torch.Tensor | None = None) -> None:
        """What lives on the device was updated, and so were the `parameters` [layout.chunk] that live in the store."""
        self._newer = {kind: tensor[self._own] for kind, tensor in self.held.items()}
        if parameters is not None:
            self._newer[PARAM] = parameters

    def flush(self, step: int) -> None:
        """Stages what is newer than what the store has."""
        newer, self._newer = self._newer, {}
        if newer:
            self._write(newer, step)

    def _read_stored(self, kind: Kind) -> torch.Tensor:
        with self._store.holding(self._store.acquire_read([self.group.slab(kind)], position=0)) as (leased,):
            values: torch.Tensor = leased.data.view(self.group.dtype_of(kind)).clone()
        return values

    def _write(self, values: Mapping[Kind, torch.Tensor], step: int) -> None:
        dtype_of, slab = self.group.dtype_of, self.group.slab
        self._store.put(
            [Value(slab=slab(kind), dtype=dtype_of(kind), values=chunk) for kind, chunk in values.items()], step
        )


def placement_bytes(states: Iterable[PlacedStates]) -> dict[str, dict[str, int]]:
    """For each kind of state, this rank's bytes by their home."""
    totals: dict[str, Counter[str]] = {"parameters": Counter(), "gradients": Counter(), "optimizer": Counter()}
    for state in states:
        group, placement = state.group, state.placement
        chunk, whole = group.layout.chunk, group.layout.numel
        resident = placement.residence is not Residence.SHARDED
        replicated = placement.residence is Residence.REPLICATED
        totals["parameters"][placement.parameters.value] += (whole if resident else chunk) * group.dtype.itemsize
        if group.trainable:
            kept = sum(group.dtype_of(kind).itemsize for kind in group.kinds[1:])
            totals["gradients"][placement.gradients.value] += chunk * group.gradient_dtype.itemsize
            totals["optimizer"][placement.optimizer.value] += (whole if replicated else chunk) * kept
    return {kind: dict(counter) for kind, counter in totals.items()}
