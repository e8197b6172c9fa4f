"""Start-up of the engine's worker threads: a thread's name for operators, and its niceness.

This module owns no threads. `begin_work` must be called on a worker thread only, because a thread's niceness cannot be
lowered again.
"""

from __future__ import annotations

import logging
import threading

from storage.base import syscalls
from storage.base.errors import DeviceError

log = logging.getLogger(__name__)


def begin_work(nice: int) -> None:
    """Show the calling worker thread's name to the kernel, and make its niceness at least `nice`.

    A worker thread calls this first. Other threads keep their niceness, because on Linux it is an attribute of the
    thread and not of the process (man 7 sched). If the system refuses, a warning is logged and the thread keeps its
    niceness.
    """
    name = threading.current_thread().name
    syscalls.name_thread(name)
    try:
        syscalls.renice_thread(nice)
    except DeviceError as error:
        log.warning("%s. Thread %s does not yield to others", error, name)
