"""Notices devices that do not answer, and tells those who wait for them.

A transfer that the kernel has cannot be taken back: its buffer and its extents stay in use until the device answers. So
the operation goes on by itself and cleans up after itself, and only those who wait for it are told.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from storage.errors import DeviceStuckError

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
# How often the devices are looked at within the time that they have.
LOOKS = 5


class Device(Protocol):
    """What a tier has to wait for: a disk, or another machine."""

    @property
    def device_name(self) -> str:
        """The device, for operators."""
        ...

    @property
    def stalled_seconds(self) -> float:
        """How long the oldest transfer has been at the device; 0 where there is none."""
        ...


class DeviceWatch:
    """Looks at the oldest transfer of every device of an engine's tiers, again and again."""

    def __init__(self, stuck_after_seconds: float) -> None:
        """A device whose oldest transfer takes longer than `stuck_after_seconds` counts as stuck until it is over."""
        self._devices: list[Device] = []
        self._stuck_after_seconds = stuck_after_seconds
        self._stuck: dict[Device, float] = {}
        # Done while a device is stuck: which, for how long, and what to do.
        self._alarm: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._look_again_and_again())

    @property
    def problems(self) -> list[str]:
        """One line for each device that is stuck."""
        return self.problems_of(self._stuck)

    def problems_of(self, devices: Iterable[Device]) -> list[str]:
        """Return one line for each of `devices` that is stuck."""
        return [
            f"{device.device_name}: the device has not answered for {self._stuck[device]:.1f} s"
            for device in devices
            if device in self._stuck
        ]

    def follow(self, devices: Sequence[Device]) -> None:
        """Watch these devices, too."""
        self._devices += devices

    def check(self) -> None:
        """Raises DeviceStuckError while a device is stuck: for what had better not begin."""
        if self._alarm.done():
            raise DeviceStuckError(self._alarm.result())

    async def unless_stuck(
        self, work: Coroutine[Any, Any, ResultT], *, give_back: Callable[[ResultT], None] | None = None
    ) -> ResultT:
        """The result of `work`, which goes on by itself when this raises.

        With `give_back` it is cancelled instead, and must then end without the device; a result that comes nevertheless
        is given back.

        Raises:
            DeviceStuckError: a device is stuck, or becomes it, before the work is done.
        """
        task = asyncio.ensure_future(work)
        alarm = self._alarm
        either: list[asyncio.Future[Any]] = [task, alarm]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            # Before the wait, which a second cancellation may end: the client may go while its deadline is answered.
            task.add_done_callback(functools.partial(_end, give_back))
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        if give_back is not None:
            task.cancel()
        task.add_done_callback(functools.partial(_end, give_back))
        raise DeviceStuckError(alarm.result())

    async def close(self) -> None:
        """Stops looking."""
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


def _end(give_back: Callable[[ResultT], None] | None, task: asyncio.Task[ResultT]) -> None:
    """The end of work that nobody waits for any more."""
    if not task.cancelled() and task.exception() is None and give_back is not None:
        give_back(task.result())
