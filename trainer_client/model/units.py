"""Units: the parameters that are gathered and released together.

Owns each unit's state. Must never decide when to gather: that is the hooks' business.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.gather import Gather
from trainer_client.model.placement import Residence
from trainer_client.model.unit_policy import UnitSpec
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes, check
from trainer_client.transport.rank_store import RankStore, Slab


class UnitState(enum.Enum):
    SHARDED = enum.auto()
    """No memory on the device: the parameters are in the store only."""

    FETCHING = enum.auto()
    """As SHARDED, with read leases requested or held: this rank's chunks are pinned in the store's host tier."""

    GATHERED = enum.auto()
    """The whole parameters of the unit are in the flat buffers, or are shown there: then read leases are held."""

    SET_ASIDE = enum.auto()
    """As GATHERED and shown, with nobody who uses the parameters: they are released, and the leases stay."""

    RESIDENT = enum.auto()
    """As GATHERED, for good (stages 0 to 2): nothing is gathered and nothing released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCost:
    """What a gather took.

    Attributes:
        waited_seconds: for the store's grant of the leases, less what this thread computed meanwhile.
        copied_bytes: of those leased; the others are shown where they are.
    """

    waited_seconds: float = 0.0
    copied_bytes: int = 0


class Unit:
    """A unit and its flat groups; a gather is split into start and wait, both idempotent.

    Attributes:
        index: in the list of units; the root is 0.
        passing_bytes: what leases on all of its parameters take of the store's host memory; 0 where they live there.
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
        self.passing_bytes = 0
        self._pending: Pending[list[LeasedBytes]] | None = None
        # What the unit holds: all leases of a gather while it is being finished, then those whose bytes are shown.
        self._leases: list[LeasedBytes] = []
        self._copied = False  # whether any part of the gathered parameters is
        self._next_use: int | None = None
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
        with self._gathering():
            if self.groups:
                self._pending = self._gather.start(self.groups, position)
            self.state = UnitState.FETCHING

    @property
    def is_shown(self) -> bool:
        """Whether the parameters are the store's own bytes: leases are held as long as the unit is gathered."""
        return self.state is not UnitState.FETCHING and bool(self._leases)

    @property
    def takes_no_memory(self) -> bool:
        """Whether, being gathered, it needs no memory that it would not need otherwise: neither here nor in the store's
        host memory, where its parameters live."""
        return self.is_shown and not self._copied and not self.passing_bytes

    def wait_gather(self, next_use: int | None, *, may_show: bool = False) -> GatherCost:
        """Makes the parameters whole, after `start_gather`, or usable again, after `set_aside`. A collective, unless
        gathers are one-sided.

        Args:
            next_use: the position at which the unit is needed again, for the store's placement.
            may_show: leases may be held until the release, instead of copying their bytes.
        """
        with self._gathering():
            return self._wait_gather(next_use, may_show=may_show)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Surround a part of a gather. Whatever it fails with, the unit is released then and holds nothing, so that the
        next gather begins anew."""
        try:
            yield
        except BaseException as error:
            leases, self._leases = self._leases, []
            # The memory comes first: until it is given back, it may show the store's bytes.
            self.release()
            self._store.give_back(leases)
            self._gather.give_up(self.groups, error)
            raise

    def _wait_gather(self, next_use: int | None, *, may_show: bool) -> GatherCost:
        if self.state is UnitState.SET_ASIDE:
            for group in self.groups:
                group.allocate()
            self._next_use = next_use
            self.state = UnitState.GATHERED
        if self.state in (UnitState.GATHERED, UnitState.RESIDENT):
            return GatherCost()
        pending, self._pending = self._pending, None
        self._leases = pending.wait() if pending else []
        self._next_use = next_use
        shown = self._gather.finish(self.groups, self._leases, may_show=may_show)
        kept = {leased.lease_id for leased in shown}
        copied = [leased for leased in self._leases if leased.lease_id not in kept]
        self._return(copied)
        self._leases = shown
        self.state = UnitState.GATHERED
        self._copied = bool(copied)
        waited = pending.waited_seconds if pending else 0.0
        return GatherCost(waited_seconds=waited, copied_bytes=sum(leased.data.nbytes for leased in copied))

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    def hold(self) -> None:
        """Makes the parameters whole, and keeps them so until as many calls of `let_go`. As `wait_gather`.

        They are copied: what a user holds may be more than the store's host memory.
        """
        if not self.is_held:
            self._release_owed = self.state is not UnitState.GATHERED
        try:
            self.start_gather(position=0)
            self.wait_gather(next_use=None)
            self.own()
        except BaseException:
            if self._release_owed:
                self.release()
            raise
        self._holders += 1

    def own(self) -> None:
        """Copies the parameters if they are the store's own bytes, and returns the leases on them."""
        if self.is_shown:
            for group in self.groups:
                group.own()
            self._return_all()

    def let_go(self) -> None:
        self._holders -= 1
        if self._release_owed:
            self.release()

    def set_aside(self) -> None:
        """Releases the parameters and keeps what is gathered, for the next `wait_gather`; not where they are held."""
        if self.state is UnitState.GATHERED and not self.is_held:
            for group in self.groups:
                group.hide()
            self.state = UnitState.SET_ASIDE

    def release(self) -> None:
        """Gives the memory and all leases back, unless the unit is resident or held: also those of a gather that has
        failed half-way, or that nobody waited for."""
        if self.state is UnitState.RESIDENT:
            return
        if self.is_held:
            self._release_owed = True
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.forgo()
        elif self.state is not UnitState.SHARDED:
            for group in self.groups:
                group.free()
        self.state = UnitState.SHARDED
        self._return_all()

    def abandon(self) -> None:
        """Lets go of shared memory without a word to the store, whose session is about to end with all its leases."""
        self._pending = None
        if self.is_shown:
            for group in self.groups:
                group.free()
            self._leases = []
            self.state = UnitState.SHARDED

    def check(self) -> None:
        """Raises SessionEndedError if what is shown may be somebody else's bytes."""
        if self.is_shown:
            check(self._leases)

    def _return_all(self) -> None:
        leases, self._leases = self._leases, []
        self._return(leases)

    def _return(self, leases: list[LeasedBytes]) -> None:
        """Returns leases whose bytes were used. Raises SessionEndedError if they may have been somebody else's."""
        if leases:
            check(leases)
            self._store.release(leases, self._next_use)
