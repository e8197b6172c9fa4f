"""The record of a lease: what a session may do with a range of the arena.

This module owns nothing: grants.py grants leases and ends them.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from paramserver.sessions.shared_ranges import SharedRange
from storage.engine import Pin
from storage.reader import StepReader
from storage.shard import DType
from storage.slab import Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.gpu import DeviceRange


class LeaseMode(enum.Enum):
    """The use of its range that a lease allows."""

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

    @property
    def is_for_writing(self) -> bool:
        """Whether the client may change the bytes."""
        return self not in (LeaseMode.READ, LeaseMode.RANGE)


@dataclass(slots=True, eq=False)
class Lease:
    """A session's right to a range of the arena.

    Attributes:
        group: the group of the slab or gradient. RANGE leases: what is read, for error texts.
        pin: READ and STAGE leases: keeps the slab's bytes in the arena. None: the range holds bytes that do not belong
            to a slab, or not yet.
        slab: PUT leases: the slab whose bytes of `step` the range will become.
        step: PUT and RANGE leases: the step of the bytes.
        shared: RANGE leases: the range, which leases of other sessions may share.
        reader: RANGE leases: the reader whose step is read.
        dtype: RANGE leases: the type of the elements.
        keep: READ leases: where the client may keep a copy in its device's memory.
        update: GRADIENT leases: the update that uses the gradient, as long as the client may withdraw it.
        void: whether the lease has ended. The daemon then no longer touches the range on behalf of this lease.
    """

    lease_id: int
    group: str
    mode: LeaseMode
    nbytes: int
    arena_range: ArenaRange
    pin: Pin | None
    slab: Slab | None = None
    step: int = 0
    shared: SharedRange | None = None
    reader: StepReader | None = None
    dtype: DType | None = None
    keep: DeviceRange | None = None
    update: asyncio.Task[None] | None = None
    void: bool = False

    @property
    def exclusive_subject(self) -> Slab | str | None:
        """The slab, or the name of the gradient's group, on which a session may hold only one such lease.

        It is None if a session may hold any number of leases of this mode.
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
