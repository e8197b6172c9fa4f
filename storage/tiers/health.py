"""Notices devices that do not answer, and tells those who wait for them.

A transfer that the kernel has cannot be taken back: its buffer and its extents stay in use until the device answers. So
the operation goes on by itself and cleans up after itself, and only those who wait for it are told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from storage.errors import DeviceStuckError
from storage.tiers.data_file import DataFile

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
# How often the devices are looked at within the time that they have.
LOOKS = 5


class DeviceWatch:
    """Looks at the oldest transfer of every file, again and again."""

    def __init__(self, files: Sequence[DataFile], stuck_after_seconds: float) -> None:
        """A device whose oldest transfer takes longer than `stuck_after_seconds` counts as stuck until it is over."""
        self._files = files
        self._stuck_after_seconds = stuck_after_seconds
        self._stuck: dict[DataFile, float] = {}
        self._alarm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._look())

    @property
    def problems(self) -> list[str]:
        """One line for each device that is stuck."""
        return [
            f"{file.path}: the device has not answered for {seconds:.0f} s" for file, seconds in self._stuck.items()
        ]

    async def unless_stuck(self, work: Coroutine[Any, Any, ResultT], *, abandon: bool = False) -> ResultT:
        """The result of `work`. It goes on when this raises; `abandon`: it is cancelled, and must then end by itself.

        Raises:
            DeviceStuckError: a device is stuck, or becomes it, before the work is done.
        """
        task = asyncio.ensure_future(work)
        # Nobody may be left to ask.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        either: list[asyncio.Future[Any]] = [task, self._alarm]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            raise
        if task.done():
            return task.result()
        if abandon:
            task.cancel()
        raise DeviceStuckError("; ".join(self.problems) + ": check it; what was begun goes on when it answers")

    async def close(self) -> None:
        """Stops looking."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._stuck_after_seconds / LOOKS)
            stalled = {file: file.io.load.stalled_seconds for file in self._files}
            stuck = {file: seconds for file, seconds in stalled.items() if seconds >= self._stuck_after_seconds}
            for file in stuck.keys() - self._stuck.keys():
                log.error(
                    "%s: the device has not answered for %.0f s; the nvme tier is degraded", file.path, stuck[file]
                )
            for file in self._stuck.keys() - stuck.keys():
                log.warning("%s: the device answers again", file.path)
            self._stuck = stuck
            if stuck and not self._alarm.done():
                self._alarm.set_result(None)
            elif not stuck and self._alarm.done():
                self._alarm = asyncio.get_running_loop().create_future()
