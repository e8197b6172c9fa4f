"""Units: the parameters that are gathered and released together.

Owns each unit's state. Must never decide when to gather: that is the hooks' business.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable

from trainer_client.link.channel import Pending
from trainer_client.link.planes import LeasedBytes
from trainer_client.link.rank_store import RankStore, Slab
from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.gather import Gather
from trainer_client.model.placement import Residence
from trainer_client.model.unit_policy import UnitSpec


class UnitState(enum.Enum):
    SHARDED = enum.auto()
    """No memory on the device: the parameters are in the store only."""

    FETCHING = enum.auto()
    """As SHARDED, with read leases requested or held: this rank's chunks are pinned in the store's host tier."""

    GATHERED = enum.auto()
    """The whole parameters of the unit are in the flat buffers; no lease is held."""

    RESIDENT = enum.auto()
    """As GATHERED, for good (stages 0 to 2): nothing is gathered and nothing released."""


class Unit:
    """A unit and its flat groups; a gather is split into start and wait, both idempotent.

    Attributes:
        index: in the list of units; the root is 0.
    """

    def __init__(
        self,
        *,
        index: int,
        spec: UnitSpec,
        groups: Iterable[FlatGroup],
        gather: Gather,
        store: RankStore,
        residence: Residence,
    ) -> None:
        self.index = index
        self.fqn = spec.fqn
        self.module = spec.module
        self.groups = tuple(groups)
        self.state = UnitState.SHARDED if residence is Residence.SHARDED else UnitState.RESIDENT
        self._gather = gather
        self._store = store
        self._pending: Pending[list[LeasedBytes]] | None = None
        self._holders = 0
        self._release_owed = False  # once nobody holds it any more

    @property
    def is_root(self) -> bool:
        return self.index == 0

    @property
    def chunk_bytes(self) -> int:
        """Bytes that this rank fetches from the store for one gather."""
        return sum(group.chunk_bytes for group in self.groups if group.chunk is None)

    @property
    def leased_bytes(self) -> int:
        """Bytes that this rank leases for one gather: its own chunks, or every rank's where gathers are one-sided."""
        return self._gather.leased_bytes(self.groups)

    @property
    def elements(self) -> int:
        """Elements that are gathered, padding included."""
        return sum(group.layout.numel for group in self.groups)

    def slabs(self) -> list[Slab]:
        """What a gather of the unit leases."""
        return self._gather.slabs(self.groups)

    def start_gather(self, position: int) -> None:
        """Asks for the bytes. Does not wait."""
        if self.state is not UnitState.SHARDED:
            return
        if self.groups:
            self._pending = self._gather.start(self.groups, position)
        self.state = UnitState.FETCHING

    def wait_gather(self, next_use: int | None) -> float:
        """Makes the parameters whole, after `start_gather`. A collective, unless gathers are one-sided.

        Args:
            next_use: the position at which the unit is needed again, for the store's placement.

        Returns:
            Seconds that the store's grant of the leases was waited for.
        """
        if self.state in (UnitState.GATHERED, UnitState.RESIDENT):
            return 0.0
        began = time.perf_counter()
        leases = self._take_leases()
        waited = time.perf_counter() - began
        self._gather.finish(self.groups, leases)
        if leases:
            self._store.check_leases()
            self._store.release(leases, next_use)
        self.state = UnitState.GATHERED
        return waited

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    def hold(self) -> None:
        """Makes the parameters whole, and keeps them so until as many calls of `let_go`. As `wait_gather`."""
        if not self.is_held:
            self._release_owed = self.state is not UnitState.GATHERED
        self.start_gather(position=0)
        self.wait_gather(next_use=None)
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        if self._release_owed:
            self.release()

    def release(self) -> None:
        """Gives the memory back, unless it is resident or held, or the leases of a gather that nobody waited for."""
        if self.state is UnitState.RESIDENT:
            return
        if self.is_held:
            self._release_owed = True
            return
        if self.state is UnitState.GATHERED:
            for group in self.groups:
                group.free()
        elif leases := self._take_leases():
            self._store.release(leases)
        self.state = UnitState.SHARDED

    def _take_leases(self) -> list[LeasedBytes]:
        pending, self._pending = self._pending, None
        return pending.wait() if pending else []
