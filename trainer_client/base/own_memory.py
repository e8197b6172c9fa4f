"""The memory of this process, as the kernel counts it, in bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the size in bytes of this process's resident set, the part of its memory that is in RAM now."""
    return _resident_and_shared()[0]


def private_bytes() -> int:
    """Return the bytes of the resident set that belong neither to files nor to shared memory."""
    resident, shared = _resident_and_shared()
    return resident - shared


def peak_resident_bytes() -> int:
    """Return the size in bytes of the largest resident set that this process has had since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_and_shared() -> tuple[int, int]:
    _, resident, shared, *_ = _STATM.read_text(encoding="ascii").split()
    return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES
