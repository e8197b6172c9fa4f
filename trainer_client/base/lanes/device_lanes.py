"""The lanes of a rank on an accelerator: streams for copies and collectives, and what happens after each copy.

This module owns the streams, the staging memory on the device, and every tensor that a copy still reads. It must never
make the host wait for the device, except where a bound or the caller asks for it.

[Note: lanes] A rank on an accelerator gives its work to five queues, which run beside each other:

- compute: the caller's own stream, with forward and backward;
- in: copies from host memory to the device, into staging slots;
- comm: collectives, in the order of their calls;
- out: copies of gradients and their norms from the device to host memory;
- beside: copies to host memory that another thread begins, of states whose home is the device. They have a queue of
  their own, so that no gradient has to wait for them.

Events order the queues, so the host does not wait and runs ahead of the device:

    host memory --in--> slot --(comm: all-gather)--> slot --compute--> flat buffer
    gradient --(comm: reduce-scatter)--> partition --out--> host memory

[Note: no block changes its stream] torch's allocator gives a freed block to the next tensor of the same stream at once,
because work of one stream is ordered. A block that another stream still reads or writes would be overwritten. So each
block is allocated and freed for one stream: flat buffers for the compute stream, and slots for the in-lane, which are
never freed while they are in use. Where another stream has to use a block, its tensor is kept here until that use is
over.

[Note: calls that are owed] What may only happen after a copy, such as the return of a lease, is kept in a queue, and
made in the next call of `poll` that finds the copy's event complete. If a queue has become too long, `poll` waits for
its oldest event, so that neither leases nor memory of the device pile up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from trainer_client.base.lanes.lanes import WHOLE, Act, CopyAhead, HostLanes, Lanes, PendingCopy

SLOTS = 2

# The store expects a rank to lease two units at a time: one that it copies, and the next one.
_MOST_COPIES_IN = 1

# The gradients of so many flat groups may wait on the device for their copy.
MOST_COPIES_OUT = 4

# The time that `close` waits for copies. All copies end, unless the device is lost or waits for a rank that has gone.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.001


class Lane:
    """A stream of the device. The events of one lane are complete in the order in which they were recorded."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device=device)

    def wait_for(self, event: torch.Event | None) -> None:
        """Begin what comes next only when `event` is complete, or at once if it is None."""
        if event is not None:
            self.stream.wait_event(event)

    def mark(self) -> torch.Event:
        """Return the event that is complete when the lane has done all that it was given."""
        return self.stream.record_event()


class StagingSlot:
    """Staging memory on the device, which the in-lane owns; see [Note: no block changes its stream].

    Life: `begin`, then the in-lane fills it, `filled`; comm may gather in it; the compute stream reads it, `drained`.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self._device = device
        self._lane = lane
        self._memory: torch.Tensor | None = None
        self._drained: torch.Event | None = None

    def begin(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` for the in-lane to write to, when what was in the slot is read."""
        self.wait_until_drained()
        if self._memory is None or self._memory.numel() < nbytes:
            # The former memory is freed before more is allocated. The in-lane has waited, so it may use it again.
            self._memory = None
            # This may be a forward in inference mode, and its tensors could not be written to in a later forward.
            with self._lane.stream, torch.inference_mode(False):
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[:nbytes]

    def wait_until_drained(self) -> None:
        self._lane.wait_for(self._drained)

    @property
    def drained(self) -> torch.Event | None:
        """The event after which no stream reads the slot any more; None if it was never read."""
        return self._drained

    def free(self) -> None:
        """Free the memory. The caller knows that no stream uses it any more."""
        self._memory = None

    def note_drained(self, event: torch.Event) -> None:
        """Take note of the event after which the slot may be written again."""
        self._drained = event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owed:
    """A call that is owed after an event.

    Attributes:
        event: it is complete when the call may be made.
        act: the call.
    """

    event: torch.Event
    act: Act


