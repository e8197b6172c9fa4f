"""The store daemon as a child process, and the calls of the admin tool.

This module owns the process. It ends with the context, and also if the demo is killed, because the daemon stops when
its standard input, a pipe from the demo, ends.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo_support.errors import DemoError, log_tail
from paramserver.contract.channel import channel_to

SERVICE = "paramserver.v1.ParameterStore"
START_SECONDS = 60.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.1


@dataclass(slots=True, kw_only=True)
class DaemonMemory:
    """The largest memory use that was read, in bytes.

    Attributes:
        resident: all memory in RAM: the shared memory of the host tier, `private` and `mapped`.
        private: memory that is the daemon's alone.
        mapped: pages of libraries, which the trainers map, too.
    """

    resident: int = 0
    private: int = 0
    mapped: int = 0

    def read(self, pid: int) -> None:
        fields: dict[str, int] = {}
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields[name] = int(value.split()[0]) * 1024
        # The fields are missing if the process is just ending.
        self.resident = max(self.resident, fields.get("VmRSS", 0))
        self.private = max(self.private, fields.get("RssAnon", 0))
        self.mapped = max(self.mapped, fields.get("RssFile", 0))


class StoreDaemon:
    """A context that runs `paramserver serve` on a UNIX socket."""

    def __init__(self, *, state_dir: Path, log_path: Path, host_budget: str, nvme_budget: str) -> None:
        self.memory = DaemonMemory()
        self._log_path = log_path
        state_dir.mkdir(parents=True, exist_ok=True)
        self.address = f"unix:{state_dir.absolute() / 'paramserver.sock'}"
        self._command = [
            *(sys.executable, "-m", "paramserver", "serve", "--exit-with-stdin"),
            *("--state-dir", str(state_dir)),
            *("--host-budget", host_budget, "--nvme-budget", nvme_budget),
        ]

    def __enter__(self) -> Self:
        with self._log_path.open("wb") as log_file:
            # The daemon has its own session, so that Ctrl-C in the terminal reaches only the demo, which stops it.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, start_new_session=True
            )
        try:
            self._wait_until_serving()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Read the memory use. Raise DemoError if the daemon has stopped."""
        if (code := self._process.poll()) is not None:
            raise DemoError(
                f"the store daemon stopped with exit code {code}; its log ends:\n{log_tail(self._log_path)}"
            )
        self.memory.read(self._process.pid)

    def _wait_until_serving(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        with channel_to(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                self.check()
                with suppress(grpc.RpcError):
                    answer = stub.Check(request, timeout=1.0, wait_for_ready=True)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(POLL_SECONDS)
        raise DemoError(
            f"the store daemon does not serve after {START_SECONDS:g} s; its log ends:\n{log_tail(self._log_path)}"
        )

    def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        for signal_it in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
                break
            signal_it()
        self._process.wait()

    # --- the admin tool

    def show(self, verb: str) -> None:
        """Print the command `paramserver-admin VERB`, and run it with its output on the terminal."""
        print(f"$ paramserver-admin {verb} --address {shlex.quote(self.address)}", flush=True)
        subprocess.run(self._admin_command(verb), check=True)

    def query(self, verb: str) -> Any:
        """Return the parsed output of `paramserver-admin VERB --json`. Raise DemoError if the command fails."""
        result = subprocess.run([*self._admin_command(verb), "--json"], check=False, capture_output=True, text=True)
        if result.returncode != 0:
            raise DemoError(f"paramserver-admin {verb} --json failed: {result.stderr.strip()}")
        return json.loads(result.stdout)

    def _admin_command(self, verb: str) -> list[str]:
        # pip has installed the script beside this interpreter.
        return [str(Path(sys.executable).with_name("paramserver-admin")), verb, "--address", self.address]
