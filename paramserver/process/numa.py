"""Keeps the daemon on one NUMA node: its threads run on that node's cores, and its memory, arena included, is there.

To be done before any thread is started or the arena is allocated: both inherit it. Must not be undone. Knows nothing
of which node a device or a GPU is attached to: that is the operator's choice (`numa_node`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

from paramserver.errors import ConfigError

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
# set_mempolicy(2) has no wrapper in libc: its number by architecture.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def stay_on(node: int) -> None:
    """Binds the calling thread, and all that it starts, to the cores of a node, and prefers the node's memory.

    Memory comes from other nodes where this one has none left. Where the system does not let a process choose its
    memory (a container's seccomp profile), it warns and goes on with the cores alone.

    Raises:
        ConfigError: there is no such node, or none of its cores may be used by this process.
    """
    cores = _cores_of(node) & os.sched_getaffinity(0)
    if not cores:
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"numa_node = {node}: none of its cores is among those that this process may use ({allowed}); choose "
            "another node, or let the process use its cores (CPUAffinity= of systemd, a container's cpuset)"
        )
    os.sched_setaffinity(0, cores)
    if (reason := _prefer_memory_of(node)) is not None:
        log.warning("numa_node = %d: memory may come from any node: %s", node, reason)


def _cores_of(node: int) -> set[int]:
    try:
        listed = (_NODES / f"node{node}" / "cpulist").read_text()
    except OSError:
        known = sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*"))
        there = ", ".join(map(str, known)) or "none: the kernel was built without NUMA"
        raise ConfigError(f"numa_node = {node}: there is no such node; there are: {there}") from None
    return parse_cores(listed)


def parse_cores(listed: str) -> set[int]:
    """The numbers in a list as the kernel writes it: `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _prefer_memory_of(node: int) -> str | None:
    """Why the kernel does not; None: it does."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"not known how to ask for it on {platform.machine()}"
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel takes one bit less than it is told.
    bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), mask, bits) == 0:
        return None
    return f"set_mempolicy: {os.strerror(ctypes.get_errno())}"
