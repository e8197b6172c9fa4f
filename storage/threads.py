"""How a worker thread of an engine begins: it gets its name for operators, and yields to those that compute.

Owns no threads. Must never be called on a thread that is not a worker's: niceness cannot be taken back.
"""

from __future__ import annotations

import logging
import threading

from storage import syscalls
from storage.errors import DeviceError

log = logging.getLogger(__name__)


def begin_work(nice: int) -> None:
    """To be called first on a worker's thread, which was given its name at its construction.

    Its niceness becomes at least `nice`. That is the calling thread's alone: on Linux it is no attribute of the process
    (man 7 sched). Where the system does not grant it, the thread warns and goes on without.
    """
    name = threading.current_thread().name
    syscalls.name_thread(name)
    try:
        syscalls.renice_thread(nice)
    except DeviceError as error:
        log.warning("%s. Thread %s does not yield to others", error, name)
