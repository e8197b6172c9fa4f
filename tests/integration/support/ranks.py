"""Programs on several ranks: each rank is a process of its own, with the environment that torchrun gives it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common.namespaces import LINK
from tests.integration.support.forked import STACKS, Forked

# The time in which the ranks of a launch must end. It is below pytest's timeout, so that a failure shows their logs.
END_SECONDS = 400.0


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port at which no process listens, below those that the kernel chooses.

    The kernel gives the ports that it chooses to connections, too, so a connection of another process could get such a
    port before the caller's process listens there.
    """
    chosen_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(chosen_from // 2, chosen_from)
        with socket.socket() as listener, suppress(OSError):
            listener.bind((host, port))
            return port


def _environments(world_size: int, master: str) -> list[Mapping[str, str]]:
    """Return the environment of each rank of one launch; `master` is the address of rank 0's host."""
    common = {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    return [os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


class Launch:
    """The processes of all ranks of one launch. As a context manager, it kills the ranks that still run at its end."""

    def __init__(
        self,
        module: str,
        world_size: int,
        arguments: tuple[str | Path, ...],
        directory: Path,
        *,
        namespaces: Sequence[str] = (),
        master: str = "127.0.0.1",
    ) -> None:
        """Start the ranks. Each calls `main` of `module`, which finds `arguments` in sys.argv.

        The output of rank N goes to `directory`/rank-N.log. With `namespaces`, rank N runs in the N-th of them, and
        `master` is the address of the first one.
        """
        self._logs = [directory / f"rank-{rank}.log" for rank in range(world_size)]
        self.ranks: list[Forked] = []
        with ExitStack() as started:
            places = namespaces or [""] * world_size
            # gloo would look for the address of the host's name, which the namespaces do not have.
            common = {"GLOO_SOCKET_IFNAME": LINK} if namespaces else {}
            for environment, log, place in zip(_environments(world_size, master), self._logs, places, strict=True):
                rank = Forked(
                    module, [*map(str, arguments)], environment={**environment, **common}, log=log, namespace=place
                )
                self.ranks.append(rank)
                started.callback(rank.wait)
                started.callback(rank.kill)
            self._started = started.pop_all()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._started.close()

    @property
    def is_whole(self) -> bool:
        """Whether no rank has ended."""
        return all(rank.poll() is None for rank in self.ranks)

    def wait(self, timeout_seconds: float) -> list[int]:
        """Wait for all ranks and return their exit codes, negative for a signal.

        After `timeout_seconds` it fails, and shows the logs, with the stacks of ranks that have not ended.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            return [rank.wait(max(0.0, deadline - time.monotonic())) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            codes = [rank.poll() for rank in self.ranks]
            raise AssertionError(f"exit codes after {timeout_seconds:g} s: {codes}\n{self.stacks()}") from None

    def stacks(self) -> str:
        """Return the output of all ranks, with the stacks of those that have not ended."""
        for rank in self.ranks:
            rank.send_signal(STACKS)
        time.sleep(1.0)  # The ranks write their stacks into their logs.
        return self.output()

    def output(self) -> str:
        """Return the output of all ranks."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self._logs)


def run_ranks(
    module: str, world_size: int, *arguments: str | Path, exit_code: int = 0, timeout_seconds: float = END_SECONDS
) -> None:
    """Run the `main` of `module` on `world_size` ranks, which must all end with `exit_code`."""
    with TemporaryDirectory() as directory, Launch(module, world_size, arguments, Path(directory)) as launch:
        codes = launch.wait(timeout_seconds)
        assert codes == [exit_code] * world_size, f"exit codes {codes}\n{launch.output()}"
