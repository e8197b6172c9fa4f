"""Programs on several ranks: each rank is a process of its own, with the environment that torchrun gives it.

They are forked from a server which has imported what all of them import: that takes some 6 s of CPU time (measured),
and has nothing to do with what is tested.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.integration.daemon import ROOT

_PRELOADED = ["tests.integration.training"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _environments(world_size: int) -> list[Mapping[str, str]]:
    """The environment of each rank of one launch."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


class Launch:
    """The ranks of one launch; `module` has a `main` that finds `arguments` in sys.argv.

    A context: ranks that still run at its end are killed.
    """

    def __init__(self, module: str, world_size: int, arguments: tuple[str | Path, ...], directory: Path) -> None:
        """What rank N writes goes to `directory`/rank-N.log."""
        self._logs = [directory / f"rank-{rank}.log" for rank in range(world_size)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.ranks = [
            context.Process(target=_run, args=(module, [*map(str, arguments)], environment, log))
            for log, environment in zip(self._logs, _environments(world_size), strict=True)
        ]

    def __enter__(self) -> Launch:
        with ExitStack() as started:
            for rank in self.ranks:
                rank.start()
                started.callback(rank.join)
                started.callback(rank.kill)
            self._started = started.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._started.close()

    @property
    def is_whole(self) -> bool:
        """Whether no rank has ended."""
        return all(rank.is_alive() for rank in self.ranks)

    def wait(self, timeout_seconds: float) -> list[int]:
        """The exit codes, negative signals among them; fails if a rank does not end in time."""
        deadline = time.monotonic() + timeout_seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        assert None not in codes, f"exit codes after {timeout_seconds:g} s: {codes}\n{self.output()}"
        return [code for code in codes if code is not None]

    def output(self) -> str:
        """What all have written."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self._logs)


def run_ranks(
    module: str, world_size: int, *arguments: str | Path, exit_code: int = 0, timeout_seconds: float = 200.0
) -> None:
    """Runs the `main` of `module` on `world_size` ranks, which must all end with `exit_code`."""
    with TemporaryDirectory() as directory, Launch(module, world_size, arguments, Path(directory)) as launch:
        codes = launch.wait(timeout_seconds)
        assert codes == [exit_code] * world_size, f"exit codes {codes}\n{launch.output()}"


def _run(module: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
    """In the rank's own process."""
    with log.open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    # The library that reads OMP_NUM_THREADS is loaded already.
    torch.set_num_threads(1)
    try:
        importlib.import_module(module).main()
    finally:
        # multiprocessing ends its processes without.
        atexit._run_exitfuncs()
