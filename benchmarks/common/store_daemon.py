"""A store daemon for a benchmark, in a process of its own, over TCP on the loopback."""

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

from trainer_client.transport.channel import wait_until_serving

START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDaemon:
    """One that serves."""

    address: str  # HOST:PORT
    socket_address: str  # unix:PATH
    pid: int

    @property
    def private_bytes(self) -> int:
        """Its memory that is neither the arena nor a file."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1]) << 10


@contextmanager
def started(directory: Path, config: Mapping[str, Any]) -> Iterator[StoreDaemon]:
    """Starts a daemon with its files in a directory; it is asked to end with the block.

    Raises:
        StoreUnavailableError: it does not serve.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    values = {"state_dir": str(directory / "state"), "listen": address, "log_level": "warning"} | dict(config)
    path = directory / "daemon.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    with subprocess.Popen([sys.executable, "-m", "paramserver", "serve", "--config", str(path)]) as process:
        try:
            wait_until_serving(address, START_SECONDS)
            yield StoreDaemon(
                address=address, socket_address=f"unix:{directory / 'state' / 'paramserver.sock'}", pid=process.pid
            )
        finally:
            process.terminate()
