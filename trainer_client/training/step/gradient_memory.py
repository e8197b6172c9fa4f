"""The memory of this rank's part of a gradient within a step: leased from the store's host tier, or on the device.

On an accelerator, a gradient whose home is the store is summed up on the device, and copied to the store's memory when
it is complete. This module owns that memory, from the first micro-batch of a step to its update. It must never look at
the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from paramserver.contract.kinds import GRAD
from trainer_client.base.lanes.lanes import Act, Lanes, PendingCopy
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.training.model.flat_group import FlatGroup


class GradientMemory(Protocol):
    """The contract of the memory that holds this rank's part of a group's gradient within a step.

    memory.start(step); memory.reopen(); memory.partition.copy_(gradient)  # once or more often in a step
    memory.send([], act)                                                   # when the gradient is complete
    leased = memory.lease(step)                                            # or memory.free(), or memory.abandon()
    """

    @property
    def is_requested(self) -> bool:
        """Whether `start` was called in this step, and neither `lease`, `free` nor `abandon` has ended the memory."""

    @property
    def partition(self) -> torch.Tensor:
        """The gradient [partition_numel] in the group's gradient dtype, uninitialised at first. Call `start` before.

        Waits for the copy that `send` has begun. Call `reopen` before writing.
        """

    def start(self, step: int, *, sends: bool = True) -> None:
        """Ask for the memory of the gradient of `step`. It does not wait; idempotent within the step.

        Args:
            sends: whether the gradient will be complete before the next `start`, so that `send` is called. If not, a
                sum on the device asks for no memory of the store yet.
        """

    def fetch_ahead(self) -> None:
        """Begin to bring a parked gradient back, because `partition` is needed soon. It does not wait."""

    def reopen(self) -> None:
        """Bring `partition` back to where gradients are added up, because it is to change after `send`. Idempotent."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> PendingCopy:
        """Begin to bring the gradient, which is complete, to its home. Call `start` before.

        Args:
            also: (target, source) pairs of tensors that are copied from the device as well, as for Lanes.copy_out.
            act: called when all copies are done: at once, or in a later call of the lanes.
        """

    @property
    def staged_bytes(self) -> int:
        """Bytes that the gradient takes on the device between `start` and `send`, and then leaves for the store."""

    @property
    def on_device(self) -> torch.Tensor | None:
        """The gradient, if it is on the device, with a storage of its own; None if it is elsewhere or was not begun."""

    @property
    def leased(self) -> LeasedBytes | None:
        """The leased memory that the gradient is in; None if it is on the device. Call `start` and `send` before."""

    @property
    def is_settled(self) -> bool:
        """Whether this rank waits for no lease on memory of the store: it has the lease, or has not asked for one."""

    @property
    def can_park(self) -> bool:
        """Whether `start` was called and the store wants gradients parked, so that `park` may have something to do."""

    def park(self, *, sent: LeasedBytes | None) -> LeasedBytes | None:
        """Park the gradient until `partition` is used again. Leased memory that has no gradient yet is released.

        Args:
            sent: the lease whose bytes an early update of the gradient has made visible to the store. After a restart
                of the daemon the gradient is in another lease, whose bytes the store has not seen.

        Returns:
            The parked lease; None if nothing was parked, because the gradient is not in the store's memory, is parked
            already, or the store does not want it parked.
        """

    def lease(self, step: int) -> LeasedBytes:
        """Return the gradient in leased memory, for the store, and drop all other state of the step.

        The lease may still be parked, because the store takes parked gradients for updates, too.
        """

    def free(self) -> None:
        """Free the memory, because the gradient is not needed any more. Wait until the next step may ask for memory."""

    def abandon(self) -> None:
        """Free the memory after a failure. It neither waits nor raises; idempotent."""


