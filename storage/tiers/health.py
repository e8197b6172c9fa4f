"""This module detects devices that do not answer, and raises an error in the calls that wait for them.

A read or a write that the kernel has begun cannot be cancelled: its buffer and its extents stay in use until the device
answers. So the operation itself continues in the background and cleans up at its end. Only the calls that wait for it
raise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from storage.base.errors import DeviceStuckError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
# The devices are checked this many times within the time after which a device counts as stuck.
LOOKS = 5


class Device(Protocol):
    """A device whose answers a tier has to wait for: a disk, or another machine. `DeviceWatch` checks it."""

    @property
    def device_name(self) -> str:
        """The name by which an operator knows the device, such as a file's path."""
        ...

    @property
    def stalled_seconds(self) -> float:
        """For how many seconds the oldest request has been at the device; 0 if no request is there."""
        ...


class DeviceWatch:
    """A task that periodically checks the oldest request of every device of an engine's tiers."""

    def __init__(self, stuck_after_seconds: float) -> None:
        """Start to check the followed devices periodically.

        A device counts as stuck while its oldest request has taken at least `stuck_after_seconds`.
        """
        self._devices: list[Device] = []
        self._stuck_after_seconds = stuck_after_seconds
        # The devices that are stuck, and for how many seconds each.
        self._stuck: dict[Device, float] = {}
        # This future is done while a device is stuck. Its result is the text of the error: the devices, the times and
        # the remedy.
        self._alarm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._look_again_and_again())

    @property
    def problems(self) -> list[str]:
        """One line of text for each device that is stuck."""
        return self.problems_of(self._stuck)

    def problems_of(self, devices: Iterable[Device]) -> list[str]:
        """Return one line of text for each of `devices` that is stuck: its name, and how long it has not answered."""
        return [
            f"{device.device_name}: the device has not answered for {self._stuck[device]:.1f} s"
            for device in devices
            if device in self._stuck
        ]

    def follow(self, devices: Sequence[Device]) -> None:
        """Check, in addition to the present devices, these ones periodically for requests that take too long."""
        self._devices += devices

    def check(self) -> None:
        """Raise DeviceStuckError if a device is stuck. An operation calls this before it begins anything."""
        if self._alarm.done():
            raise DeviceStuckError(self._alarm.result())

    async def unless_stuck(
        self, work: Coroutine[Any, Any, ResultT], *, release: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """Wait for `work` and return its result, unless a device is stuck.

        If this raises DeviceStuckError, the work continues in the background. With `release` it is cancelled instead,
        and it must then end without waiting for the device. If it returns a result nevertheless, `release` is called
        with the result, to free it. If the caller is cancelled, the work is cancelled in both cases.

        Raises:
            DeviceStuckError: a device was stuck, or became stuck, before the work was done.
        """
        task = asyncio.ensure_future(work)
        alarm = self._alarm
        either: list[asyncio.Future[Any]] = [task, alarm]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            # The function that releases the task's result is added as a callback before the wait, because a second
            # cancellation may end the wait: the client may disconnect while the call is being answered for its
            # deadline.
            task.add_done_callback(functools.partial(_end, release))
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        if release is not None:
            task.cancel()
        task.add_done_callback(functools.partial(_end, release))
        raise DeviceStuckError(alarm.result())

    async def close(self) -> None:
        """Stop the task that checks the devices."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._stuck_after_seconds / LOOKS)
            self._look()

    def _look(self) -> None:
        stalled = {device: device.stalled_seconds for device in self._devices}
        before, self._stuck = self._stuck, {d: s for d, s in stalled.items() if s >= self._stuck_after_seconds}
        for device in self._stuck.keys() - before.keys():
            log.error("%s: the device has not answered for %.1f s", device.device_name, self._stuck[device])
        for device in before.keys() - self._stuck.keys():
            log.warning("%s: the device answers again", device.device_name)
        if self._stuck and not self._alarm.done():
            self._alarm.set_result("; ".join(self.problems) + ": check it; what was begun goes on when it answers")
        elif not self._stuck and self._alarm.done():
            self._alarm = asyncio.get_running_loop().create_future()


def _end(release: Callable[[ResultT], None] | None, task: asyncio.Task[ResultT]) -> None:
    """Retrieve the outcome of work for which no call waits any more, and free its result with `release`.

    Reading the exception also keeps asyncio from logging it as unhandled.
    """
    if not task.cancelled() and task.exception() is None and release is not None:
        release(task.result())
