"""The record of a read that may find its bytes in the memory of the reading rank's device.

The planner of `paramserver plan` makes these records, and paramserver/device_reads.py computes which reads do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRead:
    """One read of a slab by a rank.

    Attributes:
        slab: the name of the slab.
        version: a number that changes whenever the slab's bytes do.
        nbytes: the size of the slab.
        next_use: the position of the next read of the same bytes in the sequence of reads, or None if there is none.
    """

    slab: str
    version: int
    nbytes: int
    next_use: int | None


FindHits: TypeAlias = Callable[[Sequence[DeviceRead], int], Sequence[bool]]
"""A function of a rank's reads, in order, and of the bytes of device memory for copies.

It returns for each read whether it finds its bytes in that memory.
"""
