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

# The most calls that may wait for copies into the device to be done, each of which gives a lease back. The store
# expects a rank to lease two units at a time: the unit that the rank copies, and the next one.
_MOST_COPIES_IN = 1

# The most flat groups whose gradients may wait on the device for their copy to host memory.
MOST_COPIES_OUT = 4

# The time that `DeviceLanes.close` waits for copies. All copies end, unless the device is lost or waits for a rank that
# has gone.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.001


class Lane:
    """A stream of the device, to which DeviceLanes gives one kind of work. Its events complete in their order."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device=device)

    def wait_for(self, event: torch.Event | None) -> None:
        """Let the lane's later work begin only when `event` is complete, or at once if `event` is None."""
        if event is not None:
            self.stream.wait_event(event)

    def mark(self) -> torch.Event:
        """Return an event that is complete when the lane has done all the work that it was given so far."""
        return self.stream.record_event()


class StagingSlot:
    """Staging memory on the device, which the in-lane owns; see [Note: no block changes its stream].

    Life: `begin` returns the memory. The in-lane fills it until the event `filled`, the comm lane may gather in it, and
    the compute stream reads it until the event `drained`.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self._device = device
        self._lane = lane
        self._memory: torch.Tensor | None = None
        self._drained: torch.Event | None = None

    def begin(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` for the in-lane to write to. The in-lane waits until the slot's former bytes were read."""
        self.wait_until_drained()
        if self._memory is None or self._memory.numel() < nbytes:
            # The smaller memory is freed before a larger one is allocated, so that both do not exist at once. The
            # in-lane has waited for the last read of the smaller memory, so the in-lane's next tensors may use that
            # memory.
            self._memory = None
            # `begin` may run within a forward in inference mode. A later forward could not write to a tensor that was
            # made in inference mode, so the mode is switched off while the memory is allocated.
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
        """Keep the event after which the slot's bytes were read, so that the in-lane may write to the slot again."""
        self._drained = event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owed:
    """A call that is to be made when an event is complete; see [Note: calls that are owed].

    Attributes:
        event: it is complete when the call may be made.
        act: the call.
    """

    event: torch.Event
    act: Act


class CopyOut:
    """The PendingCopy of DeviceLanes: copies from the device to host memory that `copy_out` has begun."""

    def __init__(self, lanes: DeviceLanes, event: torch.Event, used: tuple[torch.Tensor, ...], act: Act | None) -> None:
        self._lanes = lanes
        self._event = event
        # The memory that the copies read. The reference is kept until the copies are known to be done, so that torch
        # does not reuse the memory.
        self._used = used
        self._act = act

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._lanes.finish_copy_out(self)

    def end(self) -> None:
        """Wait until the copies are done, free the memory that they read, and make the call that follows them."""
        self._lanes.wait_for(self._event)
        self._used = ()
        self._lanes.remove(self)
        act, self._act = self._act, None
        if act is not None:
            act()


class SlotAhead:
    """The CopyAhead of DeviceLanes: bytes that are being copied into a staging slot.

    No other copy uses the slot before `land` or `drop` is called.
    """

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
        # The slot may be given back before the copy to it is done, because the in-lane also makes the next copy to the
        # slot, after this copy.
        if self._staged is not None:
            self._staged = None
            self._lanes.give_back(self._slot)


class StatesOut:
    """The CopiesBeside of DeviceLanes: copies to host memory that threads beside the training thread begin.

    Only one thread at a time makes such copies.
    """

    def __init__(self, lane: Lane, ready: torch.Event) -> None:
        """Make the object without beginning a copy.

        Args:
            lane: the lane that makes the copies.
            ready: the event after which the values on the device may be read.
        """
        self._lane = lane
        self._ready = ready

    @contextmanager
    def copying(self, check: Act) -> Iterator[None]:
        self._lane.wait_for(self._ready)
        with self._lane.stream:
            yield
        self._wait_until_copied(self._lane.mark(), check)

    def _wait_until_copied(self, copied: torch.Event, check: Act) -> None:
        # The thread polls the event, because it could not end a blocking wait for an event that never completes.
        while not copied.query():
            check()
            time.sleep(_POLL_SECONDS)


