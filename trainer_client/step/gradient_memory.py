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
from trainer_client.lanes.lanes import Act, Copy, Lanes
from trainer_client.model.flat_group import FlatGroup
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore


class GradientMemory(Protocol):
    """The contract of the memory that holds this rank's part of a group's gradient within a step.

    memory.start(step); memory.recall(); memory.partition.copy_(gradient)  # once or more often in a step
    memory.send([], act)                                                   # when the gradient is complete
    leased = memory.lease(step)                                            # or memory.free(), or memory.abandon()
    """

    @property
    def is_requested(self) -> bool:
        """Whether the memory was asked for in this step."""

    @property
    def partition(self) -> torch.Tensor:
        """The gradient [partition_numel] in the group's gradient dtype, uninitialised at first. Call `start` before.

        Waits for the copy that `send` has begun. Call `recall` before writing.
        """

    def start(self, step: int) -> None:
        """Ask for the memory. It does not wait; idempotent within the step."""

    def recall(self) -> None:
        """Have `partition` where gradients are added up, because it is about to change after `send`. Idempotent."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> Copy:
        """Begin to bring the gradient, which is complete, to its home. Call `start` before.

        Args:
            also: other copies from the device, as in Lanes.copy_out.
            act: called when all is copied: at once, or in a later call of the lanes.
        """

    @property
    def staged_bytes(self) -> int:
        """Bytes that the gradient takes on the device between `start` and `send`, although its home is elsewhere."""

    @property
    def on_device(self) -> torch.Tensor | None:
        """The gradient on the device, with a storage of its own; None if it is in the store's memory, or nowhere."""

    @property
    def leased(self) -> LeasedBytes | None:
        """The leased memory that the gradient is in; None if it is on the device. Call `start` and `send` before."""

    def lease(self, step: int) -> LeasedBytes:
        """Return the gradient in leased memory, for the store, and drop all other state of the step."""

    def free(self) -> None:
        """Free the memory, because the gradient is not needed any more. Return when the next step may ask."""

    def abandon(self) -> None:
        """Free the memory after a failure. It neither waits nor raises; idempotent."""


class LeasedMemory:
    """A gradient in the store's host memory, which is there already when it is handed over."""

    def __init__(self, group: FlatGroup, store: RankStore, lanes: Lanes) -> None:
        self._group = group
        self._store = store
        self._lanes = lanes
        self._pending: Pending[list[LeasedBytes]] | None = None
        self._leased: LeasedBytes | None = None
        self._step = 0

    @property
    def is_requested(self) -> bool:
        return self._leased is not None or self._pending is not None

    @property
    def partition(self) -> torch.Tensor:
        return self.wait().data.view(self._group.gradient_dtype)

    def start(self, step: int) -> None:
        if not self.is_requested:
            self._step = step
            self._pending = self._ask()

    def _ask(self) -> Pending[list[LeasedBytes]]:
        """Ask the store for a lease to write the gradient of the step."""
        return self._store.acquire_write([self._group.slab(GRAD)], self._step)

    def recall(self) -> None:
        """Do nothing."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> Copy:
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

    def lease(self, step: int) -> LeasedBytes:
        leased, self._leased = self.wait(), None
        return leased

    def free(self) -> None:
        if self._pending is not None:
            (self._leased,) = self._pending.wait()
        leased, self._leased, self._pending = self._leased, None, None
        if leased is not None:
            self._store.release([leased]).wait()

    def abandon(self) -> None:
        self.detach()()

    def detach(self) -> Callable[[], None]:
        """Drop the memory, and return the call that releases it. The call does not wait and raises nothing."""
        pending, self._pending = self._pending, None
        leased, self._leased = self._leased, None

        def release() -> None:
            if pending is not None:
                pending.release_when_granted()
            if leased is not None:
                self._store.release_quietly([leased])

        return release

    def wait(self) -> LeasedBytes:
        """Wait for the lease, and return it.

        After a restart of the daemon, return a lease of the new daemon with the same bytes.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if not pending.is_answered:
                # The store may have no room while this rank holds the leases of copied units.
                self._lanes.finish_copies_in()
            (self._leased,) = pending.wait()
        assert self._leased is not None, "start comes first"
        while not self._store.is_current(self._leased):
            # The daemon was restarted. Only this rank has written to its part of the old memory, so the gradient in it
            # is still right.
            former = self._leased
            (self._leased,) = self._ask().wait()
            self._leased.data.copy_(former.data)
        return self._leased


class StagedMemory:
    """A gradient that is summed up on an accelerator, and is copied into the store's host memory when it is complete.

    The device has memory for it from the first gradient until the copy is done.
    """

    def __init__(self, group: FlatGroup, store: RankStore, lanes: Lanes) -> None:
        self._group = group
        self._lanes = lanes
        self._home = LeasedMemory(group, store, lanes)
        # The gradient is on the device, or else the copy into the store's memory was begun, or there is none yet.
        self._on_device: torch.Tensor | None = None
        self._copy: Copy | None = None

    @property
    def is_requested(self) -> bool:
        return self._home.is_requested

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

    def start(self, step: int) -> None:
        self._home.start(step)

    def recall(self) -> None:
        if self._copy is not None:
            self._copy.wait()
            leased = self._home.wait()
            self._copy, self._on_device = None, self._allocate()
            self._lanes.copy_in(self._on_device, leased.data, leased.pieces())
            # `finish_copies_in` waits for a copy only if something is to be done after it.
            self._lanes.after_copies_in(_nothing)

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> Copy:
        if self._copy is None:
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

    def lease(self, step: int) -> LeasedBytes:
        copy = self.send([], _nothing) if self._copy is None else self._copy
        copy.wait()
        self._copy = None
        return self._home.lease(step)

    def free(self) -> None:
        copy, self._copy, self._on_device = self._copy, None, None
        if copy is not None:
            copy.wait()
        # A copy that `recall` has begun reads the leased memory.
        self._lanes.finish_copies_in()
        self._home.free()

    def abandon(self) -> None:
        self._copy = self._on_device = None
        self._lanes.after_copies(self._home.detach())


class DeviceMemory:
    """A gradient in the trainer's own memory, on its device."""

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

    def start(self, step: int) -> None:
        if self._partition is None:
            group = self._group
            self._partition = torch.empty(
                group.slot_table.partition_numel, dtype=group.gradient_dtype, device=group.device
            )

    def recall(self) -> None:
        """Do nothing."""

    def send(self, also: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act) -> Copy:
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

    def lease(self, step: int) -> LeasedBytes:
        (leased,) = self._store.acquire_write([self._group.slab(GRAD)], step).wait()
        try:
            self._lanes.copy_out(_copies(leased, self.partition)).wait()
        except BaseException:
            self._store.release_quietly([leased])
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


def _nothing() -> None:
    """Do nothing."""
