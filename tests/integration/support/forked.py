"""Processes that are forked from a server which has imported all their modules.

These imports take 3 s of CPU time for a daemon and 8 s for a rank (measured), and are not under test.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
_IN_NAMESPACE = "tests.integration.support.in_namespace"
# A forked process that gets this signal writes the stacks of all its threads to its standard error.
STACKS = signal.SIGUSR2
_PRELOADED = ["tests.integration.support.preloaded"]


class Forked:
    """A forked process that runs the `main` of a module, with the methods of subprocess.Popen that tests use.

    `main` finds `arguments` in sys.argv. Its output goes to `log`, as its standard error does unless `errors` is given.
    With a `namespace`, it runs in that network namespace.
    Its standard input is empty. A process that it has forked in its turn comes from the same server.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
        namespace: str = "",
    ) -> None:
        if namespace:
            module, arguments = _IN_NAMESPACE, [namespace, module, *arguments]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run, args=(module, list(arguments), dict(environment), log, errors))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self._process.is_alive():
            # The process may end just now. The server that forked it then waits for it, and its id becomes invalid.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(module: str, arguments: list[str], environment: Mapping[str, str], log: Path, errors: Path | None) -> None:
    """Run the module's `main` in the new process."""
    with log.open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    if errors is not None:
        with errors.open("w") as output:
            os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.register(STACKS, all_threads=True)
    # Without this, multiprocessing would start another server for the processes that this one wants to have forked,
    # although it knows the address of the server that forked this one.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[method-assign]
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    # The OpenMP library is loaded already, and reads this variable only when it is loaded.
    if (threads := environment.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(threads))
    try:
        importlib.import_module(module).main()
    finally:
        # multiprocessing ends its processes without calling these functions.
        atexit._run_exitfuncs()
