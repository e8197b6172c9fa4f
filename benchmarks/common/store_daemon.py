"""A store daemon for a benchmark, in its own process, which listens on the loopback and on a UNIX socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_client.client.transport.channel import wait_until_serving

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDaemon:
    """A running store daemon, which accepts calls."""

    address: str  # The TCP address, HOST:PORT.
    socket_address: str  # The UNIX socket, unix:PATH.
    pid: int

    @property
    def private_bytes(self) -> int:
        """The bytes of the daemon's memory that belong neither to the arena nor to a mapped file."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) << 10


def _free_address() -> str:
    """Return an address of the loopback at which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def started(directory: Path, config: Mapping[str, Any], *, namespace: str = "") -> Iterator[StoreDaemon]:
    """Start a daemon with its files in `directory`, and terminate it at the end of the block.

    `config` is added to the daemon's configuration file. With a `namespace`, the daemon runs in that network namespace,
    in which `config` must have an address to listen on.

    Raises:
        StoreUnavailableError: the daemon does not serve within START_SECONDS.
    """
    address = _free_address()
    values = {"state_dir": str(directory / "state"), "listen": address, "log_level": "warning"} | dict(config)
    path = directory / "daemon.toml"
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    socket_address = f"unix:{directory / 'state' / 'paramserver.sock'}"
    with subprocess.Popen([*enter, sys.executable, "-m", "paramserver", "serve", "--config", str(path)]) as process:
        try:
            # The address in another namespace cannot be reached from here, but the socket can.
            wait_until_serving(socket_address if namespace else address, START_SECONDS)
            yield StoreDaemon(address=values["listen"], socket_address=socket_address, pid=process.pid)
        finally:
            process.terminate()


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)
