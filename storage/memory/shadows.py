"""Room in host memory for the results of updates whose step is not sealed yet, beside the committed bytes.

A slab that is placed in the host tier has its bytes there once, and an update must not overwrite them before the step
is sealed, because until then the step can be abandoned. Where there is room, the update writes its result to a shadow
of each slab, while the client still computes gradients, and the shadow becomes the slab's copy at the seal.

Shadows take room that no request waits for, and give way: if an allocation finds no room, results that wait for their
seal are discarded until there is room, and their updates are made again in place after the seal. So shadows never delay
a step. They are allocated from the bottom of the arena, where the copies at home are that they replace. This module
owns the ranges of shadows until they are adopted. It must never evict a copy to make room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage.memory.scratch import ScratchRanges
from storage.state.slab import Group, HostCopy, Slab
from storage.tiers.host import HostTier


@dataclass(slots=True, eq=False)
class Shadow:
    """The shadows of all slabs of one group: memory for the results of the group's update before the seal.

    Attributes:
        copies: the shadow of each slab; empty if they were adopted or freed.
        is_written: whether an update writes to them, so that they cannot be freed.
        given_up: set when they are freed for another request. The update then runs again after the seal.
    """

    copies: dict[Slab, HostCopy]
    is_written: bool = True
    given_up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def nbytes(self) -> int:
        return sum(copy.arena_range.nbytes for copy in self.copies.values())


class Shadows:
    """Allocates shadows for the updates of one engine, and frees them when another request needs their room."""

    def __init__(self, host: HostTier, scratch: ScratchRanges, spare: Callable[[], int]) -> None:
        """Keep the parts of the engine. `spare` returns the bytes of the arena that the jobs' steps never need."""
        self._host = host
        self._scratch = scratch
        self._spare = spare
        # All shadows, in the order in which they were taken.
        self._shadows: dict[Shadow, None] = {}
        host.when_room_is_short(self._give_way)

    @property
    def nbytes(self) -> int:
        """The bytes of the arena that all shadows take."""
        return sum(shadow.nbytes for shadow in self._shadows)

    @property
    def waiting(self) -> int:
        """The number of groups whose results are written and wait for the seal of their step."""
        return sum(not shadow.is_written for shadow in self._shadows if shadow.copies)

    @property
    def spare_bytes(self) -> int:
        """The bytes that further shadows may take, if so much room is free."""
        return self._spare() - self.nbytes

    @contextmanager
    def of(self, group: Group) -> Iterator[Shadow | None]:
        """Yield shadows of a group's slabs, and free at the end those that were not adopted.

        The context yields None if there is no room, or if the newest bytes of a slab are not in host memory.
        """
        shadow = self._take(group)
        try:
            yield shadow
        finally:
            if shadow is not None:
                self._free(shadow)
                self._shadows.pop(shadow, None)

    def written(self, shadow: Shadow) -> None:
        """Mark shadows as complete. They wait for the seal from now on, and may be freed for other requests."""
        shadow.is_written = False
        if self._host.is_short:
            self._give_way()

    def adopt(self, shadow: Shadow) -> dict[Slab, HostCopy]:
        """Return the shadows, so that the caller makes them the copies of their slabs. They are no shadows any more."""
        for copy in shadow.copies.values():
            self._scratch.hand_over(copy.arena_range)
        copies, shadow.copies = shadow.copies, {}
        return copies

    def _take(self, group: Group) -> Shadow | None:
        if any(slab.latest is not None and slab.current_copy is None for slab in group.slabs):
            return None
        if sum(slab.paged_bytes for slab in group.slabs) > self.spare_bytes:
            return None
        shadow = Shadow({})
        for slab in group.slabs:
            range_ = self._scratch.allocate_free(slab.nbytes)
            if range_ is None:
                self._free(shadow)
                return None
            shadow.copies[slab] = HostCopy(range_, step=None, at_home=True)
        self._shadows[shadow] = None
        return shadow

    def _free(self, shadow: Shadow) -> None:
        copies, shadow.copies = shadow.copies, {}
        for copy in copies.values():
            self._scratch.free(copy.arena_range)

    def _give_way(self) -> None:
        """Free the shadows that no update writes to, the newest first, until no request waits for room any more."""
        for shadow in reversed(list(self._shadows)):
            if not self._host.is_short:
                return
            if not shadow.is_written and shadow.copies:
                shadow.given_up.set()
                self._free(shadow)
