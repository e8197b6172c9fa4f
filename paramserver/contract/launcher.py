"""The bond of a rank to the launcher that started it: the rank ends when its launcher is gone.

A launcher that is killed (SIGKILL, as by the kernel for want of memory) cannot stop its ranks, and the daemon that it
started ends with it. Without this bond, the ranks would go on while the user's terminal shows a prompt, as if they had
ended.
"""

from __future__ import annotations

import ctypes
import os
import signal

# The environment variable in which `paramserver launch` gives its process id to the ranks that it starts.
VARIABLE = "PARAMSERVER_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have the kernel send this process SIGTERM when the `paramserver launch` that started it ends; idempotent.

    A process that the launcher has not started itself, such as a child of a rank, stays as it is.
    """
    launcher = os.environ.get(VARIABLE)
    if launcher != str(os.getppid()):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The launcher may have ended before this rank called `prctl`, and then the kernel sends the rank no signal. So the
    # rank compares its parent's process id with the launcher's, and ends itself if they differ.
    if launcher != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGTERM)
