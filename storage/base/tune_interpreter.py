"""Settings of the Python interpreter that suit an engine. The program sets them, because they affect it all."""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL_SECONDS = 0.0001
GC_THRESHOLDS = (50_000, 5, 400)


def tune_interpreter() -> None:
    """Set the switch interval and the thresholds of garbage collection. Call this once, before the engine is opened.

    A command calls this function before the command imports torch, because the default thresholds cause collections
    during the imports, which find nothing (measured: 0.25 s of CPU time).

    Switch interval: a thread that returns from a system call waits up to this long for the interpreter's lock while
    another thread computes. With the default of 5 ms the device idles (measured: large writes 0.75 to 0.8 as fast).

    Thresholds: a step of ten thousand slabs has as many live tasks, and with the default thresholds the collector
    visits them again and again (measured: an update takes 1.15 to 1.2 times as long). The middle generation is small,
    because a collection stops all threads. With a quarter of a million objects it takes some 20 ms, and opening a job
    of 200,000 tensors would cause four of them.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(*GC_THRESHOLDS)


def exempt_from_collection() -> None:
    """Exempt all objects that exist now from garbage collection. Call this once, when all modules are imported.

    The modules of a daemon have 200,000 objects that live as long as the process. Without this call, each collection of
    the oldest generation stops all threads for 0.12 s, and the collections at the end of the process take 0.5 s of CPU
    time (measured).
    """
    gc.freeze()
