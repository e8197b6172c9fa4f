"""The record of a lease: what a session may do with a range of the arena.

This module owns nothing: grants.py grants leases and ends them, and gradient_updates.py ends those of gradients that
clients hand over.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from paramserver.sessions.shared_ranges import SharedRange
from storage.base.errors import ConflictError
from storage.base.shard import DType
from storage.memory.parkable import Activation, Gradient, Parkable
from storage.state.slab import Slab
from storage.steps.pins import Pin
from storage.steps.reader import StepReader
from storage.tiers.arena import ArenaRange
from storage.tiers.contract import Region
from storage.tiers.gpu import DeviceRange


class LeaseMode(enum.Enum):
    """What a lease allows its session to do with the range, for example to read it."""

    READ = "read"
    """Read a slab."""

    STAGE = "stage"
    """Write the first bytes of a slab."""

    PUT = "put"
    """Write a slab's bytes of a later step."""

    RANGE = "range"
    """Read ranges of tensors."""

    GRADIENT = "gradient"
    """Write the gradient of a group."""

    ACTIVATION = "activation"
    """Write and read an activation."""

    @property
    def is_for_writing(self) -> bool:
        """Whether the client may change the bytes."""
        return self not in (LeaseMode.READ, LeaseMode.RANGE)


@dataclass(slots=True, eq=False)
class Lease:
    """A session's right to a range of the arena.

    Attributes:
        fixed_range: the range; None for a gradient or an activation, whose range changes.
        group: the group of the slab or gradient. RANGE and ACTIVATION leases: what the range holds, for error texts.
        gradient: GRADIENT leases: the gradient, which may be parked or spilled.
        activation: ACTIVATION leases: the activation, which may be parked or spilled.
        recalls: GRADIENT and ACTIVATION leases: how often the client has recalled the gradient or the activation.
        recall_failed: GRADIENT and ACTIVATION leases: whether the last recall has failed, so that the client may repeat
            the recall.
        asks_to_park: GRADIENT leases: whether the client is asked to park the gradient.
        pin: READ and STAGE leases: the pin that keeps the slab's bytes in the arena. None if the range holds bytes
            that do not belong to a slab, or not yet.
        slab: PUT leases: the slab whose bytes of `step` the range will become.
        step: PUT and RANGE leases: the step to which the bytes belong.
        shared: RANGE leases: the range, which leases of other sessions may share.
        reader: RANGE leases: the reader whose step is read.
        dtype: RANGE leases: the type of the elements.
        keep: READ leases: the range of its device's memory in which the client may keep a copy of the bytes.
        update: GRADIENT leases: the update that uses the gradient, as long as the client may withdraw it.
        void: whether the lease has ended. The daemon then no longer touches the range on behalf of this lease.
    """

    lease_id: int
    group: str
    mode: LeaseMode
    nbytes: int
    fixed_range: ArenaRange | None
    pin: Pin | None
    gradient: Gradient | None = None
    activation: Activation | None = None
    asks_to_park: bool = False
    recalls: int = 0
    recall_failed: bool = False
    slab: Slab | None = None
    step: int = 0
    shared: SharedRange | None = None
    reader: StepReader | None = None
    dtype: DType | None = None
    keep: DeviceRange | None = None
    update: asyncio.Task[None] | None = None
    void: bool = False

    @property
    def parkable(self) -> Parkable | None:
        """The gradient or the activation of the lease; None if it has neither."""
        return self.activation if self.gradient is None else self.gradient

    @property
    def what(self) -> str:
        """A text that names the gradient or the activation of the lease in errors."""
        return f"the gradient of group {self.group!r}" if self.activation is None else self.group

    @property
    def arena_range(self) -> ArenaRange:
        """The range of the arena that the client may use.

        Raises:
            ConflictError: the gradient or the activation is parked.
        """
        if (parkable := self.parkable) is None:
            assert self.fixed_range is not None, "only gradients and activations leave the arena"
            return self.fixed_range
        if parkable.is_parked or parkable.arena_range is None:
            raise ConflictError(f"{self.what} is parked; acquire it again before its bytes are used")
        return parkable.arena_range

    @property
    def held_ranges(self) -> list[ArenaRange]:
        """The ranges of the arena that the lease holds, also while its gradient or activation is parked."""
        range_ = self.fixed_range if self.parkable is None else self.parkable.arena_range
        return [] if range_ is None else [range_]

    @property
    def held_regions(self) -> list[Region]:
        """The regions of a spilled gradient or activation that the lease holds."""
        region = None if self.parkable is None else self.parkable.region
        return [] if region is None else [region]

    @property
    def is_written(self) -> bool:
        """Whether the client may write to the range now, or its device may."""
        parked = self.parkable is not None and self.parkable.is_parked
        return self.mode.is_for_writing and self.update is None and not parked

    @property
    def is_read_by_update(self) -> bool:
        """Whether the range is of a gradient that an update uses, or has used, which the client may still withdraw."""
        return self.gradient is not None and self.update is not None and not self.gradient.is_parked

    @property
    def exclusive_subject(self) -> Slab | str | None:
        """The slab, or the name of the gradient's group, on which a session may hold only one lease of this mode.

        The subject is None if a session may hold any number of leases of this mode.
        """
        if self.mode is LeaseMode.GRADIENT:
            return self.group
        return self.slab


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLease:
    """A session's right to read a copy of a slab in the memory of its own device.

    Attributes:
        version: the step of the bytes.
    """

    lease_id: int
    slab: Slab
    version: int
    range_: DeviceRange