class CopyOut:
    """Copies from the device to host memory that were begun."""

    def __init__(self, lanes: DeviceLanes, event: torch.Event, used: tuple[torch.Tensor, ...], act: Act | None) -> None:
        self._lanes = lanes
        self._event = event
        # The memory that the copies read, until it is known that they are done.
        self._used = used
        self._act = act

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._lanes.finish_copy_out(self)

    def end(self) -> None:
        """Wait until the copies are done, free the memory that they read, and make the call that is owed."""
        self._lanes.wait_for(self._event)
        self._used = ()
        self._lanes.remove(self)
        act, self._act = self._act, None
        if act is not None:
            act()


class SlotAhead:
    """Bytes on their way into a slot that is theirs until they land."""

    def __init__(self, lanes: DeviceLanes, slot: StagingSlot, staged: torch.Tensor, filled: torch.Event) -> None:
        self._lanes = lanes
        self._slot = slot
        self._staged: torch.Tensor | None = staged
        self._filled = filled

    @property
    def is_done(self) -> bool:
        return self._filled.query()

    def wait(self) -> None:
        self._lanes.wait_for(self._filled)

    def land(self, target: torch.Tensor) -> None:
        staged, self._staged = self._staged, None
        assert staged is not None, "land or drop was called already"
        self._lanes.land(target, staged, self._slot, self._filled)

    def drop(self) -> None:
        # The next copy to the slot is work of the in-lane, too, so it comes after this one.
        if self._staged is not None:
            self._staged = None
            self._lanes.give_back(self._slot)


class StatesOut:
    """Copies to host memory that another thread than the trainer's begins, one thread at a time."""

    def __init__(self, lane: Lane, ready: torch.Event) -> None:
        """Begin no copy yet; `ready` is the event behind which the values are there."""
        self._lane = lane
        self._ready = ready

    @contextmanager
    def copying(self, check: Act) -> Iterator[None]:
        self._lane.wait_for(self._ready)
        with self._lane.stream:
            yield
        self._wait_until_copied(self._lane.mark(), check)

    def _wait_until_copied(self, copied: torch.Event, check: Act) -> None:
        # The thread looks again and again, because nothing ends a host's wait for an event that does not come.
        while not copied.query():
            check()
            time.sleep(_POLL_SECONDS)


class DeviceClock:
    """The times of a device's events as seconds of time.monotonic().

    It owns the events that were measured and are not complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: deque[tuple[torch.Event, torch.Event, Callable[[float, float], None]]] = deque()
        # An event and when it was complete. All other times are those between it and the other event.
        self._origin: tuple[torch.Event, float] | None = None

    def mark(self) -> torch.Event:
        """Return an event behind the work that the current stream was given."""
        if self._origin is None:
            origin = self._record()
            origin.synchronize()
            self._origin = origin, time.monotonic()
        return self._record()

    def measure(self, begin: torch.Event, end: torch.Event, report: Callable[[float, float], None]) -> None:
        """Call `report` with the times of both events in the first `poll` that finds them complete."""
        self._measured.append((begin, end, report))

    def poll(self) -> None:
        while self._measured and self._measured[0][1].query():
            begin, end, report = self._measured.popleft()
            report(self._time_of(begin), self._time_of(end))

    def _record(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _time_of(self, event: torch.Event) -> float:
        assert self._origin is not None, "made with the first mark"
        origin, seconds = self._origin
        return seconds + origin.elapsed_time(event) / 1000


class DeviceStopwatch:
    """A measurement of the work that a stream of the device was given since."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._begin = clock.mark()

    def stop(self, report: Callable[[float, float], None]) -> None:
        self._clock.measure(self._begin, self._clock.mark(), report)


