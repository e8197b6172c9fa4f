"""The choice of the units that are in memory during inference, and of the units that are fetched ahead of use.

As many units as the budget allows stay in memory from the beginning on, so that they are fetched only once. The other
units are fetched for each use, in the order in which the last forward used them. After the last unit of a forward, the
first units are fetched again, because a forward is repeated for each token. This module owns the units' leases. It must
never hold more bytes than the budget, except for the unit in use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainer_client.client.store_client.connection import LeaseRequest
from trainer_client.errors import SessionEndedError, StoreBudgetError
from trainer_client.inference.units import WeightUnit
from trainer_client.inference.weights import HeldTensors, StepWeights

log = logging.getLogger(__name__)

# The units that do not stay in memory share a window: room for at most _MOST_AHEAD of the largest of these units and,
# if the budget allows it, for at least _LEAST_WINDOW. With room for three units, one is in use, one is ready, and one
# is being read. With room for two, the NVMe device would be idle from the moment at which the next unit is ready until
# the forward enters it.
_MOST_AHEAD = 4
_LEAST_WINDOW = 3
# The number of units whose leases are requested at the same time while the units that stay in memory are loaded.
_LOADING = 3


class WeightResidency:
    """Decides which units of one model are in memory, and fetches units from the store and releases them.

    The hooks call `enter` before the forward of a unit's module, and `leave` after it.
    """

    def __init__(self, units: Sequence[WeightUnit], weights: StepWeights, host_bytes: int) -> None:
        """Choose the units that stay in memory. No unit is in memory before `load`.

        Args:
            units: the units, in the order of their first use as far as that is known.
            weights: the committed step whose weights the units have.
            host_bytes: the most bytes of the store's host memory that leases of this process may hold.
        """
        self._weights = weights
        self._units = tuple(units)
        self._ahead: dict[WeightUnit, LeaseRequest] = {}
        # `_borrowed` has the units whose parameters a function has used outside of the forward of the unit's module.
        # They are released when no thread has an outermost forward under way any more. `_threads` has the threads that
        # have one.
        self._borrowed: list[WeightUnit] = []
        self._threads: set[int] = set()
        self._last: WeightUnit | None = None
        self._lock = threading.RLock()
        self._is_closed = False
        self._window_bytes = 0
        # The units that are copied from the store part by part, because the window has no room for twice their size.
        self._large: set[WeightUnit] = set()
        # For each unit that does not stay in memory, the unit that is expected to be used after it.
        self._next: dict[WeightUnit, WeightUnit] = {}
        self._divide(host_bytes)

    def _divide(self, host_bytes: int) -> None:
        """Choose the units that stay in memory, and give the rest of the budget to the window of the other units."""
        streamed = _choose(self._units, host_bytes)
        self._window_bytes = max(0, host_bytes - self.kept_bytes)
        self._large = {unit for unit in streamed if 2 * unit.plan.nbytes > self._window_bytes}
        self._next = dict(zip(streamed, [*streamed[1:], *streamed[:1]], strict=True))

    @property
    def streams(self) -> bool:
        """Whether the budget is too small for all units, so that some units are fetched again for each use."""
        return bool(self._next)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the leases of all units that stay in memory."""
        return sum(unit.plan.nbytes for unit in self._units if unit.stays)

    def load(self) -> None:
        """Free the memory of all parameters, and fetch the units that stay in memory.

        Raises:
            StoreError: the store failed.
        """
        staying = [unit for unit in self._units if unit.stays]
        for unit in self._units:
            unit.hide(self.borrow)
        for number, unit in enumerate(staying):
            for later in staying[number : number + _LOADING]:
                self._request(later)
            try:
                unit.show(self._fetched(unit))
            except StoreBudgetError as error:
                log.warning("not all of the model stays in memory as planned: %s", error)
                self._make_do()
                return

    def _make_do(self) -> None:
        """Reduce the budget to the bytes of the leases that this process has got, because the store refuses more.

        The units that stay in memory are chosen anew for this budget.
        """
        self._drop_ahead(keep=())
        held = [unit for unit in self._units if unit.held is not None]
        self._divide(sum(unit.plan.nbytes for unit in held))
        for unit in held:
            if not unit.stays:
                self._release(unit)

    def begin_forward(self) -> None:
        """Note that this thread begins an outermost forward, and release units whose leases have ended.

        A function may use a unit outside of the forward of the unit's modules, where no hook checks the leases. So
        units whose leases have ended are released here, and such a function fetches the unit again.
        """
        with self._lock:
            self._threads.add(threading.get_ident())
            for unit in self._units:
                if unit.held is not None and unit.held.is_lost and not unit.users:
                    self._forget(unit)

    def end_forward(self) -> None:
        """Note that this thread's outermost forward has ended, and check the leases of units that stay in memory.

        If no other thread has a forward under way, the units that `borrow` has brought into memory are released.

        Raises:
            SessionEndedError: the leases of a unit that stays in memory ended during the forward, so its results cannot
                be used.
        """
        with self._lock:
            self._threads.discard(threading.get_ident())
            borrowed: list[WeightUnit] = []
            if not self._threads:
                borrowed, self._borrowed = self._borrowed, []
            self.leave_all(borrowed)
            for unit in self._units:
                if unit.stays and unit.held is not None:
                    unit.held.check()

    def enter(self, unit: WeightUnit) -> None:
        """Bring a unit into memory for a forward that needs it, and request the units that will be used next.

        Raises:
            StoreError: the store failed, or did not come back in time.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the engine for inference is closed, and the model has no weights any more")
            if unit.held is not None and unit.held.is_lost and not unit.users:
                self._forget(unit)
            if unit.held is None:
                unit.show(self._fetched(unit))
            if not unit.stays:
                self._note(unit)
                self._request_ahead(unit)
            unit.users += 1

    def leave(self, unit: WeightUnit) -> None:
        """Note that a forward no longer needs a unit, and release the unit if it need not stay in memory.

        Raises:
            SessionEndedError: the unit's leases ended during the forward, so its results cannot be used.
        """
        with self._lock:
            unit.users -= 1
            held = unit.held
            if held is None:
                return
            if unit.stays or unit.users:
                held.check()
                return
            self._release(unit)

    def borrow(self, unit: WeightUnit) -> None:
        """Bring a unit into memory for a function that uses it outside of the forward of the unit's modules."""
        with self._lock:
            self.enter(unit)
            self._borrowed.append(unit)

    def leave_all(self, units: Iterable[WeightUnit]) -> None:
        """Call `leave` for each of these units, because a forward no longer needs them.

        Raises:
            SessionEndedError: the leases of a unit ended during the forward. `leave` was called for all other units
                nevertheless.
        """
        failure: SessionEndedError | None = None
        for unit in units:
            try:
                self.leave(unit)
            except SessionEndedError as error:
                failure = error
        if failure is not None:
            raise failure

    def owns(self, tensor: torch.Tensor, *, with_staying: bool) -> bool:
        """Return whether a tensor is a view of a parameter that is released after its use.

        With `with_staying`, return this also for views of parameters that stay in memory until the engine is closed.
        """
        if tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        return any(address in unit.addresses for unit in (self._units if with_staying else self._next))

    def close(self) -> None:
        """Take all values away from the parameters, and release all leases. A repeated call has no effect."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._drop_ahead(keep=())
            for unit in self._units:
                if unit.held is not None:
                    self._forget(unit)

    def _release(self, unit: WeightUnit) -> None:
        held = unit.hide(self.borrow)
        if held is not None:
            self._weights.release(held)

    def _forget(self, unit: WeightUnit) -> None:
        """Release a unit whose leases may have ended; it is no error if they have."""
        try:
            self._release(unit)
        except SessionEndedError as error:
            log.debug("the leases on %s had ended: %s", unit.name, error)

    def _fetched(self, unit: WeightUnit) -> HeldTensors:
        if unit in self._large:
            places = unit.plan.places
            return HeldTensors({place.tensor.fqn: self._weights.read(place.tensor, place.dtype) for place in places})
        if not unit.plan.wants:
            return HeldTensors({})
        return self._weights.finish(unit.plan, self._ahead.pop(unit, None))

    def _request(self, unit: WeightUnit) -> None:
        """Request a unit's leases ahead, unless they were requested already or the unit is in memory."""
        if unit.held is None and unit not in self._ahead and unit.plan.wants and unit not in self._large:
            asked = self._weights.begin(unit.plan)
            if asked is not None:
                self._ahead[unit] = asked

    def _note(self, unit: WeightUnit) -> None:
        """Record that `unit` was used after the last noted unit, so that it is fetched ahead after that unit."""
        if self._last is not None and self._last is not unit and self._last in self._next:
            self._next[self._last] = unit
        self._last = unit

    def _request_ahead(self, unit: WeightUnit) -> None:
        """Request the leases of the units that the last forward used after `unit`, as far as the window has room."""
        held = [other for other in self._next if other.held is not None and other not in self._large]
        room = self._window_bytes - sum(other.plan.nbytes for other in held)
        coming: list[WeightUnit] = []
        following = self._next[unit]
        while following is not unit and following not in coming and len(coming) < _MOST_AHEAD:
            if following.held is None and following not in self._large:
                room -= following.plan.nbytes
                if room < 0:
                    break
            coming.append(following)
            following = self._next[following]
        self._drop_ahead(keep=coming)
        for other in coming:
            self._request(other)

    def _drop_ahead(self, keep: Iterable[Any]) -> None:
        """Give back the requested leases of all units that are not in `keep`."""
        for unit in set(self._ahead) - set(keep):
            self._ahead.pop(unit).give_back()


def _choose(units: Sequence[WeightUnit], host_bytes: int) -> list[WeightUnit]:
    """Set `stays` of each unit, and return the units that do not stay in memory and so are fetched for each use.

    If not all units fit into the budget, room for some units of the largest size is kept free: for the unit in use, and
    for the units that are fetched meanwhile.
    """
    if sum(unit.plan.nbytes for unit in units) <= host_bytes:
        room = host_bytes
    else:
        largest = max(unit.plan.nbytes for unit in units)
        room = host_bytes - max(_LEAST_WINDOW * largest, min(host_bytes // 2, _MOST_AHEAD * largest))
    streamed = []
    for unit in units:
        unit.stays = unit.plan.nbytes <= room
        if unit.stays:
            room -= unit.plan.nbytes
        else:
            streamed.append(unit)
    return streamed
