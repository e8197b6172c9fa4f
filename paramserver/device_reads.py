"""Which reads of a rank find their bytes on its device, computed with the gpu tier's own directory of copies.

`paramserver plan`, which is a client, gets this function as an argument; store_need.py says why. This module must never
open a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract.device_reads import DeviceRead
from storage.state.slab import NEVER
from storage.tiers.gpu import GpuTier


@dataclass(slots=True, eq=False)
class _PlannedSlab:
    """A stand-in for a slab of the planned job, because the gpu tier's directory asks for one; no store holds it."""

    stamp: int = 0
    deleted: bool = False


def find_hits(reads: Sequence[DeviceRead], budget_bytes: int) -> Sequence[bool]:
    """Return for each read whether it finds its bytes among the copies that have room in `budget_bytes`.

    The plan assumes that each read ends before the next one begins.
    """
    memory = GpuTier().open("plan")
    memory.resize(budget_bytes)
    slabs: dict[str, _PlannedSlab] = {}
    hits = []
    for read in reads:
        slab = slabs.setdefault(read.slab, _PlannedSlab())
        slab.stamp = read.version
        next_use = NEVER if read.next_use is None else read.next_use
        range_ = memory.find(slab, next_use)
        hits.append(range_ is not None)
        if range_ is None:
            range_ = memory.place(slab, read.nbytes, next_use)
        if range_ is not None:
            memory.release(slab, range_)
    return hits
