"""This rank's chunk of every kind of a flat group, wherever it lives: what everything but a training step reads and
writes (initial values, access between steps, another partition on resume).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.flat_group import FlatGroup
from trainer_client.link.rank_store import RankStore


class GroupStates(Protocol):
    """The contract, for the kinds `group.kinds`."""

    @property
    def group(self) -> FlatGroup: ...

    def read(self, kind: pb.Kind) -> torch.Tensor:
        """The newest values [layout.chunk] of `group.dtype_of(kind)`, a copy on the CPU."""

    def stage(self, values: Mapping[pb.Kind, torch.Tensor], step: int) -> None:
        """Makes `values` [layout.chunk] the version of the uncommitted `step` of their kinds, converting the dtype.

        A state that was never staged or updated is zero.
        """


class StoredStates:
    """Of a group whose states are all in the store."""

    def __init__(self, group: FlatGroup, store: RankStore) -> None:
        self.group = group
        self._store = store

    def read(self, kind: pb.Kind) -> torch.Tensor:
        leases = self._store.acquire_read([self.group.slab(kind)], position=0).wait()
        values = leases[0].data.view(self.group.dtype_of(kind)).clone()
        self._store.check_leases()
        self._store.release(leases)
        return values

    @torch.no_grad()
    def stage(self, values: Mapping[pb.Kind, torch.Tensor], step: int) -> None:
        leases = self._store.acquire_write([self.group.slab(kind) for kind in values], step).wait()
        for (kind, chunk), leased in zip(values.items(), leases, strict=True):
            leased.data.view(self.group.dtype_of(kind)).copy_(chunk)
        self._store.publish(leases)
