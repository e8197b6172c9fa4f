"""A real store daemon as a process of its own, for tests: started, watched, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.integration.support.forked import ROOT, Forked

SERVICE = "paramserver.v1.ParameterStore"
MIB = 1 << 20

START_SECONDS = 120.0
STOP_SECONDS = 60.0
CHANNEL_OPTIONS = (
    # Tests wait for daemons that were just started, so the first attempts to connect come shortly after each other.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
    # In spite of its name, this option also limits the time of one attempt.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Without this, channels to one address share their connections, even if these lead to a daemon that was killed.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The memory of a daemon besides its host budget: Python, torch and gRPC.

    `private_bytes` are the daemon's alone. `mapped_bytes` are pages of files, nearly all of them libraries, that all
    processes of one environment share and that the kernel can read again; how many of them count as resident depends on
    what the kernel has in its page cache.
    """

    private_bytes: int
    mapped_bytes: int

    @classmethod
    def of(cls, pid: int) -> Overhead:
        """Return the present values of a process."""
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        private, mapped = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
        return cls(private_bytes=private, mapped_bytes=mapped)

    def __str__(self) -> str:
        return f"{self.private_bytes / 1e6:.0f} MB private and {self.mapped_bytes / 1e6:.0f} MB mapped"


# The limits that docs/daemon.md states for each build of torch. `import torch` loads all libraries that its build has.
STATED_OVERHEADS = {
    "CPU": Overhead(private_bytes=240 * MIB, mapped_bytes=192 * MIB),
    "CUDA": Overhead(private_bytes=384 * MIB, mapped_bytes=640 * MIB),
}


def stated_overhead() -> Overhead:
    """Return the limits for the build of torch that this process runs with, as the daemons do that it starts."""
    return STATED_OVERHEADS["CPU" if torch.version.cuda is None else "CUDA"]


class Daemon:
    """A process that runs `paramserver serve` over one state directory.

    By default the process is forked from a server that has imported everything, which is much quicker. With `fresh` or
    a `prefix` it is started as users start it, with a standard input. As a context manager, it kills the daemon at the
    end if that still runs.
    """

    process: subprocess.Popen[bytes] | Forked

    def __init__(
        self,
        state_dir: Path,
        config: Mapping[str, Any] | None = None,
        *,
        flags: Sequence[str] = (),
        prefix: Sequence[str] = (),
        fresh: bool = False,
        program: Sequence[str] = ("-m", "paramserver"),
        environment: Mapping[str, str] | None = None,
        module: str = "paramserver.cli",
        namespace: str = "",
        wait: bool = True,
    ) -> None:
        """Write the config file and start the daemon.

        Args:
            state_dir: the state directory; the log and the config file are next to it.
            config: keys and values of the TOML file.
            flags: further arguments of the command.
            prefix: words before the command, such as those that enter a network namespace.
            fresh: start a new interpreter instead of forking one.
            program: the interpreter's arguments that select the program; with `fresh` or `prefix` only.
            environment: the environment; with `fresh` or `prefix` only.
            module: the module whose `main` a forked daemon runs.
            namespace: the network namespace of a forked daemon; "": that of the tests.
            wait: return only when the daemon serves.
        """
        self.state_dir = state_dir
        self.socket = state_dir / "paramserver.sock"
        self.address = f"unix:{self.socket}"
        self._log_path = state_dir.with_name(f"{state_dir.name}.log")
        config_path = state_dir.with_name(f"{state_dir.name}.toml")
        values = {
            "state_dir": str(state_dir),
            "host_budget": "16MiB",
            "nvme_budget": "64MiB",
            # The slots of this many sessions fit into one page of the arena, so tests know how much budget is left.
            "max_sessions": 200,
        } | dict(config or {})
        config_path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
        arguments = ["serve", "--config", str(config_path), *flags]
        if fresh or prefix:
            with self._log_path.open("w") as log:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, *program, *arguments],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
        else:
            self.process = Forked(module, arguments, environment=os.environ, log=self._log_path, namespace=namespace)
        if wait:
            self.wait_until_serving()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        """The daemon's output so far."""
        return self._log_path.read_text()

    @property
    def overhead(self) -> Overhead:
        """The daemon's present memory besides its host budget."""
        return Overhead.of(self.process.pid)

    def wait_until_serving(self) -> None:
        """Wait until the daemon's health service answers SERVING; fail with the log if the daemon ends first."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_serving():
            assert (code := self.process.poll()) is None, f"the daemon ended with {code}:\n{self.log}"
            assert time.monotonic() < deadline, f"the daemon does not serve:\n{self.log}"
            time.sleep(0.02)

    def is_serving(self) -> bool:
        """Return whether the health service answers SERVING now."""
        if not self.socket.exists():
            return False
        with channel_to(self.address, options=CHANNEL_OPTIONS) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=SERVICE), timeout=5
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait(self) -> int:
        """Wait for the daemon's end and return its exit status; fail after STOP_SECONDS."""
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon does not end:\n{self.log}") from None
        finally:
            self.close_stdin()

    def stop(self) -> int:
        """Stop the daemon with SIGTERM, as systemd does, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        self.process.kill()
        self.process.wait()
        self.close_stdin()

    def close_stdin(self) -> None:
        """Close the daemon's standard input, as the end of its parent does. A forked daemon has none."""
        if isinstance(self.process, subprocess.Popen) and self.process.stdin is not None:
            self.process.stdin.close()


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


@dataclass(frozen=True, slots=True)
class Stores:
    """Two daemons with one config."""

    first: Daemon
    second: Daemon


@contextmanager
def serving(directory: Path, names: Sequence[str], config: Mapping[str, Any]) -> Iterator[list[Daemon]]:
    """Yield a daemon for each name, in a directory of that name. All have one config.

    Those that are in the list at the end are killed then, so a test may put another daemon in the place of one.
    """
    daemons: list[Daemon] = []
    try:
        for name in names:
            (directory / name).mkdir()
            daemons.append(Daemon(directory / name / "state", config))
        yield daemons
    finally:
        for daemon in daemons:
            daemon.kill()


@contextmanager
def admin_of(address: str) -> Iterator[admin_grpc.StoreAdminStub]:
    """Yield a stub of the admin service at an address."""
    with channel_to(address, options=CHANNEL_OPTIONS) as channel:
        yield admin_grpc.StoreAdminStub(channel)


def tiers(address: str) -> tuple[admin_pb.TierInfo, admin_pb.TierInfo]:
    """Return the present figures of the host tier and of the NVMe tier."""
    with admin_of(address) as admin:
        found = {tier.tier: tier for tier in admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10).tiers}
        return found[pb.TIER_HOST], found[pb.TIER_NVME]


def run_serve(*arguments: str, seconds: float = START_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run `paramserver serve` with arguments that make it end by itself, in a forked process, and return its result."""
    with TemporaryDirectory() as directory:
        log, errors = Path(directory) / "log", Path(directory) / "errors"
        environment = os.environ | {"COLUMNS": "400"}
        words = ["serve", *arguments]
        process = Forked("paramserver.cli", words, environment=environment, log=log, errors=errors)
        try:
            code = process.wait(seconds)
            return subprocess.CompletedProcess(words, code, stdout=log.read_text(), stderr=errors.read_text())
        finally:
            process.kill()
