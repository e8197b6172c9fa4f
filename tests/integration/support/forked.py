"""Processes that are forked from a server which has imported what all of them import: that takes 3 s of CPU time for a
daemon and 8 s for a rank (measured), and has nothing to do with what is tested.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
_PRELOADED = ["tests.integration.support.training", "paramserver.server"]


class Forked:
    """A process that runs the `main` of `module`, started at once; with the methods of subprocess.Popen that tests use.

    `main` finds `arguments` in sys.argv. Its output goes to `log`, and there is nothing to read on its standard input.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run, args=(module, list(arguments), dict(environment), log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None: it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it unless the process has ended."""
        if self._process.is_alive():
            # It may end in between, and then the server that forked it has waited for it already.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
    """In the new process."""
    with log.open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    # The library that reads it is loaded already.
    if (threads := environment.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(threads))
    try:
        importlib.import_module(module).main()
    finally:
        # multiprocessing ends its processes without.
        atexit._run_exitfuncs()
