"""Gradients within a step: ranges of the arena, and regions of the durable tier for those that do not fit.

This module owns the memory of every gradient, and decides which one leaves the arena. A client that does not touch a
gradient for a while parks it. A parked gradient stays in the arena while there is room, and is spilled otherwise: it is
written with checksums to a region that the catalog never names, so a crash leaves nothing behind. It must never spill,
move or free bytes that a client may write to, or that a tile of an update reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from storage.errors import NotFoundError, StorageError
from storage.scratch import ScratchRanges
from storage.shard import DType, Kind, SlabKey
from storage.slab import Group
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.waiting import unlogged

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Gradient:
    """The gradient of one group for one step.

    Attributes:
        job: the name of its job.
        label: its name in error texts, made as those of versions are.
        arena_range: where it is in the arena; None: it was spilled.
        region: where it is on the durable tier; None: it was not spilled.
        is_parked: whether the client has promised not to touch it until it recalls it.
        update: the update that uses it, from its begin until it is withdrawn; None: there is none.
        waits_for_seal: whether the update waits until its step is sealed, which may be long.
        is_freed: whether its memory is free, or will be when the last user has gone.
    """

    job: str
    label: str
    dtype: DType
    numel: int
    arena_range: ArenaRange | None
    region: Region | None = None
    is_parked: bool = False
    update: asyncio.Task[None] | None = None
    waits_for_seal: bool = False
    is_freed: bool = False
    _readers: int = 0
    _spilling: asyncio.Task[None] | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes in whole pages."""
        return round_up(self.numel * self.dtype.itemsize)

    @property
    def is_in_arena(self) -> bool:
        """Whether `Gradients.begin_read` finds it in the arena."""
        # Between the end of a spill and the end of the last tile that reads the range, it is at both places.
        is_left = self.is_parked and self.region is not None and self._spilling is None
        return self.arena_range is not None and not is_left

    @property
    def is_updating(self) -> bool:
        """Whether an update reads it now, or is about to."""
        return self.update is not None and not self.update.done() and not self.waits_for_seal


