"""Which units are gathered, and for whom: a unit stays gathered as long as it has a holder.

This module owns the holds, the look-ahead (leases for the next unit, the store's prefetch window) and the limit on
units that stay gathered without a holder. It must never decide who needs a unit: the hooks do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from statistics import median

from paramserver.contract.limits import UNITS_MAPPED_AT_ONCE
from trainer_client.base.recorder import Recorder, Stopwatch
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.training.model.gather import Reuse
from trainer_client.training.model.units import Unit, UnitState
from trainer_client.training.step.gather_counters import HIT_SECONDS, GatherCounters, UnitGathers
from trainer_client.training.step.trace import Trace
from trainer_client.training.step.window import Window

# A wait for leases counts as a stall only if it is longer than this. The store takes some milliseconds to grant leases
# on a busy processor. In a longer wait, the store has waited for its NVMe device.
STALL_SECONDS = 0.005


class Part(enum.Enum):
    """The part of a step for which a unit is held: a holder's forward or backward."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()


@dataclass(frozen=True, slots=True)
class UnitHolder:
    """The holder of a gathered unit: the unit itself, or another unit that uses its parameters.

    Attributes:
        user: index of the unit that holds.
        part: the part of the step in which the holder needs the gathered unit.
    """

    user: int
    part: Part


