"""Units: the parameters that are gathered and released together.

This module owns each unit's state. It must never decide when to gather, because step/hooks.py does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.planes import LeasedBytes, check
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.errors import InPlaceChangeError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.gather import Gather, Reuse
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.unit_policy import UnitSpec


class UnitState(enum.Enum):
    """Where the parameters of a unit are, and how much memory they take on the device."""

    SHARDED = enum.auto()
    """The unit takes no memory on the device; its parameters are only in the store."""

    FETCHING = enum.auto()
    """As SHARDED, but read leases are requested or held, so the leased bytes stay in the store's host memory."""

    GATHERED = enum.auto()
    """The whole parameters are in the flat buffers, as copies or as mapped bytes of the store with read leases held."""

    MAPPED_IDLE = enum.auto()
    """The parameters are released, but the flat buffers keep their bytes, for the next use without a gather."""

    RESIDENT = enum.auto()
    """The whole parameters are in the flat buffers for good (stages 0 to 2), and are never gathered or released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCost:
    """The waited time and the moved bytes of one gather, which the report of the step adds up.

    Attributes:
        waited_seconds: time that this thread waited for the leases. The processor time of the thread during the wait is
            not counted.
        copied_bytes: number of leased bytes that were copied from host memory.
        device_bytes: number of leased bytes that were in device copies. Leased bytes in neither count are mapped.
    """

    waited_seconds: float = 0.0
    copied_bytes: int = 0
    device_bytes: int = 0


class Unit:
    """A unit and its flat groups. A gather is split into `start_gather` and `wait_gather`, both idempotent.

    Attributes:
        index: number of the unit in the list of units; the root is 0.
        fqn: name of the unit's module; "" is the root.
        module: the unit's module.
        uses: the modules whose forwards use the unit: `module`, and for a tile of a tied weight also the modules of its
            other uses.
        tile: the tile that the unit is; None if the unit is a module of the model.
        groups: the unit's flat groups.
        state: the present state of the unit.
        transient_host_bytes: how many bytes of the store's host memory are occupied only while leases on the unit's
            parameters are held; 0 if the home of the parameters is the store's host memory.
    """

    def __init__(
        self,
        *,
        index: int,
        spec: UnitSpec,
        groups: Iterable[FlatGroup],
        gather: Gather,
        slab_leases: SlabLeases,
        lanes: Lanes,
        residence: Residence,
        transient_host_bytes: int,
    ) -> None:
        self.index = index
        self.fqn = spec.fqn
        self.module = spec.module
        self.uses = (spec.module, *spec.other_uses)
        self.tile = spec.tile
        self.groups = tuple(groups)
        self.state = UnitState.SHARDED if residence is Residence.SHARDED else UnitState.RESIDENT
        self._gather = gather
        self._slab_leases = slab_leases
        self._lanes = lanes
        self.transient_host_bytes = transient_host_bytes
        self._pending: Pending[list[LeasedBytes]] | None = None
        # The unit's leases of bytes in the arena. Until a gather is finished, these are all leases of the gather.
        # Afterwards they are only the leases of mapped bytes, because copied bytes need no lease.
        self._leases: list[LeasedBytes] = []
        # Whether the last gather of this unit has copied any leased bytes into the flat buffers, instead of mapping
        # them.
        self._copied = False
        self._next_use: int | None = None
        # The number of `hold` calls of this unit whose `release_hold` has not come yet. While it is not 0, the unit is
        # not released.
        self._holders = 0
        # Whether the last `release_hold` has to release the unit, because the first `hold` has gathered it, or because
        # `release` was called while the unit was held.
        self._release_owed = False

    @property
    def is_root(self) -> bool:
        return self.index == 0

    @property
    def partition_bytes(self) -> int:
        """Bytes of this rank's partitions that live in the store, which has to fetch them for one gather."""
        return sum(group.partition_bytes for group in self.groups if group.partition is None)

    @property
    def leased_bytes(self) -> int:
        """Bytes that this rank leases for one gather: its own partitions, or all ranks' if gathers are one-sided."""
        return self._gather.leased_bytes(self.groups)

    @property
    def elements(self) -> int:
        """Number of elements of the unit's flat buffers, with padding."""
        return sum(group.slot_table.numel for group in self.groups)

    def slabs(self) -> list[SlabName]:
        """Return the slabs that a gather of the unit leases."""
        return self._gather.slabs(self.groups)

    def start_gather(self, position: int, reuse: Reuse | None = None) -> None:
        """Request leases on the parameters, if the unit is SHARDED. It does not wait.

        Args:
            position: the position of the use.
            reuse: when the same bytes are needed again; None: the store keeps no device copy of them.
        """
        if self.state is not UnitState.SHARDED:
            return
        with self._gathering():
            if self.groups:
                self._pending = self._gather.start(self.groups, position, reuse)
            self.state = UnitState.FETCHING

    @property
    def is_mapped(self) -> bool:
        """Whether parameters are mapped bytes of the store, on which the unit holds leases until it is released."""
        return self.state is not UnitState.FETCHING and bool(self._leases)

    @property
    def takes_no_memory(self) -> bool:
        """Whether the gathered unit needs no more memory than a released one.

        This is so if all its parameters are mapped, and their home is the store's host memory.
        """
        return self.is_mapped and not self._copied and not self.transient_host_bytes

    def wait_gather(self, next_use: int | None, *, may_map: bool = False) -> GatherCost:
        """Wait until the gathered parameters can be used, and return the cost of the gather.

        The call finishes the gather of `start_gather`. After `release_parameters` it uses the bytes that were kept.

        All ranks must call this, unless gathers are one-sided.

        Args:
            next_use: the position at which the unit is needed again. The store gets it with the release of the leases.
            may_map: allows to map the store's bytes, and to hold their leases until the unit is released, instead of
                copying the bytes.
        """
        with self._gathering():
            return self._wait_gather(next_use, may_map=may_map)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Enclose a part of a gather. If it fails, release the unit, so that the next gather begins from the start.

        See tests/integration/test_failures.py, where each call within a gather fails once.
        """
        try:
            yield
        except BaseException as error:
            leases, self._leases = self._leases, []
            # The unit frees its flat buffers before it releases the leases, because leased bytes may be mapped into
            # these buffers.
            self.release()
            # The unit's leases are released after the copies to the device that have begun, because these copies may
            # still read the leased bytes.
            self._lanes.after_copies_in(partial(self._slab_leases.release_quietly, leases))
            self._gather.abandon(self.groups, error)
            raise

    def _wait_gather(self, next_use: int | None, *, may_map: bool) -> GatherCost:
        if self.state is UnitState.MAPPED_IDLE:
            for group in self.groups:
                group.allocate()
            self._next_use = next_use
            self.state = UnitState.GATHERED
        if self.state in (UnitState.GATHERED, UnitState.RESIDENT):
            # The caller of `_wait_gather` releases the unit itself when it needs the unit no more. So the last
            # `release_hold` need not release the unit, unless `release` is called before it.
            self._release_owed = False
            return GatherCost()
        pending, self._pending = self._pending, None
        self._leases = self._wait_for(pending) if pending else []
        self._next_use = next_use
        mapped = self._gather.finish(self.groups, self._leases, may_map=may_map)
        self.note_values()
        kept = {leased.lease_id for leased in mapped}
        copied = [leased for leased in self._leases if leased.lease_id not in kept]
        if copied:
            self._lanes.after_copies_in(partial(self._release_leases, copied, next_use))
        self._leases = mapped
        self.state = UnitState.GATHERED
        self._copied = bool(copied)
        self._lanes.poll()
        waited = pending.waited_seconds if pending else 0.0
        on_device = sum(leased.data.nbytes for leased in copied if leased.on_device is not None)
        return GatherCost(
            waited_seconds=waited,
            copied_bytes=sum(leased.data.nbytes for leased in copied) - on_device,
            device_bytes=on_device,
        )

    def _wait_for(self, pending: Pending[list[LeasedBytes]]) -> list[LeasedBytes]:
        """Wait until the store has granted the leases that `start_gather` has requested, and return them."""
        if not pending.is_answered:
            # The store may have no room for this unit's bytes while this rank holds leases of other units whose bytes
            # are being copied to the device. So these copies are finished first, because that releases their leases.
            self._lanes.finish_copies_in()
        return pending.wait()

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    @property
    def is_held_once(self) -> bool:
        return self._holders == 1

    def hold(self) -> None:
        """Gather the parameters, and keep them gathered until `release_hold` was called as often as `hold`.

        All ranks must call this, unless gathers are one-sided. Mapped parameters are copied, because a user may hold
        more of them than fit into the store's host memory.
        """
        release_owed = self._release_owed if self.is_held else self.state is not UnitState.GATHERED
        try:
            self.start_gather(position=0)
            self.wait_gather(next_use=None)
            self.copy_mapped()
        except BaseException:
            if release_owed:
                self.release()
            raise
        self._release_owed = release_owed
        self._holders += 1

    def copy_mapped(self) -> None:
        """Copy parameters that are mapped bytes of the store, and release the leases on them."""
        if self.is_mapped:
            for group in self.groups:
                group.copy_mapped()
            self._release_all_leases()

    def release_hold(self) -> None:
        """End one `hold`. The end of the last one releases the unit, if it was to be released meanwhile."""
        self._holders -= 1
        if self._release_owed:
            self.release()

    def release_parameters(self) -> None:
        """Release the parameters, but keep their bytes for the next `wait_gather`; do nothing if the unit is held."""
        if self.state is UnitState.GATHERED and not self.is_held:
            for group in self.groups:
                group.release_parameters()
            self.state = UnitState.MAPPED_IDLE

    def release(self) -> None:
        """Free the memory and release all leases, also those of a gather that has failed or was not finished.

        The call does nothing if the unit is resident. If the unit is held, the last `release_hold` releases it.
        """
        if self.state is UnitState.RESIDENT:
            return
        if self.is_held:
            self._release_owed = True
            return
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.release_when_granted()
        elif self.state is not UnitState.SHARDED:
            for group in self.groups:
                group.free()
        self.state = UnitState.SHARDED
        self._release_all_leases()

    def unmap(self) -> None:
        """Unmap the store's bytes from the flat buffers, before the session ends.

        The leases on the bytes are not released, because the end of the session ends them.
        """
        self._pending = None
        if self.is_mapped:
            for group in self.groups:
                group.free()
            self._leases = []
            self.state = UnitState.SHARDED

    def take_back_parameters(self) -> None:
        """Give a resident unit's parameters their own memory again, with the values that the script has given them.

        The script may have assigned tensors to the parameters' `.data`, but the engine trains the unit's own memory.

        Raises:
            ConfigError: the script has given a parameter another shape, dtype or device.
        """
        if self.state is UnitState.RESIDENT:
            for group in self.groups:
                group.take_back()

    def require_unchanged(self) -> None:
        """Check that the script has not changed parameters in place since they were gathered, unless the unit is held.

        A resident unit has nothing to check, because its memory is never given up. On an accelerator a change is only
        noted, and `require_undoubted` raises the error later, so that this call does not wait for the device.

        Raises:
            InPlaceChangeError: the script has changed a parameter, and the change would be lost.
        """
        if not self.is_held and (changed := self.find_changed()) is not None:
            raise InPlaceChangeError(changed.fqn)

    def require_undoubted(self) -> None:
        """Raise InPlaceChangeError if `require_unchanged` has noted a change on an accelerator. Wait for the device."""
        doubtful = [group for group in self.groups if group.take_doubt()]
        if doubtful:
            raise InPlaceChangeError(f"{doubtful[0].parameters[0].fqn} (or another one of its unit)")

    def note_values(self) -> None:
        """Keep digests of the gathered values, with which `find_changed` compares, unless the unit is resident."""
        for group in self.groups if self.state is not UnitState.RESIDENT else ():
            group.note_values()

    def find_changed(self) -> ModelParameter | None:
        """Return a parameter that was changed in place since the gather, if the unit is gathered and not resident."""
        if self.state is not UnitState.GATHERED:
            return None
        return next((changed for group in self.groups if (changed := group.find_changed()) is not None), None)

    def check(self) -> None:
        """Raise SessionEndedError if the leases of mapped bytes have ended, because other bytes may be there now."""
        if self.is_mapped:
            check(self._leases)

    def _release_all_leases(self) -> None:
        leases, self._leases = self._leases, []
        self._release_leases(leases, self._next_use)

    def _release_leases(self, leases: list[LeasedBytes], next_use: int | None) -> None:
        """Release leases whose bytes this rank has used.

        Raises:
            SessionEndedError: the leases have ended before this call, so the bytes that this rank has used may have
                been overwritten meanwhile.
        """
        if leases:
            check(leases)
            self._slab_leases.release(leases, next_use)