class DeviceClock:
    """The clock that converts times of a device's events to seconds of time.monotonic(), for the Recorder.

    It owns the pairs of events that `measure` was given and that are not complete yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: deque[tuple[torch.Event, torch.Event, Callable[[float, float], None]]] = deque()
        # The first event of the clock, and the time at which that event was complete. The time of any other event is
        # this time plus the seconds that the device counts between both events.
        self._origin: tuple[torch.Event, float] | None = None

    def mark(self) -> torch.Event:
        """Return an event that is complete when the current stream has done what it was given so far."""
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
    """A measurement of the work that the current stream is given from this object's creation until `stop`."""

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
        # The staging slots of `copy_ahead` that are free, and all staging slots of `copy_ahead`.
        self._free_ahead: deque[StagingSlot] = deque()
        self._all_ahead: list[StagingSlot] = []
        self._after_in: deque[_Owed] = deque()
        self._copies_out: deque[CopyOut] = deque()
        self._wait: Callable[[torch.Event], None] = torch.Event.synchronize
        # The tensors that collectives use, each with the event after which its collective is done. They are kept until
        # then, so that torch does not reuse their memory.
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
        """Copy the bytes of a slot to `target` as soon as they are in the slot, and give the slot back."""
        compute = self._compute
        self._wait_until_filled(compute, filled)
        target.copy_(staged)
        slot.note_drained(compute.record_event())
        self.give_back(slot)

    def give_back(self, slot: StagingSlot) -> None:
        """Put a slot back among the free ones, so that a later `copy_ahead` can use it."""
        self._free_ahead.append(slot)

    @contextmanager
    def gathering(
        self, flat: torch.Tensor, first: int, last: int, source: torch.Tensor, pieces: Iterable[slice] = WHOLE
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if last - first == flat.numel():
            # This rank is the only one of its group, so its partition is the whole tensor, and nothing is gathered.
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
        """Have the host wait until `event` is complete; return at once if it is."""
        if not event.query():
            self._wait(event)

    def remove(self, copy: CopyOut) -> None:
        """Remove a copy to host memory from the pending ones, because it is done."""
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
        """Wait until a copy to host memory is done, and all that were begun before it, and make their calls."""
        while copy in self._copies_out:
            self._end_copy_out()

    def finish(self) -> None:
        self.finish_copies_in()
        while self._copies_out:
            self._end_copy_out()

    def close(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        # torch raises RuntimeError if the device is lost. The error is ignored, because a lost device copies nothing
        # more, so that there is nothing to wait for.
        with suppress(RuntimeError):
            events = [self._in.mark(), self._comm.mark(), self._out.mark(), self._beside.mark()]
            slots = (*self._slots, *self._all_ahead)
            events += [slot.drained for slot in slots if slot.drained is not None]
            while not (are_done := all(event.query() for event in events)) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            # The staging slots together have the size of two units. They are freed here, because threads of the session
            # refer to these lanes and may end later.
            for slot in slots if are_done else ():
                slot.free()
        self._after_in.clear()
        self._copies_out.clear()
        self._used_by_comm.clear()

    @property
    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def _next_slot(self) -> StagingSlot:
        """Return the staging slot that was used least recently, for the next copy to the device."""
        self._slots.rotate(-1)
        return self._slots[-1]

    def _fill(self, staged: torch.Tensor, source: torch.Tensor, pieces: Iterable[slice]) -> None:
        """Have the in-lane copy bytes of host memory into a part of a slot."""
        with self._in.stream:
            stopwatch = self.stopwatch()
            for piece in pieces:
                staged[piece].copy_(source[piece], non_blocking=True)
            stopwatch.stop(partial(self._report_copy_in, staged.nbytes))

    # Each method below makes one wait of the lanes, so that tests can leave that wait out.

    def _wait_until_filled(self, stream: torch.Stream, filled: torch.Event) -> None:
        stream.wait_event(filled)

    def _wait_until_gathered(self, stream: torch.Stream, gathered: torch.Event) -> None:
        stream.wait_event(gathered)

    def _wait_until_given(self, given: torch.Event) -> None:
        self._comm.wait_for(given)

    def _wait_until_ready(self, ready: torch.Event) -> None:
        self._out.wait_for(ready)

    def _pay(self) -> None:
        """Wait for the oldest copies to the device that a call is to follow, and make that call."""
        self.wait_for(self._after_in[0].event)
        self._after_in.popleft().act()

    def _end_copy_out(self) -> None:
        """Wait for the oldest pending copy to host memory, and end it; see `CopyOut.end`."""
        self._copies_out[0].end()

    def _keep_until(self, event: torch.Event, used: tuple[torch.Tensor, ...]) -> None:
        """Keep tensors that the comm lane uses alive until `event` is complete, so that torch keeps their memory."""
        self._used_by_comm.append((event, used))


def make_lanes(device: torch.device) -> Lanes:
    """Return the lanes of a rank that computes on `device`."""
    return HostLanes() if device.type == "cpu" else DeviceLanes(device)
