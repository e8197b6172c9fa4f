"""The binding of the daemon to one NUMA node: to its cores, and to its memory for all allocations and the arena.

Call `stay_on` before any thread is started or the arena is allocated, because both inherit the binding. The binding
must never be undone. This module does not find out which node a disk or a GPU is attached to; the operator chooses the
node (`numa_node`).
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
# The number of the system call set_mempolicy(2) on each processor architecture, because libc has no function for it.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def stay_on(node: int) -> None:
    """Bind the calling thread, and all threads that it starts, to a node's cores, and prefer the node's memory.

    When the node has no memory left, the kernel takes memory of other nodes. If the system does not let a process
    choose its memory (a container's seccomp profile), log a warning and bind the cores only.

    Raises:
        ConfigError: there is no such node, or this process is allowed to use none of its cores.
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
    """Return the core numbers in a list as the kernel writes it, for example `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _prefer_memory_of(node: int) -> str | None:
    """Ask the kernel to prefer this node's memory. Return None, or the reason why it refused."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"the number of the system call set_mempolicy is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # set_mempolicy reads one bit less of the node mask than its argument `maxnode` says, so the argument is the mask's
    # number of bits plus 1.
    bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(_MPOL_PREFERRED), mask, bits) == 0:
        return None
    return f"set_mempolicy: {os.strerror(ctypes.get_errno())}"
