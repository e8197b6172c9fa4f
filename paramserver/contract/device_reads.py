"""Reads of a rank that may find their bytes on its device. The daemon's side says which do, for the planner."""

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
        next_use: the position of the next read of the same bytes in the sequence of reads; None: there is none.
    """

    slab: str
    version: int
    nbytes: int
    next_use: int | None


FindHits: TypeAlias = Callable[[Sequence[DeviceRead], int], Sequence[bool]]
"""A function of a rank's reads, in order, and of the bytes of device memory for copies.

It returns for each read whether it finds its bytes in that memory.
"""
