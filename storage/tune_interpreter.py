"""Settings of the Python interpreter that suit a process which runs an engine. They are the process's to make."""

from __future__ import annotations

import gc
import sys

SWITCH_INTERVAL_SECONDS = 0.0001
GC_THRESHOLDS = (50_000, 5, 400)


def tune_interpreter() -> None:
    """To be called once, before the engine is opened.

    A thread whose system call is over waits for the interpreter as long as another one computes, up to the switch
    interval: with the default of 5 ms the device idles (measured: large writes 0.75 to 0.8 as fast). And a step of ten
    thousand slabs has as many live tasks, over which the default thresholds collect garbage again and again (1.15 to
    1.2 times the time of an update). The middle generation is small, because a collection stops all threads: with a
    quarter of a million objects for some 20 ms, which a job of 200,000 tensors makes four times while it is opened.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(*GC_THRESHOLDS)