class DeviceLanes:
    """The lanes between host memory and one accelerator; see [Note: lanes]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._comm, self._out, self._beside = (Lane(device) for _ in range(4))
        self._slots = deque(StagingSlot(device, self._in) for _ in range(SLOTS))
        # The slots of `copy_ahead` that no bytes have, and all of them.
        self._free_ahead: deque[StagingSlot] = deque()
        self._all_ahead: list[StagingSlot] = []
        self._after_in: deque[_Owed] = deque()
        self._copies_out: deque[CopyOut] = deque()
        self._wait: Callable[[torch.Event], None] = torch.Event.synchronize
        # The tensors of collectives, with the events after which these do not use them any more.
        self._used_by_comm: deque[tuple[torch.Event, tuple[torch.Tensor, ...]]] = deque()
        self._clock = DeviceClock(device)
        self._report_copy_in: Callable[[int, float, float], None] = lambda nbytes, began, ended: None

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> None:
        slot = self._next_slot()
        staged = slot.begin(target.nbytes)
        self._fill(staged, source, pieces)
        compute = self._compute
        self._wait_until_filled(compute, self._in.mark())
        target.copy_(staged.view(target.dtype))
        slot.note_drained(compute.record_event())

    def copy_ahead(self, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> CopyAhead:
        if not self._free_ahead:
            self._all_ahead.append(StagingSlot(self._device, self._in))
            self._free_ahead.append(self._all_ahead[-1])
        slot = self._free_ahead.popleft()
        staged = slot.begin(source.nbytes)
        self._fill(staged, source, pieces)
        return SlotAhead(self, slot, staged, self._in.mark())

    def land(self, target: torch.Tensor, staged: torch.Tensor, slot: StagingSlot, filled: torch.Event) -> None:
        """Copy the bytes of a slot to where they are used, when they are there, and give the slot back."""
        compute = self._compute
        self._wait_until_filled(compute, filled)
        target.copy_(staged)
        slot.note_drained(compute.record_event())
        self.give_back(slot)

    def give_back(self, slot: StagingSlot) -> None:
        """Take a slot back for the next `copy_ahead`."""
        self._free_ahead.append(slot)

    @contextmanager
    def gathering(
        self, flat: torch.Tensor, first: int, last: int, source: torch.Tensor, pieces: Iterable[slice] = WHOLE
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if last - first == flat.numel():
            # This rank is alone, so its partition is all there is to gather.
            if source.device == flat.device:
                flat.copy_(source)
            else:
                self.copy_in(flat, source, pieces)
            yield flat, flat
            return
        compute, slot = self._compute, self._next_slot()
        whole = slot.begin(flat.nbytes).view(flat.dtype)
        if source.device == flat.device:
            partition = source
            self._wait_until_given(compute.record_event())
        else:
            partition = whole[first:last]
            self._fill(partition.view(torch.uint8), source, pieces)
        self._wait_until_filled(self._comm.stream, self._in.mark())
        try:
            with self._comm.stream:
                yield whole, partition
        except BaseException:
            slot.note_drained(self._comm.mark())
            raise
        self._wait_until_gathered(compute, self._comm.mark())
        flat.copy_(whole)
        slot.note_drained(compute.record_event())

    def after_copies_in(self, act: Act) -> None:
        self._after_in.append(_Owed(event=self._in.mark(), act=act))

    @contextmanager
    def communicating(self, *used: torch.Tensor) -> Iterator[None]:
        self._wait_until_given(self._compute.record_event())
        try:
            with self._comm.stream:
                yield
        finally:
            self._keep_until(self._comm.mark(), used)

    def rejoin(self) -> None:
        self._compute.wait_event(self._comm.mark())

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act | None = None) -> PendingCopy:
        self._wait_until_ready(self._compute.record_event())
        with self._out.stream:
            for target, values in copies:
                target.copy_(values, non_blocking=True)
        copy = CopyOut(self, self._out.mark(), tuple(values for _, values in copies), act)
        self._copies_out.append(copy)
        return copy

    def after_copies(self, act: Act) -> None:
        self._out.wait_for(self._in.mark())
        self._copies_out.append(CopyOut(self, self._out.mark(), (), act))

    def beside(self) -> StatesOut:
        return StatesOut(self._beside, self._compute.record_event())

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def wait_with(self, wait: Callable[[torch.Event], None]) -> None:
        self._wait = wait

    def wait_for(self, event: torch.Event) -> None:
        """Have the host wait for an event, unless it is complete."""
        if not event.query():
            self._wait(event)

    def remove(self, copy: CopyOut) -> None:
        """Take note that a copy to host memory is done."""
        self._copies_out.remove(copy)

    def stopwatch(self) -> DeviceStopwatch:
        return DeviceStopwatch(self._clock)

    def report_copies_in(self, report: Callable[[int, float, float], None]) -> None:
        self._report_copy_in = report

    def poll(self) -> None:
        while self._after_in and (len(self._after_in) > _MOST_COPIES_IN or self._after_in[0].event.query()):
            self._pay()
        while self._copies_out and (len(self._copies_out) > MOST_COPIES_OUT or self._copies_out[0].is_done):
            self._end_copy_out()
        while self._used_by_comm and self._used_by_comm[0][0].query():
            self._used_by_comm.popleft()
        self._clock.poll()

    def finish_copies_in(self) -> None:
        while self._after_in:
            self._pay()

    def finish_copy_out(self, copy: CopyOut) -> None:
        """Wait for a copy and for all copies that were begun before it."""
        while copy in self._copies_out:
            self._end_copy_out()

    def finish(self) -> None:
        self.finish_copies_in()
        while self._copies_out:
            self._end_copy_out()

    def close(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        # torch raises this if the device is lost. It copies nothing any more then.
        with suppress(RuntimeError):
            events = [self._in.mark(), self._comm.mark(), self._out.mark(), self._beside.mark()]
            slots = (*self._slots, *self._all_ahead)
            events += [slot.drained for slot in slots if slot.drained is not None]
            while not (are_done := all(event.query() for event in events)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            # Threads of the session, which know these lanes, may end later. Two units of memory must not wait for them.
            for slot in slots if are_done else ():
                slot.free()
        self._after_in.clear()
        self._copies_out.clear()
        self._used_by_comm.clear()

    @property
    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def _next_slot(self) -> StagingSlot:
        """Return the slot that was used least recently."""
        self._slots.rotate(-1)
        return self._slots[-1]

    def _fill(self, staged: torch.Tensor, source: torch.Tensor, pieces: Iterable[slice]) -> None:
        """Have the in-lane copy bytes of host memory into a part of a slot."""
        with self._in.stream:
            stopwatch = self.stopwatch()
            for piece in pieces:
                staged[piece].copy_(source[piece], non_blocking=True)
            stopwatch.stop(partial(self._report_copy_in, staged.nbytes))

    # Each wait has a method of its own, so that tests can leave one of them out.

    def _wait_until_filled(self, stream: torch.Stream, filled: torch.Event) -> None:
        stream.wait_event(filled)

    def _wait_until_gathered(self, stream: torch.Stream, gathered: torch.Event) -> None:
        stream.wait_event(gathered)

    def _wait_until_given(self, given: torch.Event) -> None:
        self._comm.wait_for(given)

    def _wait_until_ready(self, ready: torch.Event) -> None:
        self._out.wait_for(ready)

    def _pay(self) -> None:
        """Make the oldest call that is owed after copies into the device, when they are done."""
        self.wait_for(self._after_in[0].event)
        self._after_in.popleft().act()

    def _end_copy_out(self) -> None:
        """End the oldest copy to host memory, when it is done."""
        self._copies_out[0].end()

    def _keep_until(self, event: torch.Event, used: tuple[torch.Tensor, ...]) -> None:
        """Keep tensors that the comm lane uses until then."""
        self._used_by_comm.append((event, used))


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a rank that computes on `device`."""
    return HostLanes() if device.type == "cpu" else DeviceLanes(device)
