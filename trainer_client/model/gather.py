"""How the whole parameters of a unit come together: by an all-gather of what each rank has, or all from the store.

A gather is split into start and finish. Owns nothing between two gathers, and no lease. Must never decide when to
gather: that is the hooks' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paramserver.contract.kinds import PARAM
from trainer_client.model.flat_group import FlatGroup
from trainer_client.ranks.collectives import Collectives
from trainer_client.ranks.lockstep import Lockstep
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore, Slab


class Gather(Protocol):
    """The contract. `groups` are those of one unit."""

    @property
    def is_one_sided(self) -> bool:
        """Whether a rank can gather alone, whatever the others do."""

    def slabs(self, groups: Sequence[FlatGroup]) -> list[Slab]:
        """What `start` will lease, in its order."""

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        """Bytes of those slabs."""

    def start(self, groups: Sequence[FlatGroup], position: int) -> Pending[list[LeasedBytes]] | None:
        """Asks for the bytes; None if there is nothing to lease. Does not wait."""

    def finish(
        self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_show: bool
    ) -> list[LeasedBytes]:
        """Fills the flat buffers.

        Returns:
            Those of the leases whose bytes the flat buffers show now, only where they `may_show` any: to be held until
            the groups are freed or owned. The others may be returned at once.
        """

    def give_up(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        """Take note that a gather which `start` had begun has failed on this rank, before it was whole."""


class CollectiveGather:
    """Each rank has its own chunk on its device, or leases it, and an all-gather makes the flat buffer of them. A
    collective."""

    is_one_sided = False

    def __init__(self, store: RankStore, collectives: Collectives) -> None:
        self._store = store
        self._collectives = collectives
        self._lockstep = Lockstep(collectives)

    def slabs(self, groups: Sequence[FlatGroup]) -> list[Slab]:
        return [group.slab(PARAM) for group in groups if group.chunk is None]

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        return sum(group.chunk_bytes for group in groups if group.chunk is None)

    def start(self, groups: Sequence[FlatGroup], position: int) -> Pending[list[LeasedBytes]] | None:
        self._lockstep.announce(groups[0].unit)
        slabs = self.slabs(groups)
        return self._store.acquire_read(slabs, position) if slabs else None

    @torch.no_grad()
    def finish(
        self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_show: bool
    ) -> list[LeasedBytes]:
        if not groups:
            return []
        unit = groups[0].unit
        self._lockstep.confirm(unit)
        fetched = iter(leases)
        for group in groups:
            chunk = next(fetched).data.view(group.dtype) if group.chunk is None else group.chunk
            group.allocate()
            self._collectives.gather_unit(group.flat, chunk, f"the gather of {unit}")
        return []

    def give_up(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        # The others may be in the all-gather already, which this rank does not come to any more.
        self._collectives.give_up(f"the gather of {groups[0].unit}" if groups else "a gather", error)


class OneSidedGather:
    """A rank leases every rank's chunk where all ranks share a store, which has the chunks of all groups, and nothing
    passes between the ranks. On the CPU nothing is copied either, where the pages allow it.

    Ranks may then use different units, in any order. After a hand-over of gradients the ranks must meet once before any
    of them gathers: a chunk whose update the store does not know of yet would be read as it was.
    """

    is_one_sided = True

    def __init__(self, store: RankStore, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def slabs(self, groups: Sequence[FlatGroup]) -> list[Slab]:
        return [group.slab(PARAM, rank) for group in groups for rank in range(self._world_size)]

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        return sum(group.whole_bytes for group in groups)

    def start(self, groups: Sequence[FlatGroup], position: int) -> Pending[list[LeasedBytes]]:
        return self._store.acquire_read(self.slabs(groups), position)

    @torch.no_grad()
    def finish(
        self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_show: bool
    ) -> list[LeasedBytes]:
        shown = []
        chunks = iter(leases)
        for group in groups:
            group.allocate()
            for rank in range(self._world_size):
                leased = next(chunks)
                if may_show and group.show(rank, leased):
                    shown.append(leased)
                    continue
                first, last = group.layout.chunk_range(rank)
                group.flat[first:last].copy_(leased.data.view(group.dtype), non_blocking=True)
            if group.flat.is_cuda:
                # The leases are returned next: the device must have read them.
                torch.cuda.current_stream(group.device).synchronize()
        return shown

    def give_up(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        """Do nothing, because no other rank takes part in a gather."""
