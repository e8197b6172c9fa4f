"""Gradients and activations within a step: ranges of the arena, and regions of the durable tier for what does not fit.

This module owns the memory of every gradient and of every activation that a client keeps here, and decides which one
leaves the arena. A client that does not touch a gradient for a while parks it. A parked gradient stays in the arena
if it is placed in the host tier and there is room. Otherwise it is spilled: it is written with checksums to a region
that the catalog never names, so a crash leaves nothing behind. This module must never spill, move or free bytes that a
client may write to, or that a tile of an update reads.

[Note: activations] An activation is an input of a part of the model that the client's backward pass needs. It is
written once, parked, recalled and freed, as a gradient is, and what this module says of gradients holds for it, too.
Its size is not known before the client asks, so no budget was admitted for it: `Admission.admit_activation` lends it
only what the rest of a step leaves. An activation may be spilled only if the admission has reserved room on the durable
tier for the activations of its job. Requests for room for activations wait behind all others; see
`ScratchRanges.allocate_last`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import torch

from storage.base.errors import StorageError
from storage.base.shard import Kind, SlabKey
from storage.base.waiting import unlogged
from storage.memory.parkable import Activation, Gradient, Parkable, ParkState, ParkVerb
from storage.memory.scratch import ScratchRanges
from storage.state.slab import Group
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority

log = logging.getLogger(__name__)

# While a request waits for room, gradients that an update under way will free are not spilled for this long, because
# such an update probably ends sooner. If none ends by then, these gradients are spilled, too. The update of a large
# unit takes 0.3 s on a device of 1 GB/s. The wait has an end because an update may itself wait for bytes that need
# room.
PATIENCE_SECONDS = 1.0


class _Patience:
    """A timer for requests that wait until an update frees its gradient; see PATIENCE_SECONDS.

    Args:
        act: called when the time is over; it spills gradients. `lasts` is false only while `act` runs.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def lasts(self) -> bool:
        """Return whether requests still wait for an update to free its gradient. The first call starts the timer."""
        if self._timer is None and not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._end)
        return not self._is_over

    def renew(self) -> None:
        """Stop the timer because an update has ended; the next call of `lasts` starts it again with the whole time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._is_over = True
        try:
            self._act()
        finally:
            self._is_over = False


class Gradients:
    """Allocates, parks, spills, recalls and frees the gradients and activations of all jobs of one engine.

    Sessions call it for their clients, and updates read the gradients through it.
    """

    def __init__(self, host: HostTier, backing: BackingTiers, scratch: ScratchRanges, room: Callable[[], int]) -> None:
        """Keep the parts of the engine. `room` returns how many bytes of the arena parked gradients may take."""
        self._host = host
        self._backing = backing
        self._scratch = scratch
        self._room = room
        # The parked gradients and activations in the arena that are not being spilled, in the order in which they were
        # parked. The first gradient is needed last, because gradients come in the reverse order of the updates.
        self._kept: dict[Parkable, None] = {}
        self._kept_bytes = 0
        # The task that writes each gradient or activation that is being spilled, and the region that the task writes.
        self._spills: dict[Parkable, asyncio.Task[None]] = {}
        self._writing: dict[Parkable, Region] = {}
        # The gradients and activations that have a region on the durable tier.
        self._spilled: set[Parkable] = set()
        # The activations that are not freed, each with the id of the session whose client writes and reads it.
        self._activations: dict[Parkable, str] = {}
        # The bytes of the durable tier that the admission has reserved for the activations of each job, by its name.
        self.reserved_for_activations: Counter[str] = Counter()
        # The bytes of gradients, and those of activations, that were spilled since the start, by the class.
        self.spilled_ever: Counter[type[Parkable]] = Counter()
        # Tasks that wait for room. A failed spill cancels them, and its error is raised to their callers.
        self._waiting: set[asyncio.Future[ArenaRange]] = set()
        self._failure: StorageError | None = None
        self._patience = _Patience(self.relieve)
        host.when_room_is_short(self.relieve)

    @property
    def regions(self) -> Collection[Region]:
        """The regions of backing tiers that hold spilled gradients and activations."""
        return [memory.region for memory in self._spilled if memory.region is not None]

    @property
    def parked_bytes(self) -> int:
        """The bytes of the parked gradients in the arena, without activations."""
        return sum(memory.nbytes for memory in _of_kind(Gradient, (*self._kept, *self._spills)))

    @property
    def spilled_bytes(self) -> int:
        """The bytes of the durable tier that hold spilled gradients, without activations."""
        return self._region_bytes(Gradient)

    def activation_bytes(self, job: str | None = None) -> int:
        """Return the bytes of the activations of a job, or of all jobs, wherever they are."""
        return sum(each.nbytes for each in self._activations if job is None or each.job == job)

    def unparked_bytes(self, holder: str) -> int:
        """Return the bytes of the activations that the client of a session may touch."""
        own = (each for each, session in self._activations.items() if session == holder)
        return sum(each.nbytes for each in own if not each.is_parked)

    @property
    def activation_bytes_in_arena(self) -> int:
        """The bytes of activations in the arena, parked or not."""
        return sum(each.nbytes for each in self._activations if each.arena_range is not None)

    @property
    def spilled_activation_bytes(self) -> int:
        """The bytes of the durable tier that hold spilled activations."""
        return self._region_bytes(Activation)

    def _region_bytes(self, kind: type[Parkable]) -> int:
        spilled = (memory.region for memory in _of_kind(kind, self._spilled))
        return sum(region.nbytes for region in spilled if region is not None)

    def taken_bytes(self, kind: type[Parkable]) -> int:
        """Return the bytes that gradients, or activations, take of the durable tier, spills under way included."""
        return self._region_bytes(kind) + sum(self._writing[memory].nbytes for memory in _of_kind(kind, self._writing))

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
        dtype, numel = group.spec.slab_of_kind[Kind.GRAD].dtype, group.spec.numel
        gradient = Gradient(
            job=job,
            label=key.label(step),
            size_bytes=group.spec.layout(Kind.GRAD).nbytes,
            dtype=dtype,
            numel=numel,
            leaves_host=group.gradient_leaves_host,
        )
        gradient.arena_range = await self._room_for(gradient)
        return gradient

    async def allocate_activation(self, job: str, holder: str, nbytes: int) -> Activation:
        """Wait for room in the arena, and return an activation without values; see [Note: activations].

        Args:
            job: the name of the job.
            holder: the id of the session that asks.
            nbytes: its size.

        Raises:
            BudgetExceededError: there was no room before the deadline.
            StorageError: a parked gradient had to be spilled to make room, and this failed.
        """
        activation = Activation(job=job, label=f"an activation of job {job!r}", size_bytes=nbytes)
        self._activations[activation] = holder
        try:
            activation.arena_range = await self._room_for(activation)
        except BaseException:
            del self._activations[activation]
            raise
        return activation

    def tensor(self, gradient: Gradient) -> torch.Tensor:
        """Return the values of a gradient that is not parked, as a 1-D tensor over its memory in the arena."""
        assert gradient.arena_range is not None, "a gradient that is not parked is in the arena"
        return self._host.tensor(gradient.arena_range, gradient.dtype, gradient.numel)

    def park(self, memory: Parkable) -> None:
        """Park a gradient or an activation: the client does not touch it until it recalls it, so it may be spilled.

        This does not wait. A repeated call has no effect.
        """
        if memory.is_parked:
            return
        state = memory.enter(ParkVerb.PARK)
        if memory.is_used_up:
            self.free(memory)
            return
        if state is ParkState.SPILLED:
            # The client asked to recall this gradient and parks it again before its bytes were read. Its region on NVMe
            # still has the bytes, so the range in the arena is freed.
            self._free_range(memory)
        elif state is ParkState.KEPT:
            self._keep(memory)
            if memory.leaves_when_parked:
                self._begin_spill(memory)
        self.relieve()

    def free_after(self, update: asyncio.Task[None], gradient: Gradient) -> None:
        """Free a gradient as soon as its update is done."""
        # A done-callback of the update's task frees the gradient, and not the last line of the task, because a task
        # that is cancelled before it begins does not run at all.
        update.add_done_callback(lambda _: self.free(gradient))

    def free_when_used_up(self, gradient: Gradient) -> None:
        """Free a gradient as soon as its update is done and it is parked, because its client has no other use for it.

        A gradient that the client does not park stays until the client's lease ends.
        """
        assert gradient.update is not None, "the update has begun"
        gradient.has_last_use = True
        gradient.update.add_done_callback(lambda _: self._end_last_use(gradient))

    def _end_last_use(self, gradient: Gradient) -> None:
        """Free a gradient whose update is done, if it is parked, and give the next update the whole time to end."""
        self._patience.renew()
        if gradient.is_used_up:
            self.free(gradient)
        self.relieve()

    async def recall(self, memory: Parkable) -> None:
        """Bring a parked gradient or activation back to the arena, where the client may write to it again.

        Raises:
            NotFoundError: it was freed meanwhile.
            DamagedBlockError: the spilled bytes are damaged.
            DeviceStuckError: a device does not answer; the gradient is back as soon as it does.
            StorageError: there was no room for it before the deadline, or it cannot be read.
        """
        await self._backing.watch.unless_stuck(self._recall(memory))

    async def _recall(self, memory: Parkable) -> None:
        try:
            while self._begin_recall(memory) is not ParkState.IN_USE:
                if (spill := self._spills.get(memory)) is not None:
                    await asyncio.wait([spill])
                elif memory.arena_range is None:
                    await self._read_back(memory)
                else:
                    memory.enter(ParkVerb.END_RECALL)
                    self._free_region(memory)
        except BaseException:
            self.park(memory)
            raise

    def _begin_recall(self, memory: Parkable) -> ParkState:
        """Enter the state of bytes that the client waits for, also if it parked them again during an earlier recall."""
        state = memory.enter(ParkVerb.RECALL)
        self._unkeep(memory)
        return state

    async def _read_back(self, memory: Parkable) -> None:
        range_ = await self._room_for(memory)
        region = memory.region
        if region is None or memory.is_freed or memory.arena_range is not None:
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
        if memory.is_freed or memory.arena_range is not None:
            self._scratch.free(range_)
        else:
            memory.arena_range = range_

    def free(self, memory: Parkable) -> None:
        """Free the memory of a gradient as soon as no spill and no tile uses it. Idempotent."""
        if memory.is_freed:
            return
        memory.enter(ParkVerb.FREE)
        self._activations.pop(memory, None)
        self._unkeep(memory)
        if memory not in self._spills:
            self._free_range(memory)
            self._free_region(memory)

    def take_range(self, memory: Parkable) -> ArenaRange | None:
        """Free a gradient except for its range of the arena, and return the range.

        The client may still write to the range, so the caller passes it to `HostTier.free` only when no process can
        write to it any more. The result is None if the gradient is not in the arena.
        """
        range_, memory.arena_range = memory.arena_range, None
        self.free(memory)
        return None if range_ is None else self._scratch.hand_over(range_)

    def begin_read(self, gradient: Gradient) -> ArenaRange | Region:
        """Return where the bytes of a gradient are, and keep them there until `end_read` gets the result."""
        if gradient.is_in_arena:
            assert gradient.arena_range is not None
            gradient.readers += 1
            return gradient.arena_range
        assert gradient.region is not None, "a gradient has its bytes in a range or in a region"
        self._backing.hold(gradient.region)
        return gradient.region

    def end_read(self, gradient: Gradient, place: ArenaRange | Region) -> None:
        """Release the range or the region `place` that `begin_read` returned."""
        if not isinstance(place, ArenaRange):
            self._backing.free(place)
            return
        gradient.readers -= 1
        if gradient.is_freed or not gradient.is_in_arena:
            self._free_range(gradient)

    def relieve(self) -> None:
        """Begin to spill parked gradients if they exceed their room, or if requests wait for room.

        Gradients that an update under way will free are spilled only if no such update ends within PATIENCE_SECONDS,
        because a spill takes as long as the update's own reads and writes of so many bytes.
        """
        if not self._kept:
            return
        excess = self._kept_bytes - self._room()
        wanted = self._host.wanted_bytes + self._scratch.wanted_last_bytes
        short = wanted - sum(memory.nbytes for memory in self._spills)
        if max(excess, short) <= 0:
            return
        # A running update frees its gradient soon, so the gradients of running updates do not count against the room of
        # parked gradients. They are spilled only if a request waits for room.
        excess -= sum(memory.nbytes for memory in self._kept if memory.is_updating)
        for memory in list(self._in_leaving_order()):
            if max(short, 0 if memory.is_updating else excess) <= 0:
                continue
            if memory.will_be_used_up and self._patience.lasts():
                continue
            self._begin_spill(memory)
            short -= memory.nbytes
            excess -= memory.nbytes

    def relieve_jobs(self, jobs: Collection[str]) -> None:
        """Begin to spill one parked gradient of the jobs with these names, unless one is being spilled."""
        if any(memory.job in jobs for memory in self._spills):
            return
        found = next((memory for memory in self._in_leaving_order() if memory.job in jobs), None)
        if found is not None:
            self._begin_spill(found)

    async def close(self) -> None:
        """Wait until the spills under way have ended. The engine calls this when it closes."""
        self._patience.renew()
        while self._spills:
            await asyncio.wait(list(self._spills.values()))

    def _in_leaving_order(self) -> Iterator[Parkable]:
        """Yield the parked bytes that may be spilled, in the order in which they are to leave the arena."""
        leaving = (memory for memory in self._kept if memory.may_leave(self.reserved_for_activations))
        yield from sorted(leaving, key=lambda memory: memory.leaving_rank)

    def _keep(self, memory: Parkable) -> None:
        self._kept[memory] = None
        self._kept_bytes += memory.nbytes

    def _unkeep(self, memory: Parkable) -> None:
        if memory in self._kept:
            del self._kept[memory]
            self._kept_bytes -= memory.nbytes

    async def _room_for(self, memory: Parkable) -> ArenaRange:
        """Wait for a range of the arena. If a spill fails meanwhile, this raises the spill's error."""
        if memory.is_served_last:
            allocation = self._scratch.allocate_last(memory.job, memory.nbytes, memory.label)
        else:
            allocation = self._scratch.allocate(memory.job, memory.nbytes, from_top=True)
        if not self._kept and not self._spills:
            return await allocation
        waiting = asyncio.ensure_future(allocation)
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._scratch.free_granted(waiting) or waiting in self._waiting or self._failure is None:
                raise
            raise type(self._failure)(*self._failure.args) from self._failure
        finally:
            self._waiting.discard(waiting)

    def _begin_spill(self, memory: Parkable) -> None:
        self._unkeep(memory)
        memory.enter(ParkVerb.BEGIN_SPILL)
        self._spills[memory] = unlogged(asyncio.ensure_future(self._spill(memory)))

    async def _spill(self, memory: Parkable) -> None:
        """Write a parked gradient to a region, and free its range unless it was recalled meanwhile."""
        range_ = memory.arena_range
        try:
            if range_ is None or memory.is_freed:
                # The gradient was freed, or its range in the arena was taken from it, before this task began to run, so
                # there are no bytes to spill.
                return
            async with self._backing.new_version(self._backing.durable.name, memory.nbytes, memory.label) as region:
                self._writing[memory] = region
                view = self._host.view(range_)
                await self._backing.durable.write_from(region, 0, view, Priority.UPDATE)
                memory.region = self._writing.pop(memory)
                self._spilled.add(memory)
                self.spilled_ever[type(memory)] += memory.nbytes
        except StorageError as error:
            self._fail(memory, error)
        finally:
            self._writing.pop(memory, None)
            del self._spills[memory]
            self._end_spill(memory)

    def _end_spill(self, memory: Parkable) -> None:
        state = memory.enter(ParkVerb.FAIL_SPILL if memory.region is None else ParkVerb.END_SPILL)
        if state is ParkState.KEPT:
            self._keep(memory)
        elif state is ParkState.SPILLED:
            self._free_range(memory)
            self.relieve()
        elif state is ParkState.FREED:
            self._free_range(memory)
            self._free_region(memory)

    def _fail(self, memory: Parkable, error: StorageError) -> None:
        """End a failed spill: the gradient stays in the arena, and the requests that wait for room raise the error."""
        log.error("%s cannot be spilled: %s", memory.label, error)
        self._failure = error
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            each.cancel()

    def _free_range(self, memory: Parkable) -> None:
        """Free the range of a gradient, unless tiles of an update read it: then the last of them frees it."""
        if memory.arena_range is not None and not memory.readers:
            range_, memory.arena_range = memory.arena_range, None
            self._scratch.free(range_)

    def _free_region(self, memory: Parkable) -> None:
        self._spilled.discard(memory)
        region, memory.region = memory.region, None
        if region is not None:
            self._backing.free(region)


def _of_kind(kind: type[Parkable], memories: Iterable[Parkable]) -> Iterator[Parkable]:
    """Yield those of the given gradients and activations that are of one kind: `Gradient` or `Activation`."""
    return (memory for memory in memories if isinstance(memory, kind))
