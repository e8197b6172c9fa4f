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
tier for those of its job.

Requests for activations wait in a queue of their own, behind all other requests: a client recalls activations ahead of
their use, and frees room only when it goes on, so the gradient or the unit that it needs to go on must not wait behind
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from storage.errors import BudgetExceededError, NotFoundError, StorageError
from storage.scratch import ScratchRanges
from storage.shard import DType, Kind, SlabKey
from storage.shown_sizes import shown_size
from storage.slab import Group
from storage.tiers.arena import ArenaRange
from storage.tiers.backing import BackingTiers
from storage.tiers.base import round_up
from storage.tiers.contract import Region
from storage.tiers.host import HostTier
from storage.tiers.io_engine import Priority
from storage.waiting import Alarm, unlogged

log = logging.getLogger(__name__)

# A request waits for so long until the next update ends that frees its gradient. After that such gradients are spilled,
# too. The update of a large unit takes 0.3 s on a device of 1 GB/s. The wait has an end because an update may itself
# wait for bytes that need room.
PATIENCE_SECONDS = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Parkable:
    """Bytes within a step that a client can park: a gradient or an activation.

    Attributes:
        job: the name of its job.
        label: its name in error texts, made as those of versions are.
        size_bytes: its bytes.
        arena_range: where it is in the arena; None: it was spilled.
        region: where it is on the durable tier; None: it was not spilled.
        is_parked: whether the client has promised not to touch it until it recalls it.
        is_freed: whether its memory is free, or will be when the last user has gone.
    """

    job: str
    label: str
    size_bytes: int
    arena_range: ArenaRange | None = None
    region: Region | None = None
    is_parked: bool = False
    is_freed: bool = False
    _readers: int = 0
    _spilling: asyncio.Task[None] | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes in whole pages."""
        return round_up(self.size_bytes)

    @property
    def is_in_arena(self) -> bool:
        """Whether `Gradients.begin_read` finds it in the arena."""
        # Between the end of a spill and the end of the last tile that reads the range, it is at both places.
        is_left = self.is_parked and self.region is not None and self._spilling is None
        return self.arena_range is not None and not is_left

    @property
    def is_updating(self) -> bool:
        """Whether an update reads it now, or is about to."""
        return False

    @property
    def will_be_used_up(self) -> bool:
        """Whether an update under way frees it."""
        return False

    @property
    def leaving_rank(self) -> int:
        """Its place among what leaves the arena: lower ones leave first."""
        return 1

    @property
    def leaves_when_parked(self) -> bool:
        """Whether it leaves the arena as soon as it is parked, also if there is room."""
        return False


@dataclass(slots=True, eq=False, kw_only=True)
class Gradient(Parkable):
    """The gradient of one group for one step.

    Attributes:
        dtype: the type of its elements.
        numel: their number.
        leaves_host: whether it is placed on a backing tier.
        update: the update that uses it, from its begin until it is withdrawn; None: there is none.
        waits_for_seal: whether the update waits until its step is sealed, which may be long.
        has_last_use: whether the update is the last use that the client makes of it.
    """

    dtype: DType
    numel: int
    leaves_host: bool = False
    update: asyncio.Task[None] | None = None
    waits_for_seal: bool = False
    has_last_use: bool = False

    @property
    def is_used_up(self) -> bool:
        """Whether it is parked, and its last use is over, so that its memory can be freed."""
        is_over = self.update is not None and self.update.done() and not self.update.cancelled()
        return self.is_parked and self.has_last_use and is_over

    @property
    def is_updating(self) -> bool:
        """Whether an update reads it now, or is about to."""
        return self.update is not None and not self.update.done() and not self.waits_for_seal

    @property
    def will_be_used_up(self) -> bool:
        """Whether an update under way frees it."""
        return self.has_last_use and self.is_updating

    @property
    def leaving_rank(self) -> int:
        """Its place among what leaves the arena: lower ones leave first.

        First come those whose update is done, because they are read again only if it is withdrawn; last those that an
        update is about to read.
        """
        if self.update is None or self.waits_for_seal:
            return 1
        return 0 if self.update.done() else 2

    @property
    def leaves_when_parked(self) -> bool:
        """Whether it leaves the arena as soon as it is parked, also if there is room.

        It stays if an early update has read it or is about to, because then its bytes are most probably not needed
        again.
        """
        return self.leaves_host and (self.update is None or self.waits_for_seal)


@dataclass(slots=True, eq=False, kw_only=True)
class Activation(Parkable):
    """An activation of a client's forward, until the client releases it.

    Attributes:
        holder: the id of the session whose client writes and reads it.
    """

    holder: str


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A request for an activation that waits for room, since a time on the loop's clock."""

    activation: Activation
    since: float
    granted: asyncio.Future[ArenaRange]


