"""The memory of this rank's part of a gradient within a step: leased from the store's host tier, or on the device.

Owns that memory, from the first micro-batch of a step to its update. Must never look at the values in it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from paramserver.contract.kinds import GRAD
from trainer_client.model.flat_group import FlatGroup
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore


class GradientMemory(Protocol):
    """The contract of the memory that holds this rank's part of a group's gradient within a step.

    memory.start(step); memory.partition.copy_(gradient)  # once or more often in a step
    leased = memory.lease(step)                       # or memory.free(), or memory.abandon()
    """

    @property
    def is_requested(self) -> bool:
        """Whether the memory was asked for in this step."""

    @property
    def partition(self) -> torch.Tensor:
        """The gradient [partition_numel] in the group's gradient dtype, uninitialised at first. Call `start` before."""

    def start(self, step: int) -> None:
        """Ask for the memory. Does not wait; idempotent within the step."""

    @property
    def on_device(self) -> torch.Tensor | None:
        """The gradient on the device, with a storage of its own; None: it is in the store's memory, or nowhere."""

    @property
    def leased(self) -> LeasedBytes | None:
        """The leased memory that the gradient is in; None: it is on the device. Call `start` before."""

    def lease(self, step: int) -> LeasedBytes:
        """Return the gradient in leased memory, for the store, and drop all other state of the step."""

    def free(self) -> None:
        """Free the memory, because the gradient is not needed any more. Returns when the next step may ask."""

    def abandon(self) -> None:
        """Free the memory after a failure. Does not wait and raises nothing; idempotent."""


class LeasedMemory:
    """A gradient in the store's host memory, which is there already when it is handed over."""

    def __init__(self, group: FlatGroup, store: RankStore) -> None:
        self._group = group
        self._store = store
        self._pending: Pending[list[LeasedBytes]] | None = None
        self._leased: LeasedBytes | None = None
        self._step = 0

    @property
    def is_requested(self) -> bool:
        return self._leased is not None or self._pending is not None

    @property
    def partition(self) -> torch.Tensor:
        return self._wait().data.view(self._group.gradient_dtype)

    def start(self, step: int) -> None:
        if not self.is_requested:
            self._step = step
            self._pending = self._ask()

    def _ask(self) -> Pending[list[LeasedBytes]]:
        """Ask the store for a lease to write the gradient of the step."""
        return self._store.acquire_write([self._group.slab(GRAD)], self._step)

    @property
    def on_device(self) -> torch.Tensor | None:
        return None

    @property
    def leased(self) -> LeasedBytes | None:
        return self._wait()

    def lease(self, step: int) -> LeasedBytes:
        leased, self._leased = self._wait(), None
        return leased

    def free(self) -> None:
        if self._pending is not None:
            (self._leased,) = self._pending.wait()
        leased, self._leased, self._pending = self._leased, None, None
        if leased is not None:
            self._store.release([leased]).wait()

    def abandon(self) -> None:
        pending, self._pending = self._pending, None
        leased, self._leased = self._leased, None
        if pending is not None:
            pending.release_when_granted()
        if leased is not None:
            self._store.release_quietly([leased])

    def _wait(self) -> LeasedBytes:
        """Wait for the lease, and return it.

        After a restart of the daemon, return a lease of the new daemon with the same bytes.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            (self._leased,) = pending.wait()
        assert self._leased is not None, "start comes first"
        while not self._store.is_current(self._leased):
            # The daemon was restarted. Only this rank has written to its part of the old memory, so the gradient in it
            # is still right.
            former = self._leased
            (self._leased,) = self._ask().wait()
            self._leased.data.copy_(former.data)
        return self._leased


class DeviceMemory:
    """A gradient in the trainer's own memory, on its device."""

    def __init__(self, group: FlatGroup, store: RankStore) -> None:
        self._group = group
        self._store = store
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

    @property
    def on_device(self) -> torch.Tensor | None:
        return self._partition

    @property
    def leased(self) -> LeasedBytes | None:
        return None

    def lease(self, step: int) -> LeasedBytes:
        (leased,) = self._store.acquire_write([self._group.slab(GRAD)], step).wait()
        try:
            leased.data.view(self._group.gradient_dtype).copy_(self.partition)
        except BaseException:
            self._store.release_quietly([leased])
            raise
        self._partition = None
        return leased

    def free(self) -> None:
        self._partition = None

    def abandon(self) -> None:
        self._partition = None