class Residency:
    """The residency of all units of one engine: gathers units for their holders, and releases them afterwards.

    The hooks say which unit needs which; see UnitHolder.

    Args:
        prefetch_bytes: how much of this rank's shards the store shall hold ready ahead of their use.
        kept_elements: a unit without a holder stays gathered for its next use while at most so many elements are
            gathered, those of held units included. None: no unit stays without a holder.
        is_alone: whether no other rank uses the store. If others do, units that only pass through the store's host
            memory are copied instead of mapped: ranks that hold leases on different units while they compute could wait
            for each other's room.
        recorder: records how long gathers take, and which unit's code runs between them.
        stopwatch: begins to measure the computation between two uses of units.

    Attributes:
        counters: the cost of gathers since the last step, for the step report.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        leases: SlabLeases,
        *,
        prefetch_bytes: int,
        kept_elements: int | None,
        is_alone: bool,
        recorder: Recorder,
        stopwatch: Callable[[], Stopwatch],
    ) -> None:
        self._units = units
        self._leases = leases
        self._recorder = recorder
        self._prefetch_bytes = prefetch_bytes
        self._kept_elements = kept_elements
        self._is_alone = is_alone
        self._holders: list[set[UnitHolder]] = [set() for _ in units]
        self._held_by: dict[UnitHolder, set[int]] = {}
        self.counters = GatherCounters([unit.fqn for unit in units])
        # The units whose parameters lie directly in leased memory of the store at the moment (mapped), while the store
        # has these bytes in host memory only for a time. Their number is limited, so that the store has room for the
        # leases of other units.
        self._transient: list[Unit] = []
        # The unit whose leases were requested before its use; None if no unit's leases were.
        self._ahead: Unit | None = None
        # The units whose next use this rank has announced to the store, and that this rank has not used since then.
        self._announced: set[int] = set()
        self._was_gathered: set[int] = set()
        self._window = Window()
        self._stopwatch = stopwatch
        # The stopwatch that measures the compute time since the last unit was gathered. None if the trainer has done
        # other work since then, because the time would not be compute time only.
        self._computing: Stopwatch | None = None
        sizes = [unit.partition_bytes for unit in units if unit.partition_bytes]
        self._usual_bytes = int(median(sizes)) if sizes else 0
        self._leased_units = len(sizes)
        self._has_transient = any(unit.transient_host_bytes and unit.partition_bytes for unit in units)

    def hold(self, unit: Unit, holder: UnitHolder, trace: Trace) -> None:
        """Gather the unit and keep it until `holder` ends its hold.

        All ranks must call this, unless gathers are one-sided.

        If the unit has no holder yet, the call counts as a use of the unit: `trace` records the use, and this rank
        asks for the leases of the unit that is used next.
        """
        if self._holders[unit.index] and unit.state in (UnitState.GATHERED, UnitState.RESIDENT):
            self.share(unit, holder)
            self._computing = self._computing or self._stopwatch()
            return
        if self._computing is not None:
            self._computing.stop(partial(self._note_compute, self._recorder.phase))
        predicted = self._is_predicted(unit, trace)
        position = trace.use(unit.index)
        self._make_room(unit, trace)
        with self._recorder.gathering(unit.fqn):
            self._gather(unit, position, trace, predicted=predicted)
        self.share(unit, holder)
        following = next(trace.upcoming(), None)
        if following is not None:
            # The leases of the next unit are requested now, so that its bytes are in host memory when it is used. The
            # uses in `upcoming` end with the step, because a lease beyond the update would be on the versions before
            # the update.
            self._start_ahead(self._units[following[0]], following[1], trace)
        self.prefetch(trace)
        self._computing = self._stopwatch()

    def check(self) -> None:
        """Check that the parameters of gathered units were right so far. Call this before their results are used.

        Raises:
            SessionEndedError: the store has given this session up, so the memory that was mapped may have held other
                bytes than the parameters.
        """
        self._leases.check()
        for unit in self._units:
            unit.check()

    def require_unchanged(self) -> None:
        """Check that the script has not changed the parameters of gathered units in place.

        Raises:
            InPlaceChangeError: the script has changed them, and the change would be lost.
        """
        for unit in self._units:
            unit.require_unchanged()

    def share(self, unit: Unit, holder: UnitHolder) -> None:
        """Keep a unit that is gathered already until `holder` ends its hold, too. This is no new use of the unit."""
        self._holders[unit.index].add(holder)
        self._held_by.setdefault(holder, set()).add(unit.index)

    def release(self, holder: UnitHolder, trace: Trace) -> None:
        """End the holds of `holder`, and release the units that no other holder needs.

        It can raise InPlaceChangeError, see `require_unchanged`.

        A unit whose forward is over stays if it is used again at once, because the last unit of the forward is the
        first one of the backward.
        """
        stays = holder.user if holder.part is Part.FORWARD and trace.next_unit() == holder.user else None
        for index in self._held_by.pop(holder, ()):
            self._holders[index].discard(holder)
            if not self._holders[index]:
                self._units[index].require_unchanged()
            if index != stays:
                self._release_if_idle(self._units[index], trace)

    def release_all(self, *, keep: bool = False) -> None:
        """End all holds, and release all units, also those whose gather was only begun.

        With `keep`, units stay gathered for their next use as far as the limit `kept_elements` allows.
        """
        self._held_by.clear()
        for holders in self._holders:
            holders.clear()
        with ExitStack() as every:  # If the release of one unit raises, the other units are released nevertheless.
            for unit in self._units:
                if keep and unit.state is UnitState.GATHERED:
                    every.callback(self._release_if_idle, unit, None)
                else:
                    every.callback(unit.release)

    def holds(self) -> frozenset[tuple[UnitHolder, int]]:
        """Return the present (holder, index of the held unit) pairs, for `go_back_to`."""
        return frozenset((holder, index) for holder, indices in self._held_by.items() for index in indices)

    def go_back_to(self, holds: Set[tuple[UnitHolder, int]]) -> None:
        """End all holds that are not in `holds`, after a failure.

        Then release the units that have no holder any more, and also leases that were requested ahead for a unit which
        was not used yet.
        """
        for holder, index in self.holds() - holds:
            self._held_by[holder].discard(index)
            self._holders[index].discard(holder)
        self._held_by = {holder: indices for holder, indices in self._held_by.items() if indices}
        with ExitStack() as every:
            for unit in self._units:
                if not self._holders[unit.index]:
                    every.callback(unit.release)

    def prefetch(self, *traces: Trace) -> None:
        """Announce to the store which units are used next in the traces, unless this rank has done so already."""
        if not self._has_transient and len(self._was_gathered) == self._leased_units:
            return  # All leased units are in the store's host memory for good, so there is nothing to announce.
        self._window.note_fetches(*self._leases.fetched)
        ahead = self._window.resize(self._usual_bytes)
        wants: list[tuple[Unit, int]] = []
        budget = self._prefetch_bytes
        # This rank announces twice as many units as the store should fetch ahead, so that one message serves for
        # several uses.
        for unit, position in islice(self._to_announce(traces), 2 * ahead):
            budget -= unit.partition_bytes
            if budget < 0:
                break
            wants.append((unit, position))
        if any(unit.index not in self._announced for unit, _ in wants[:ahead]):
            self._announced = {unit.index for unit, _ in wants}
            self._leases.prefetch((slab, position) for unit, position in wants for slab in unit.slabs())

    def pause(self) -> None:
        """Do not count the time from now to the next use as a unit's compute time, because other code runs."""
        if self._computing is not None:
            # The stopwatch has measured only a part of the time between two uses of units, so that part is recorded as
            # compute time but not noted in the prefetch window.
            self._computing.stop(partial(self._recorder.computed, self._recorder.phase))
            self._computing = None

    def _note_compute(self, phase: str, began: float, ended: float) -> None:
        self._window.note_compute(ended - began)
        self._recorder.computed(phase, began, ended)

    def _is_predicted(self, unit: Unit, trace: Trace) -> bool:
        """Return whether this rank has announced this use of the unit to the store, or had no need to.

        A unit that is expected and lives in the store's host memory need not be announced, because it is there already.
        """
        if unit.state is UnitState.FETCHING or unit.index in self._announced:
            return True
        return not unit.transient_host_bytes and unit.index in self._was_gathered and trace.expects(unit.index)

    def _gather(self, unit: Unit, position: int, trace: Trace, *, predicted: bool) -> None:
        """Make the unit's parameters whole, and add the waits and bytes of this gather to `counters`."""
        next_use = trace.next_use(unit.index)
        if unit.state in (UnitState.GATHERED, UnitState.MAPPED_IDLE, UnitState.RESIDENT):
            unit.wait_gather(next_use)
            return
        if self._ahead is not None and self._ahead is not unit:
            # This unit is used before the one that the trace expected. The store may have no room for the leases of
            # both units, so the leases of the expected unit are released.
            self._ahead.release()
        self._ahead = None
        self._announced.discard(unit.index)
        self._make_room_in_store(unit)
        unit.start_gather(position, _reuse(unit, position, trace))
        cost = unit.wait_gather(next_use, may_map=self._is_alone or not unit.transient_host_bytes)
        if unit.is_mapped and unit.transient_host_bytes:
            self._transient.append(unit)
        if unit.partition_bytes:
            self._was_gathered.add(unit.index)
        if predicted and unit.transient_host_bytes:
            self._window.note_gather(stalled=cost.waited_seconds > STALL_SECONDS)
        if unit.partition_bytes:
            self.counters.note(
                unit.index,
                UnitGathers(
                    gathers=1,
                    hits=int(cost.waited_seconds <= HIT_SECONDS),
                    predicted=int(predicted),
                    waited_seconds=cost.waited_seconds,
                    fetched_bytes=unit.leased_bytes - cost.device_bytes,
                    copied_bytes=cost.copied_bytes,
                    device_bytes=cost.device_bytes,
                ),
            )

    def _start_ahead(self, unit: Unit, position: int, trace: Trace) -> None:
        """Ask for the leases of a unit before its use, unless it is gathered."""
        if unit.state is UnitState.SHARDED:
            unit.start_gather(position, _reuse(unit, position, trace))
            self._ahead = unit

    def _make_room_in_store(self, unit: Unit) -> None:
        """Copy a mapped unit and release its leases, if the store may otherwise have no room for the leases of `unit`.

        A unit that lives in the store's host memory needs no more room there.
        """
        self._transient = [other for other in self._transient if other.is_mapped]
        if unit.transient_host_bytes and len(self._transient) >= UNITS_MAPPED_AT_ONCE:
            smallest = min(self._transient, key=lambda other: other.transient_host_bytes)
            smallest.require_unchanged()
            smallest.copy_mapped()
            self.counters.note(smallest.index, UnitGathers(copied_bytes=smallest.leased_bytes))

    def _release_if_idle(self, unit: Unit, trace: Trace | None) -> None:
        """Release the unit, unless it has a holder or the limit `kept_elements` allows it to stay for its next use."""
        if not self._holders[unit.index] and not (
            self._kept_elements is not None and self._gathered_elements() <= self._kept_elements
        ):
            self._release_unit(unit, trace)

    def _release_unit(self, unit: Unit, trace: Trace | None) -> None:
        """Release the unit, or only its parameters if it takes no memory and is used again before the trace ends."""
        if trace is not None and unit.takes_no_memory and trace.expects(unit.index):
            unit.release_parameters()
        else:
            unit.release()

    def _make_room(self, unit: Unit, trace: Trace) -> None:
        """Release units without a holder until `unit` fits into `kept_elements`, first the unit that is needed last.

        Held units stay, so a unit that is larger than the limit is admitted, alone with the held ones.
        """
        if unit.state in (UnitState.GATHERED, UnitState.MAPPED_IDLE):
            return
        limit = (self._kept_elements or 0) - unit.elements
        idle = [u for u in self._units if u.state is UnitState.GATHERED and not self._holders[u.index]]
        idle.sort(key=lambda u: trace.next_use(u.index) or 0)
        while idle and self._gathered_elements() > limit:
            self._release_unit(idle.pop(), trace)

    def _gathered_elements(self) -> int:
        """Return how many elements are gathered, without those of resident units."""
        return sum(unit.elements for unit in self._units if unit.state is UnitState.GATHERED)

    def _to_announce(self, traces: Sequence[Trace]) -> Iterator[tuple[Unit, int]]:
        """Yield (unit, position) for the next uses in the traces that the store can make ready, each unit once."""
        seen: set[int] = set()
        for following in zip_longest(*map(self._following, traces)):
            for unit, position in filter(None, following):
                if unit.index not in seen:
                    seen.add(unit.index)
                    yield unit, position

    def _following(self, trace: Trace) -> Iterator[tuple[Unit, int]]:
        """Yield (unit, position) for the uses in the rest of the trace's sequence, then in its next repetition.

        Units that an update is about to replace are left out.
        """
        for index, position in trace.upcoming():
            if self._can_be_made_ready(self._units[index]):
                yield self._units[index], position
        for index, position in trace.after_end():
            unit = self._units[index]
            changes = trace.ends_in_update and any(group.trainable for group in unit.groups)
            if not changes and self._can_be_made_ready(unit):
                yield unit, position

    def _can_be_made_ready(self, unit: Unit) -> bool:
        """Return whether the store can fetch bytes of the unit ahead of its use."""
        # A unit with a permanent place in the store's host memory stays there after its first use, so the store need
        # not fetch it.
        is_elsewhere = unit.transient_host_bytes > 0 or unit.index not in self._was_gathered
        return unit.state is UnitState.SHARDED and unit.partition_bytes > 0 and is_elsewhere


def _reuse(unit: Unit, position: int, trace: Trace) -> Reuse:
    """Return when the store needs the bytes again that a unit's use at `position` reads, so that it keeps or evicts."""
    return Reuse(
        before_update=trace.use_after(unit.index, position, before_update=True),
        at_all=trace.use_after(unit.index, position, before_update=False),
    )