class _Patience:
    """The time for which requests wait for the next update that frees its gradient.

    Args:
        act: called when the time is over. Only until it returns, `lasts` is false.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def lasts(self) -> bool:
        """Return whether requests may still wait. The first call begins the time."""
        if self._timer is None and not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._end)
        return not self._is_over

    def renew(self) -> None:
        """Have the next call of `lasts` begin the time anew."""
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
    """The gradients and activations of all jobs of one engine."""

    def __init__(self, host: HostTier, backing: BackingTiers, scratch: ScratchRanges, room: Callable[[], int]) -> None:
        """Keep the parts of the engine. `room` returns the bytes of the arena that parked gradients may take."""
        self._host = host
        self._backing = backing
        self._scratch = scratch
        self._room = room
        # The parked gradients and activations in the arena that are not being spilled, in the order in which they were
        # parked. The first gradient is needed last, because gradients come in the reverse order of the updates.
        self._kept: dict[Parkable, None] = {}
        self._kept_bytes = 0
        self._spilling: set[Parkable] = set()
        # The regions that are being written for some of these.
        self._writing: dict[Parkable, Region] = {}
        # The gradients and activations that have a region on the durable tier.
        self._spilled: set[Parkable] = set()
        # The activations that are not freed.
        self._activations: set[Activation] = set()
        # The bytes of the durable tier that the admission has reserved for the activations of each job, by its name.
        self.reserved_for_activations: Counter[str] = Counter()
        # The bytes of activations that were spilled since the start.
        self.spilled_activations_ever = 0
        # Tasks that wait for room, which a failed spill ends with its error.
        self._waiting: set[asyncio.Future[ArenaRange]] = set()
        self._failure: StorageError | None = None
        self._patience = _Patience(self.relieve)
        # The activations that wait for room, in the order of their requests.
        self._queue: deque[_Request] = deque()
        host.when_room_is_short(self.relieve)
        host.add_queue_behind(lambda: (request.since for request in self._queue if not request.granted.done()))
        host.when_room_is_made(self._serve_activations)

    @property
    def regions(self) -> Collection[Region]:
        """The regions that hold spilled gradients and activations."""
        return [memory.region for memory in self._spilled if memory.region is not None]

    @property
    def parked_bytes(self) -> int:
        """The bytes of the parked gradients in the arena, without activations."""
        return sum(memory.nbytes for memory in (*self._kept, *self._spilling) if isinstance(memory, Gradient))

    @property
    def spilled_bytes(self) -> int:
        """The bytes of the durable tier that hold spilled gradients, without activations."""
        return self._region_bytes(Gradient)

    def activation_bytes(self, job: str | None = None) -> int:
        """Return the bytes of the activations of a job, or of all jobs, wherever they are."""
        return sum(each.nbytes for each in self._activations if job is None or each.job == job)

    def unparked_bytes(self, holder: str) -> int:
        """Return the bytes of the activations that the client of a session may touch."""
        return sum(each.nbytes for each in self._activations if each.holder == holder and not each.is_parked)

    @property
    def activation_bytes_in_arena(self) -> int:
        """The bytes of activations in the arena, parked or not."""
        return sum(each.nbytes for each in self._activations if each.arena_range is not None)

    @property
    def spilled_activation_bytes(self) -> int:
        """The bytes of the durable tier that hold spilled activations."""
        return self._region_bytes(Activation)

    def _region_bytes(self, kind: type[Parkable]) -> int:
        spilled = (memory.region for memory in self._spilled if isinstance(memory, kind))
        return sum(region.nbytes for region in spilled if region is not None)

    def taken_bytes(self, kind: type[Parkable]) -> int:
        """Return the bytes that gradients, or activations, take of the durable tier, spills under way included."""
        writing = (region.nbytes for memory, region in self._writing.items() if isinstance(memory, kind))
        return self._region_bytes(kind) + sum(writing)

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
            size_bytes=numel * dtype.itemsize,
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
        activation = Activation(job=job, label=f"an activation of job {job!r}", size_bytes=nbytes, holder=holder)
        self._activations.add(activation)
        try:
            activation.arena_range = await self._room_for(activation)
        except BaseException:
            self._activations.discard(activation)
            raise
        return activation

    def tensor(self, gradient: Gradient) -> torch.Tensor:
        """Return the values of a gradient that is not parked, as a 1-D tensor over its memory in the arena."""
        assert gradient.arena_range is not None, "a gradient that is not parked is in the arena"
        return self._host.tensor(gradient.arena_range, gradient.dtype, gradient.numel)

    def park(self, memory: Parkable) -> None:
        """Take note that the client does not touch a gradient until it recalls it. It does not wait; idempotent."""
        if memory.is_parked or memory.is_freed:
            return
        memory.is_parked = True
        if isinstance(memory, Gradient) and memory.is_used_up:
            self.free(memory)
            return
        # The end of a spill under way decides about the range itself.
        if memory._spilling is None:
            if memory.region is not None:
                # The recall that waited for the spill was cancelled before it freed the region, which has the bytes.
                self._free_range(memory)
            elif memory.arena_range is not None and memory.leaves_when_parked:
                self._begin_spill(memory)
            elif memory.arena_range is not None:
                self._keep(memory)
        self.relieve()

    def free_when_used_up(self, gradient: Gradient) -> None:
        """Free a gradient as soon as its update is done and it is parked, because its client has no other use for it.

        A gradient that the client does not park stays until the client's lease ends.
        """
        assert gradient.update is not None, "the update has begun"
        gradient.has_last_use = True
        gradient.update.add_done_callback(lambda _: self._end_last_use(gradient))

    def _end_last_use(self, gradient: Gradient) -> None:
        """Free a gradient whose update is done, if it is parked, and have patience with the next one."""
        self._patience.renew()
        if gradient.is_used_up:
            self.free(gradient)
        self.relieve()

    async def recall(self, memory: Parkable) -> None:
        """Bring a parked gradient or activation back to the arena, where the client may write to it again.

        Raises:
            NotFoundError: it was freed meanwhile.
            DamagedBlockError: the spilled bytes are damaged.
            StorageError: there was no room for it before the deadline, or it cannot be read.
        """
        memory.is_parked = False
        self._unkeep(memory)
        try:
            if memory._spilling is not None:
                await asyncio.wait([memory._spilling])
            while memory.arena_range is None and not memory.is_freed:
                await self._read_back(memory)
        except BaseException:
            self.park(memory)
            raise
        if memory.is_freed:
            raise NotFoundError(f"{memory.label} is freed: its lease has ended, or an update was its last use")
        # The client may have parked it again meanwhile, before it had an answer to this call.
        memory.is_parked = False
        self._unkeep(memory)
        if memory.region is not None:
            self._free_region(memory)

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
        memory.is_freed = True
        if isinstance(memory, Activation):
            self._activations.discard(memory)
        self._unkeep(memory)
        if memory._spilling is None:
            self._free_range(memory)
            if memory.region is not None:
                self._free_region(memory)

    def take_range(self, memory: Parkable) -> ArenaRange | None:
        """Free a gradient but for its range of the arena, which it returns.

        The client may still write to the range, so the caller passes it to `HostTier.free` when no process can. None is
        returned if the gradient is not in the arena.
        """
        range_, memory.arena_range = memory.arena_range, None
        self.free(memory)
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
        """Begin to spill parked gradients if they exceed their room, or if requests wait for room.

        Those that an update under way frees are spilled only if no such update ends within PATIENCE_SECONDS, because a
        spill takes as long as the update's own reads and writes of so many bytes.
        """
        if not self._kept:
            return
        excess = self._kept_bytes - self._room()
        wanted = self._host.wanted_bytes + sum(request.activation.nbytes for request in self._queue)
        short = wanted - sum(memory.nbytes for memory in self._spilling)
        if max(excess, short) <= 0:
            return
        # An update that runs frees its gradient soon, so only a request that waits has it spilled.
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
        """Begin to spill one parked gradient of these jobs, unless one is being spilled."""
        if any(memory.job in jobs for memory in self._spilling):
            return
        found = next((memory for memory in self._in_leaving_order() if memory.job in jobs), None)
        if found is not None:
            self._begin_spill(found)

    async def close(self) -> None:
        """Wait for the spills under way."""
        self._patience.renew()
        while tasks := [memory._spilling for memory in self._spilling if memory._spilling is not None]:
            await asyncio.wait(tasks)

    def _in_leaving_order(self) -> Iterator[Parkable]:
        """Yield what is parked in the arena and may be spilled, in the order in which it is to leave the arena."""
        leaving = (memory for memory in self._kept if self._may_spill(memory))
        yield from sorted(leaving, key=lambda memory: memory.leaving_rank)

    def _may_spill(self, memory: Parkable) -> bool:
        return not isinstance(memory, Activation) or memory.job in self.reserved_for_activations

    def _keep(self, memory: Parkable) -> None:
        self._kept[memory] = None
        self._kept_bytes += memory.nbytes

    def _unkeep(self, memory: Parkable) -> None:
        if memory in self._kept:
            del self._kept[memory]
            self._kept_bytes -= memory.nbytes

    async def _room_for(self, memory: Parkable) -> ArenaRange:
        """Wait for a range of the arena. A spill that fails meanwhile ends the wait with its error."""
        if isinstance(memory, Activation):
            allocation = self._room_for_activation(memory)
        else:
            allocation = self._scratch.allocate(memory.job, memory.nbytes, from_top=True)
        if not self._kept and not self._spilling:
            return await allocation
        waiting = asyncio.ensure_future(allocation)
        self._waiting.add(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if self._free_granted(waiting) or waiting in self._waiting or self._failure is None:
                raise
            raise type(self._failure)(*self._failure.args) from self._failure
        finally:
            self._waiting.discard(waiting)

    def _free_granted(self, request: asyncio.Future[ArenaRange]) -> bool:
        """Free the room that a request got at the moment at which its caller was cancelled; return whether it did."""
        if not request.done() or request.cancelled() or request.exception() is not None:
            return False
        self._scratch.free(request.result())
        return True

    async def _room_for_activation(self, activation: Activation) -> ArenaRange:
        """Wait until no other request waits and there is room; see [Note: activations].

        Raises:
            BudgetExceededError: there was no room before the deadline.
        """
        loop = asyncio.get_running_loop()
        request = _Request(activation, loop.time(), loop.create_future())
        self._queue.append(request)
        self._serve_activations()
        if not request.granted.done():
            self._host.announce_shortage()
        deadline = Alarm(self._host.deadline(), partial(self._refuse, request))
        try:
            return await request.granted
        except asyncio.CancelledError:
            self._free_granted(request.granted)
            raise
        finally:
            deadline.cancel()
            if request in self._queue:
                self._queue.remove(request)
                self._serve_activations()

    def _serve_activations(self) -> None:
        """Grant the requests for activations for which there is room, in their order."""
        while self._queue:
            request = self._queue[0]
            activation = request.activation
            if request.granted.done():
                self._queue.popleft()
                continue
            range_ = self._scratch.try_allocate(activation.job, activation.nbytes)
            if range_ is None:
                return
            self._queue.popleft()
            request.granted.set_result(range_)

    def _refuse(self, request: _Request) -> None:
        """Fail a request for an activation whose deadline has passed."""
        activation = request.activation
        if not request.granted.done():
            request.granted.set_exception(
                BudgetExceededError(
                    f"host_budget {shown_size(self._host.budget_bytes)} had no room for {activation.label} of "
                    f"{shown_size(activation.nbytes)}: {shown_size(self._host.used_bytes)} are used; raise "
                    "host_budget, or move fewer activations"
                )
            )

    def _begin_spill(self, memory: Parkable) -> None:
        self._unkeep(memory)
        self._spilling.add(memory)
        memory._spilling = unlogged(asyncio.ensure_future(self._spill(memory)))

    async def _spill(self, memory: Parkable) -> None:
        """Write a parked gradient to a region, and free its range unless it was recalled meanwhile."""
        range_ = memory.arena_range
        try:
            if range_ is None or memory.is_freed:
                # The gradient was freed, or its range was taken, before this task had its first turn.
                return
            async with self._backing.new_version(self._backing.durable.name, memory.nbytes, memory.label) as region:
                self._writing[memory] = region
                view = self._host.view(range_)
                await self._backing.durable.write_from(region, 0, view, Priority.UPDATE)
                memory.region = self._writing.pop(memory)
                self._spilled.add(memory)
                if isinstance(memory, Activation):
                    self.spilled_activations_ever += memory.nbytes
        except StorageError as error:
            self._fail(memory, error)
        finally:
            self._writing.pop(memory, None)
            self._spilling.discard(memory)
            memory._spilling = None
            self._end_spill(memory)

    def _end_spill(self, memory: Parkable) -> None:
        if memory.is_freed:
            self._free_range(memory)
            if memory.region is not None:
                self._free_region(memory)
        elif not memory.is_parked:
            # It was recalled while it was written. `recall` frees the region.
            pass
        elif memory.region is None:
            self._keep(memory)
        else:
            self._free_range(memory)
            self.relieve()

    def _fail(self, memory: Parkable, error: StorageError) -> None:
        """Take note that a spill has failed: the gradient stays in the arena, and waiting requests get the error."""
        log.error("%s cannot be spilled: %s", memory.label, error)
        self._failure = error
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            each.cancel()

    def _free_range(self, memory: Parkable) -> None:
        """Free the range of a gradient, unless tiles of an update read it: then the last of them frees it."""
        if memory.arena_range is not None and not memory._readers:
            range_, memory.arena_range = memory.arena_range, None
            self._scratch.free(range_)

    def _free_region(self, memory: Parkable) -> None:
        self._spilled.discard(memory)
        region, memory.region = memory.region, None
        if region is not None:
            self._backing.free(region)
