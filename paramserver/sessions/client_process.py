"""The process of a client that registers the arena with its device, and whether that process has ended.

The kernel releases the locks of a killed process before it closes the process's descriptors of a device, so for a
moment the device may still write to memory whose lock is gone. A pidfd becomes readable after both.

[Note: which process] The holder of a session's lock is the process that may write, however many sessions it has and
whichever way it got the arena's descriptor. The lock is looked at before and after the pidfd is opened: if one process
holds it both times, that process lived in between, so the pidfd is not that of a later process with the same id. The
process that connects to the arena's socket would tell less, because sessions of one process share one mapping, and a
client that maps the file of `arena_file` uses no socket. This module owns pidfds. It must never signal a process.
"""

from __future__ import annotations

import os
import select

from storage.tiers.slots import ArenaSlot, Slots

# The most client processes that the daemon watches at a time, each by a pidfd; descriptors.py keeps as many descriptors
# free. A client beyond that cannot be watched. So the arena ranges that its ended session leaves are freed
# `late_copy_seconds` after the lock of its slot is gone, as for processes that the daemon does not see.
MOST_PROCESSES = 32


class ClientProcess:
    """A client's process that holds, or held, the lock of its session's slot in the arena."""

    def __init__(self, pidfd: int, processes: ClientProcesses) -> None:
        self._pidfd = pidfd
        self._processes = processes
        self._ended = select.poll()
        self._ended.register(pidfd, select.POLLIN)

    def has_ended(self) -> bool:
        """Return whether all threads of the process have ended, and with them its use of descriptors and memory."""
        return bool(self._ended.poll(0))

    def close(self) -> None:
        """Close the pidfd. Call this once."""
        self._ended.unregister(self._pidfd)
        os.close(self._pidfd)
        self._processes.count -= 1


class ClientProcesses:
    """The clients' processes of which the daemon holds a pidfd, so that it can see whether they have ended.

    Attributes:
        count: the number of pidfds that are open.
    """

    def __init__(self, slots: Slots) -> None:
        self.count = 0
        self._slots = slots

    def holder(self, slot: ArenaSlot) -> ClientProcess | None:
        """Return the process that holds the lock of a slot now, which the caller has to close.

        None if no process holds it, if the one that does is in a PID namespace that is not visible here, or if the
        kernel or MOST_PROCESSES allows no further pidfd.
        """
        if self.count >= MOST_PROCESSES or (pid := self._slots.holder(slot)) is None:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if self._slots.holder(slot) != pid:
            os.close(pidfd)
            return None
        self.count += 1
        return ClientProcess(pidfd, self)