class LeasedMemory:
    """A gradient that is summed up in leased host memory of the store, so no copy is needed to hand it over."""

    def __init__(self, group: FlatGroup, store: RankStore, lanes: Lanes) -> None:
        self._group = group
        self._store = store
        self._lanes = lanes
        # The unanswered request for the lease of this gradient's memory. If `_leased` is a parked lease, it is the
        # request to recall that lease.
        self._pending: Pending[LeasedBytes] | None = None
        self._leased: LeasedBytes | None = None
        self._is_requested = False
        self._step = 0

    @property
    def is_requested(self) -> bool:
        return self._is_requested

    @property
    def partition(self) -> torch.Tensor:
        return self.wait().data.view(self._group.gradient_dtype)

    def start(self, step: int, *, sends: bool = True) -> None:
        if not self._is_requested:
            self._step = step
            self._is_requested = True
            self._pending = self._ask()

    def fetch_ahead(self) -> None:
        if self._pending is None and self._is_parked:
            self._pending = self._recall()

    @property
    def _is_parked(self) -> bool:
        return self._leased is not None and self._leased.parked is not None

    def _recall(self) -> Pending[LeasedBytes]:
        assert self._leased is not None
        return self._store.gradients.recall(self._group.slab(GRAD), self._leased, self._step)

    def _ask(self) -> Pending[LeasedBytes]:
        """Ask the store for a lease to write the gradient of the step."""
        return self._store.gradients.acquire(self._group.slab(GRAD), self._step)

    def reopen(self) -> None:
        """Do nothing, because the gradient is summed up in the leased memory, where `send` leaves it."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> PendingCopy:
        return self._lanes.copy_out(also, act)

    @property
    def staged_bytes(self) -> int:
        return 0

    @property
    def on_device(self) -> torch.Tensor | None:
        return None

    @property
    def leased(self) -> LeasedBytes | None:
        return self.wait()

    @property
    def is_settled(self) -> bool:
        return self._pending is None

    @property
    def can_park(self) -> bool:
        return self._is_requested and self._store.gradients.parking.is_wanted

    def park(self, *, sent: LeasedBytes | None) -> LeasedBytes | None:
        if self._pending is not None and self._leased is None:
            # This rank has not used the leased memory yet, so there is no gradient to park. The lease is ended, and is
            # requested again when the memory is used. The store would refuse a second request before the end of the
            # first lease, so `free` waits for that end.
            self.free()
            self._is_requested = True
        if self._pending is not None:
            self._leased = self._pending.wait()
            self._pending = None
        if self._leased is None or self._is_parked or not self._store.gradients.parking.wants(self._leased):
            return None
        is_sent = sent is not None and sent.is_same_lease(self._leased)
        parked = self._store.gradients.park(self._group.name, self._leased, is_sent=is_sent)
        self._leased = parked or self._leased
        return parked

    def lease(self, step: int) -> LeasedBytes:
        if self._pending is not None or not self._is_parked:
            self.wait()
        leased, self._leased = self._current(), None
        self._is_requested = False
        return leased

    def free(self) -> None:
        self._is_requested = False
        if self._pending is not None:
            self._leased = self._pending.wait()
        leased, self._leased, self._pending = self._leased, None, None
        if leased is not None:
            self._store.leases.release([leased]).wait()

    def abandon(self) -> None:
        self.detach()()

    def detach(self) -> Callable[[], None]:
        """Drop the memory, and return a function that releases its lease. The function neither waits nor raises."""
        pending, self._pending = self._pending, None
        leased, self._leased = self._leased, None
        self._is_requested = False

        def release() -> None:
            if pending is not None:
                pending.release_when_granted()
            if leased is not None:
                self._store.leases.release_quietly([leased])

        return release

    def wait(self) -> LeasedBytes:
        """Wait for the lease, and return it with the bytes of the gradient.

        After a restart of the daemon, return a lease of the new daemon with the same bytes.
        """
        assert self._is_requested, "start comes first"
        while self._leased is None or self._is_parked:
            self._is_requested = True
            if self._pending is None:
                self._pending = self._ask() if self._leased is None else self._recall()
            if not self._pending.is_answered:
                # The store may have no room for this lease while this rank holds leases of units that are being copied
                # to the device. So finish these copies, which releases their leases. A function that runs after such a
                # copy may use, park or free this memory, so `_pending` still has the request, and may be None
                # afterwards.
                self._lanes.finish_copies_in()
            if self._pending is not None:
                pending, self._pending = self._pending, None
                self._leased = pending.wait()
        return self._current()

    def _current(self) -> LeasedBytes:
        """Return the lease; after a restart of its daemon, return a lease of the new daemon with the same bytes.

        A parked lease stays parked, because the store need not have room for the gradients of a step all at once.
        """
        assert self._leased is not None, "it was waited for"
        while not self._store.leases.is_current(self._leased):
            # The daemon was restarted, so its lease is not valid any more. Only this rank has written to its range of
            # the old memory, so the gradient there is still right and is copied to the new lease.
            former = self._leased
            leased = self._ask().wait()
            try:
                self._store.gradients.refill(self._group.name, leased, former)
            except BaseException:
                self._store.leases.release_quietly([leased])
                raise
            if former.parked is not None:
                leased = self._store.gradients.park(self._group.name, leased, is_sent=False) or leased
            self._leased = leased
        return self._leased


class StagedMemory:
    """A gradient that is summed up on an accelerator, and is copied into the store's host memory when it is complete.

    The gradient takes memory of the device from the first micro-batch until the copy is done.
    """

    def __init__(self, group: FlatGroup, store: RankStore, lanes: Lanes) -> None:
        self._group = group
        self._lanes = lanes
        self._home = LeasedMemory(group, store, lanes)
        # `_on_device`: the gradient on the device, until `send`. `_copy`: the copy of the gradient into the store's
        # memory, after `send`. At most one of the two is set.
        self._on_device: torch.Tensor | None = None
        self._copy: PendingCopy | None = None
        self._store = store
        self._is_requested = False
        self._step = 0

    @property
    def is_requested(self) -> bool:
        return self._is_requested

    @property
    def partition(self) -> torch.Tensor:
        if self._copy is not None:
            self._copy.wait()
            return self._home.partition
        if self._on_device is None:
            self._on_device = self._allocate()
        return self._on_device

    def _allocate(self) -> torch.Tensor:
        group = self._group
        return torch.empty(group.slot_table.partition_numel, dtype=group.gradient_dtype, device=group.device)

    def start(self, step: int, *, sends: bool = True) -> None:
        self._is_requested = True
        self._step = step
        # A sum of gradients that stays on the device needs no memory of the store yet, so no lease is requested for it.
        if sends or not self._store.gradients.parking.is_wanted:
            self._home.start(step)

    def fetch_ahead(self) -> None:
        if self._copy is not None:
            self._home.fetch_ahead()

    def reopen(self) -> None:
        if self._copy is not None:
            self._copy.wait()
            leased = self._home.wait()
            self._copy, self._on_device = None, self._allocate()
            self._lanes.copy_in(self._on_device, leased.data, leased.pieces())
            # `park` and `free` call `finish_copies_in` to wait for this copy. `finish_copies_in` waits only for copies
            # that have a function to call afterwards, so this copy gets a function that does nothing.
            self._lanes.after_copies_in(nothing)

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> PendingCopy:
        if self._copy is None:
            self._home.start(self._step)
            also = [*_copies(self._home.wait(), self.partition), *also]
            self._on_device = None
        self._copy = self._lanes.copy_out(also, act)
        return self._copy

    @property
    def staged_bytes(self) -> int:
        return self._group.slot_table.partition_numel * self._group.gradient_dtype.itemsize

    @property
    def on_device(self) -> torch.Tensor | None:
        return self._on_device

    @property
    def leased(self) -> LeasedBytes | None:
        return self._home.leased

    @property
    def is_settled(self) -> bool:
        return self._home.is_settled

    @property
    def can_park(self) -> bool:
        return self._home.can_park

    def park(self, *, sent: LeasedBytes | None) -> LeasedBytes | None:
        if self._copy is not None:
            self._copy.wait()
            return self._home.park(sent=sent)
        # The sum of gradients is on the device, so its leased memory in the store is not needed. But a copy that
        # `reopen` has begun may still read the leased memory, so wait for that copy before the memory is freed.
        self._lanes.finish_copies_in()
        self._home.free()
        return None

    def lease(self, step: int) -> LeasedBytes:
        self._is_requested = False
        copy = self.send([], nothing) if self._copy is None else self._copy
        copy.wait()
        self._copy = None
        return self._home.lease(step)

    def free(self) -> None:
        self._is_requested = False
        copy, self._copy, self._on_device = self._copy, None, None
        if copy is not None:
            copy.wait()
        # A copy to the device that `reopen` has begun may still read the gradient's leased memory, so wait for
        # that copy before the memory is freed.
        self._lanes.finish_copies_in()
        self._home.free()

    def abandon(self) -> None:
        self._is_requested = False
        self._copy = self._on_device = None
        self._lanes.after_copies(self._home.detach())


class LocalMemory:
    """A gradient in the trainer's own memory on its device, because its home is the device."""

    def __init__(self, group: FlatGroup, store: RankStore, lanes: Lanes) -> None:
        self._group = group
        self._store = store
        self._lanes = lanes
        self._partition: torch.Tensor | None = None

    @property
    def is_requested(self) -> bool:
        return self._partition is not None

    @property
    def partition(self) -> torch.Tensor:
        assert self._partition is not None, "start comes first"
        return self._partition

    def start(self, step: int, *, sends: bool = True) -> None:
        if self._partition is None:
            group = self._group
            self._partition = torch.empty(
                group.slot_table.partition_numel, dtype=group.gradient_dtype, device=group.device
            )

    def reopen(self) -> None:
        """Do nothing, because `send` leaves the gradient on the device."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> PendingCopy:
        return self._lanes.copy_out(also, act)

    @property
    def staged_bytes(self) -> int:
        return 0

    @property
    def on_device(self) -> torch.Tensor | None:
        return self._partition

    @property
    def leased(self) -> LeasedBytes | None:
        return None

    @property
    def is_settled(self) -> bool:
        return True

    @property
    def can_park(self) -> bool:
        return False

    def fetch_ahead(self) -> None:
        """Do nothing, because a gradient on the device is never parked."""

    def park(self, *, sent: LeasedBytes | None) -> LeasedBytes | None:
        return None

    def lease(self, step: int) -> LeasedBytes:
        leased = self._store.gradients.acquire(self._group.slab(GRAD), step).wait()
        try:
            self._lanes.copy_out(_copies(leased, self.partition)).wait()
        except BaseException:
            self._store.leases.release_quietly([leased])
            raise
        self._partition = None
        return leased

    def free(self) -> None:
        self._partition = None

    def abandon(self) -> None:
        self._partition = None


def _copies(leased: LeasedBytes, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the copies of `values` into leased memory, for Lanes.copy_out."""
    source = values.view(torch.uint8)
    return [(leased.data[piece], source[piece]) for piece in leased.pieces()]


def nothing() -> None:
    """Do nothing after a copy that needs no further action."""
