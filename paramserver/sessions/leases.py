"""What a session may do with a range of the arena. Plain records; sessions.py grants them and takes them back."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass

from storage.engine import Pin
from storage.reader import StepReader
from storage.shard import DType
from storage.slab import Slab
from storage.tiers.arena import ArenaRange


class LeaseMode(enum.Enum):
    """What a lease allows."""

    READ = "read"
    STAGE = "stage"  # write the initial bytes of a slab
    PUT = "put"  # write its bytes of a later step
    RANGE = "range"  # read a range of a tensor
    GRADIENT = "gradient"  # write a gradient

    @property
    def is_for_writing(self) -> bool:
        """Whether its holder may change the bytes."""
        return self not in (LeaseMode.READ, LeaseMode.RANGE)


@dataclass(slots=True, eq=False)
class Lease:
    """A session's right to a range of the arena."""

    lease_id: int
    group: str
    mode: LeaseMode
    nbytes: int
    region: ArenaRange
    pin: Pin | None  # None: a gradient, bytes to put or a range, which are no slab's
    slab: Slab | None = None  # that the bytes are to be put as
    step: int = 0  # of the bytes, if they are to be put or are a range
    reader: StepReader | None = None  # that a range is of
    dtype: DType | None = None  # of a range
    update: asyncio.Task[None] | None = None  # that uses the gradient, and may yet be withdrawn
    void: bool = False

    @property
    def exclusive_subject(self) -> Slab | str | None:
        """The slab or, by its group, the gradient that a session may have one such lease of only."""
        if self.mode is LeaseMode.GRADIENT:
            return self.group
        return self.slab
