"""What a session may do with a range of the arena. Plain records; sessions.py grants them and takes them back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from storage.engine import Pin
from storage.tiers.arena import ArenaRange


class LeaseMode(enum.Enum):
    """What a lease allows."""

    READ = "read"
    STAGE = "stage"  # write the initial bytes of a slab
    GRADIENT = "gradient"  # write a gradient


@dataclass(slots=True, eq=False)
class Lease:
    """A session's right to a range of the arena."""

    lease_id: int
    group: str
    mode: LeaseMode
    nbytes: int
    region: ArenaRange
    pin: Pin | None  # None: a gradient, which has no slab
    void: bool = False
