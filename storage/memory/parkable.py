"""Bytes within a step that a client can park, gradients and activations, and where each of them is.

This module owns the table of states. It must never move bytes or free memory, because `Gradients` does.

[Note: the transitions]

| verb \\ state | IN_USE | KEPT     | SPILLING | WANTED    | SPILLED   | RECALLING | FREED |
|--------------|--------|----------|----------|-----------|-----------|-----------|-------|
| park         | KEPT   | KEPT     | SPILLING | SPILLING  | SPILLED   | SPILLED   | FREED |
| begin_spill  |        | SPILLING |          |           |           |           |       |
| end_spill    |        |          | SPILLED  | RECALLING |           |           | FREED |
| fail_spill   |        |          | KEPT     | IN_USE    |           |           | FREED |
| recall       | IN_USE | IN_USE   | WANTED   | WANTED    | RECALLING | RECALLING |       |
| end_recall   |        |          |          |           |           | IN_USE    |       |
| free         | FREED  | FREED    | FREED    | FREED     | FREED     | FREED     | FREED |

An empty field is refused. A client may park its bytes again before it has the answer to its recall, so `park` follows
WANTED and RECALLING, too. A spill that is under way when its bytes are freed goes on, and ends in FREED.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Container
from dataclasses import dataclass, field

from storage.base.errors import NotFoundError
from storage.base.shard import DType
from storage.tiers.arena import ArenaRange
from storage.tiers.base import round_up
from storage.tiers.contract import Region


class ParkState(enum.Enum):
    """Where the bytes of a gradient or an activation are, and who may touch them."""

    IN_USE = enum.auto()
    """The bytes are in the arena, and the client may write to them."""

    KEPT = enum.auto()
    """The bytes are parked in the arena: the client does not touch them, and they may be spilled."""

    SPILLING = enum.auto()
    """The bytes are parked in the arena, and are being written to a region."""

    WANTED = enum.auto()
    """As SPILLING, but the client waits for the bytes, which therefore stay in the arena when they are written."""

    SPILLED = enum.auto()
    """The bytes are parked in a region. Their range of the arena remains only while tiles of an update read it."""

    RECALLING = enum.auto()
    """The bytes are in a region, and the client waits until they are in the arena, too."""

    FREED = enum.auto()
    """The memory is free, or will be when the spill under way and the last tile that reads it have ended."""


class ParkVerb(enum.Enum):
    """The events that change the `ParkState` of a gradient or an activation; see [Note: the transitions]."""

    PARK = enum.auto()
    BEGIN_SPILL = enum.auto()
    END_SPILL = enum.auto()
    FAIL_SPILL = enum.auto()
    RECALL = enum.auto()
    END_RECALL = enum.auto()
    FREE = enum.auto()


_FOLLOWING = {
    (ParkVerb.PARK, ParkState.IN_USE): ParkState.KEPT,
    (ParkVerb.PARK, ParkState.KEPT): ParkState.KEPT,
    (ParkVerb.PARK, ParkState.SPILLING): ParkState.SPILLING,
    (ParkVerb.PARK, ParkState.WANTED): ParkState.SPILLING,
    (ParkVerb.PARK, ParkState.SPILLED): ParkState.SPILLED,
    (ParkVerb.PARK, ParkState.RECALLING): ParkState.SPILLED,
    (ParkVerb.PARK, ParkState.FREED): ParkState.FREED,
    (ParkVerb.BEGIN_SPILL, ParkState.KEPT): ParkState.SPILLING,
    (ParkVerb.END_SPILL, ParkState.SPILLING): ParkState.SPILLED,
    (ParkVerb.END_SPILL, ParkState.WANTED): ParkState.RECALLING,
    (ParkVerb.END_SPILL, ParkState.FREED): ParkState.FREED,
    (ParkVerb.FAIL_SPILL, ParkState.SPILLING): ParkState.KEPT,
    (ParkVerb.FAIL_SPILL, ParkState.WANTED): ParkState.IN_USE,
    (ParkVerb.FAIL_SPILL, ParkState.FREED): ParkState.FREED,
    (ParkVerb.RECALL, ParkState.IN_USE): ParkState.IN_USE,
    (ParkVerb.RECALL, ParkState.KEPT): ParkState.IN_USE,
    (ParkVerb.RECALL, ParkState.SPILLING): ParkState.WANTED,
    (ParkVerb.RECALL, ParkState.WANTED): ParkState.WANTED,
    (ParkVerb.RECALL, ParkState.SPILLED): ParkState.RECALLING,
    (ParkVerb.RECALL, ParkState.RECALLING): ParkState.RECALLING,
    (ParkVerb.END_RECALL, ParkState.RECALLING): ParkState.IN_USE,
    **{(ParkVerb.FREE, state): ParkState.FREED for state in ParkState},
}


@dataclass(slots=True, eq=False, kw_only=True)
class Parkable:
    """Bytes within a step that a client can park: a gradient or an activation. Only `Gradients` changes it.

    Attributes:
        job: the name of its job.
        label: its name in error texts, made as those of versions are.
        size_bytes: its bytes, without padding to pages.
        state: where its bytes are, and who may touch them; only `enter` changes it.
        arena_range: where it is in the arena; None if it is not there.
        region: where it is on the durable tier; None if it is not there.
        readers: the number of tiles of an update that read `arena_range`, which stays until there are none.
    """

    job: str
    label: str
    size_bytes: int
    state: ParkState = field(default=ParkState.IN_USE, init=False)
    arena_range: ArenaRange | None = None
    region: Region | None = None
    readers: int = 0

    def enter(self, verb: ParkVerb) -> ParkState:
        """Enter the state that follows the present one by `verb`, and return it.

        Raises:
            NotFoundError: the bytes are freed, and the verb would use them.
        """
        following = _FOLLOWING.get((verb, self.state))
        if following is None and self.state is ParkState.FREED:
            raise NotFoundError(f"{self.label} is freed: its lease has ended, or an update was its last use")
        assert following is not None, f"{self.label} is {self.state.name}, and {verb.name} cannot follow"
        self.state = following
        return following

    @property
    def nbytes(self) -> int:
        """The size of the gradient or activation in whole pages."""
        return round_up(self.size_bytes)

    @property
    def is_parked(self) -> bool:
        """Whether the client must recall the gradient or activation before it may touch it.

        Freed bytes count as parked, too, because a client that wants them must ask to recall them, and gets
        NotFoundError.
        """
        return self.state not in (ParkState.IN_USE, ParkState.WANTED, ParkState.RECALLING)

    @property
    def is_freed(self) -> bool:
        """Whether the memory is free, or will be when the last spill or tile of an update that uses it has ended."""
        return self.state is ParkState.FREED

    @property
    def is_in_arena(self) -> bool:
        """Whether `Gradients.begin_read` finds the bytes in the arena, and not in a region."""
        return self.arena_range is not None and self.state is not ParkState.SPILLED

    @property
    def is_updating(self) -> bool:
        """Whether an update reads the gradient now, or is about to read it."""
        return False

    @property
    def is_used_up(self) -> bool:
        """Whether the gradient is parked, and its last use is over, so that its memory can be freed."""
        return False

    @property
    def will_be_used_up(self) -> bool:
        """Whether an update under way will free the gradient when the update is done."""
        return False

    @property
    def leaving_rank(self) -> int:
        """The rank in the order in which parked bytes leave the arena: those with a lower rank leave first."""
        return 1

    @property
    def leaves_when_parked(self) -> bool:
        """Whether the bytes leave the arena as soon as they are parked, also if there is room."""
        return False

    @property
    def is_served_last(self) -> bool:
        """Whether requests for room for these bytes wait behind those for all other bytes."""
        return False

    def may_leave(self, jobs_with_room: Container[str]) -> bool:
        """Return whether the bytes may be spilled.

        Args:
            jobs_with_room: the jobs for whose activations there is room on the durable tier.
        """
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class Gradient(Parkable):
    """The gradient of one group for one step.

    Attributes:
        dtype: the type of its elements.
        numel: their number.
        leaves_host: whether it is placed on a backing tier.
        update: the task of the update that uses the gradient; None before the update begins, or if it was withdrawn.
        waits_for_seal: whether the update waits until its step is sealed, which may be long.
        has_last_use: whether the client does not use the gradient after the update, so that it can be freed then.
    """

    dtype: DType
    numel: int
    leaves_host: bool = False
    update: asyncio.Task[None] | None = None
    waits_for_seal: bool = False
    has_last_use: bool = False

    @property
    def is_used_up(self) -> bool:
        """Whether the gradient is parked, and its last use is over, so that its memory can be freed."""
        is_over = self.update is not None and self.update.done() and not self.update.cancelled()
        return self.is_parked and self.has_last_use and is_over

    @property
    def is_updating(self) -> bool:
        """Whether an update reads the gradient now, or is about to read it."""
        return self.update is not None and not self.update.done() and not self.waits_for_seal

    @property
    def will_be_used_up(self) -> bool:
        """Whether an update under way will free the gradient when the update is done."""
        return self.has_last_use and self.is_updating

    @property
    def leaving_rank(self) -> int:
        """The rank in the order in which parked bytes leave the arena: those with a lower rank leave first.

        Gradients whose update is done leave first, because they are read again only if the update is withdrawn.
        Gradients that an update is about to read leave last.
        """
        if self.update is None or self.waits_for_seal:
            return 1
        return 0 if self.update.done() else 2

    @property
    def leaves_when_parked(self) -> bool:
        """Whether the bytes leave the arena as soon as they are parked, also if there is room.

        A gradient stays if an early update has read it or is about to read it, because its bytes are then most probably
        not needed again.
        """
        return self.leaves_host and (self.update is None or self.waits_for_seal)


@dataclass(slots=True, eq=False, kw_only=True)
class Activation(Parkable):
    """An activation of a client's forward, until the client releases it; see gradients.py [Note: activations]."""

    @property
    def is_served_last(self) -> bool:
        """Whether requests for room for these bytes wait behind those for all other bytes."""
        return True

    def may_leave(self, jobs_with_room: Container[str]) -> bool:
        """Return whether the activation may be spilled: if its job is one of `jobs_with_room`."""
        return self.job in jobs_with_room