class Gradients:
    """The gradients of all jobs of one engine."""

    def __init__(self, host: HostTier, backing: BackingTiers, scratch: ScratchRanges, room: Callable[[], int]) -> None:
        """Keep the parts of the engine. `room` returns the bytes of the arena that parked gradients may take."""
        self._host = host
        self._backing = backing
        self._scratch = scratch
        self._room = room
        # The parked gradients that are in the arena and are not being spilled, in the order in which they were parked.
        # The first one is needed last, because gradients come in the reverse order of the updates.
        self._kept: dict[Gradient, None] = {}
        self._kept_bytes = 0
        self._spilling: set[Gradient] = set()
        # The gradients that have a region on the durable tier.
        self._spilled: set[Gradient] = set()
        # Tasks that wait for room for a gradient, which a failed spill ends with its error.
        self._waiting: set[asyncio.Future[ArenaRange]] = set()
        self._failure: StorageError | None = None
        host.when_room_is_short(self.relieve)

    @property
    def regions(self) -> Collection[Region]:
        """The regions that hold spilled gradients."""
        return [gradient.region for gradient in self._spilled if gradient.region is not None]

    @property
    def parked_bytes(self) -> int:
        """The bytes of the parked gradients in the arena."""
        return self._kept_bytes + sum(gradient.nbytes for gradient in self._spilling)

    @property
    def spilled_bytes(self) -> int:
        """The bytes of the durable tier that hold spilled gradients."""
        return sum(region.nbytes for region in self.regions)

    async def allocate(self, job: str, key: SlabKey, group: Group, step: int) -> Gradient:
        """Wait for room in the arena, and return a gradient without values that a client may write to.

        Args:
            job: the name of the job.
            key: the name of the gradient.
            group: its group.
            step: the step that it is for.

        Raises:
            BudgetExceededError: there was no room before the deadline.
            StorageError: a parked gradient had to be spilled to make room, and this failed.
        """
        gradient = Gradient(job, key.label(step), group.spec.slab_of_kind[Kind.GRAD].dtype, group.spec.numel, None)
        gradient.arena_range = await self._room_for(gradient)
        return gradient

    def tensor(self, gradient: Gradient) -> torch.Tensor:
        """Return the values of a gradient that is not parked, as a 1-D tensor over its memory in the arena."""
        assert gradient.arena_range is not None, "a gradient that is not parked is in the arena"
        return self._host.tensor(gradient.arena_range, gradient.dtype, gradient.numel)

    def park(self, gradient: Gradient) -> None:
        """Take note that the client does not touch a gradient until it recalls it. It does not wait; idempotent."""
        if gradient.is_parked or gradient.is_freed:
            return
        gradient.is_parked = True
        # The end of a spill under way decides about the range itself.
        if gradient.arena_range is not None and gradient._spilling is None:
            self._keep(gradient)
        self.relieve()

    async def recall(self, gradient: Gradient) -> None:
        """Bring a parked gradient back to the arena, where the client may write to it again.

        Raises:
            NotFoundError: the gradient was freed meanwhile.
            DamagedBlockError: the spilled bytes are damaged.
            StorageError: there was no room for it before the deadline, or it cannot be read.
        """
        gradient.is_parked = False
        self._unkeep(gradient)
        try:
            if gradient._spilling is not None:
                await asyncio.wait([gradient._spilling])
            while gradient.arena_range is None and not gradient.is_freed:
                await self._read_back(gradient)
        except BaseException:
            self.park(gradient)
            raise
        if gradient.is_freed:
            raise NotFoundError(f"{gradient.label} was freed while it was read back")
        # The client may have parked it again meanwhile, before it had an answer to this call.
        gradient.is_parked = False
        self._unkeep(gradient)
        if gradient.region is not None:
            self._free_region(gradient)

    async def _read_back(self, gradient: Gradient) -> None:
        range_ = await self._room_for(gradient)
        region = gradient.region
        if region is None or gradient.is_freed or gradient.arena_range is not None:
            self._scratch.free(range_)
            return
        self._backing.hold(region)
        try:
            await self._backing.read_into(region, 0, self._host.view(range_))
        except BaseException:
            self._scratch.free(range_)
            raise
        finally:
            self._backing.free(region)
        if gradient.is_freed or gradient.arena_range is not None:
            self._scratch.free(range_)
        else:
            gradient.arena_range = range_

    def free(self, gradient: Gradient) -> None:
        """Free the memory of a gradient as soon as no spill and no tile uses it. Idempotent."""
        if gradient.is_freed:
            return
        gradient.is_freed = True
        self._unkeep(gradient)
        if gradient._spilling is None:
            self._free_range(gradient)
            if gradient.region is not None:
                self._free_region(gradient)

    def take_range(self, gradient: Gradient) -> ArenaRange | None:
        """Free a gradient but for its range of the arena, which it returns.

        The client may still write to the range, so the caller passes it to `HostTier.free` when no process can. None is
        returned if the gradient is not in the arena.
        """
        range_, gradient.arena_range = gradient.arena_range, None
        self.free(gradient)
        return None if range_ is None else self._scratch.hand_over(range_)

    def begin_read(self, gradient: Gradient) -> ArenaRange | Region:
        """Return where the bytes of a gradient are, and keep them there until `end_read` gets the result."""
        if gradient.is_in_arena:
            assert gradient.arena_range is not None
            gradient._readers += 1
            return gradient.arena_range
        assert gradient.region is not None, "a gradient has its bytes in a range or in a region"
        self._backing.hold(gradient.region)
        return gradient.region

    def end_read(self, gradient: Gradient, place: ArenaRange | Region) -> None:
        """End what `begin_read` began."""
        if not isinstance(place, ArenaRange):
            self._backing.free(place)
            return
        gradient._readers -= 1
        if gradient.is_freed or not gradient.is_in_arena:
            self._free_range(gradient)

    def relieve(self) -> None:
        """Begin to spill parked gradients if they exceed their room, or if requests wait for room."""
        if not self._kept:
            return
        excess = self._kept_bytes - self._room()
        short = self._host.wanted_bytes - sum(gradient.nbytes for gradient in self._spilling)
        if max(excess, short) <= 0:
            return
        # An update that runs frees its gradient soon, so only a request that waits has it spilled.
        excess -= sum(gradient.nbytes for gradient in self._kept if gradient.is_updating)
        for gradient in list(self._order()):
            if max(short, 0 if gradient.is_updating else excess) <= 0:
                continue
            self._begin_spill(gradient)
            short -= gradient.nbytes
            excess -= gradient.nbytes

    def relieve_jobs(self, jobs: Collection[str]) -> None:
        """Begin to spill one parked gradient of these jobs, unless one is being spilled."""
        if any(gradient.job in jobs for gradient in self._spilling):
            return
        found = next((gradient for gradient in self._order() if gradient.job in jobs), None)
        if found is not None:
            self._begin_spill(found)

    async def close(self) -> None:
        """Wait for the spills under way."""
        while tasks := [gradient._spilling for gradient in self._spilling if gradient._spilling is not None]:
            await asyncio.wait(tasks)

    def _order(self) -> Iterator[Gradient]:
        """Yield the parked gradients in the arena, in the order in which they are to leave it.

        First come those whose update is done, because they are read again only if it is withdrawn; last those that an
        update is about to read.
        """

        def rank(gradient: Gradient) -> int:
            if gradient.update is None or gradient.waits_for_seal:
                return 1
            return 0 if gradient.update.done() else 2

        yield from sorted(self._kept, key=rank)

    def _keep(self, gradient: Gradient) -> None:
        self._kept[gradient] = None
        self._kept_bytes += gradient.nbytes

    def _unkeep(self, gradient: Gradient) -> None:
        if gradient in self._kept:
            del self._kept[gradient]
            self._kept_bytes -= gradient.nbytes

    async def _room_for(self, gradient: Gradient) -> ArenaRange:
        """Wait for a range of the arena. A spill that fails meanwhile ends the wait with its error."""
        if not self._kept and not self._spilling:
            return await self._scratch.allocate(gradient.job, gradient.nbytes, from_top=True)
        waiting = asyncio.ensure_future(self._scratch.allocate(gradient.job, gradient.nbytes, from_top=True))
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                # The request was granted at the moment at which the caller was cancelled.
                self._scratch.free(waiting.result())
                raise
            if waiting in self._waiting or self._failure is None:
                raise
            raise type(self._failure)(*self._failure.args) from self._failure
        finally:
            self._waiting.discard(waiting)

    def _begin_spill(self, gradient: Gradient) -> None:
        self._unkeep(gradient)
        self._spilling.add(gradient)
        gradient._spilling = unlogged(asyncio.ensure_future(self._spill(gradient)))

    async def _spill(self, gradient: Gradient) -> None:
        """Write a parked gradient to a region, and free its range unless it was recalled meanwhile."""
        assert gradient.arena_range is not None
        try:
            async with self._backing.new_version(self._backing.durable.name, gradient.nbytes, gradient.label) as region:
                view = self._host.view(gradient.arena_range)
                await self._backing.durable.write_from(region, 0, view, Priority.UPDATE)
                gradient.region = region
                self._spilled.add(gradient)
        except StorageError as error:
            self._fail(gradient, error)
        finally:
            self._spilling.discard(gradient)
            gradient._spilling = None
            self._end_spill(gradient)

    def _end_spill(self, gradient: Gradient) -> None:
        if gradient.is_freed:
            self._free_range(gradient)
            if gradient.region is not None:
                self._free_region(gradient)
        elif not gradient.is_parked:
            # It was recalled while it was written. `recall` frees the region.
            pass
        elif gradient.region is None:
            self._keep(gradient)
        else:
            self._free_range(gradient)
            self.relieve()

    def _fail(self, gradient: Gradient, error: StorageError) -> None:
        """Take note that a spill has failed: the gradient stays in the arena, and waiting requests get the error."""
        log.error("%s cannot be spilled: %s", gradient.label, error)
        self._failure = error
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            each.cancel()

    def _free_range(self, gradient: Gradient) -> None:
        """Free the range of a gradient, unless tiles of an update read it: then the last of them frees it."""
        if gradient.arena_range is not None and not gradient._readers:
            range_, gradient.arena_range = gradient.arena_range, None
            self._scratch.free(range_)

    def _free_region(self, gradient: Gradient) -> None:
        self._spilled.discard(gradient)
        region, gradient.region = gradient.region, None
        if region is not None:
            self._backing.free(region)
