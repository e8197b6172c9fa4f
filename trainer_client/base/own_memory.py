"""The memory of this process, as the kernel counts it, in bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Return the bytes that are in memory now."""
    return _resident_and_shared()[0]


def private_bytes() -> int:
    """Return the bytes that are in memory now and are not those of files or of shared memory."""
    resident, shared = _resident_and_shared()
    return resident - shared


def peak_resident_bytes() -> int:
    """Return the most bytes that were in memory at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_and_shared() -> tuple[int, int]:
    _, resident, shared, *_ = _STATM.read_text(encoding="ascii").split()
    return int(resident) * _PAGE_BYTES, int(shared) * _PAGE_BYTES
