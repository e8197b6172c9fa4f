"""What the tests of docs/runbooks.md need: machines on which an operator's commands are run, and a training job.

The commands are those of the page, run by bash, with other paths, addresses and sizes. `systemctl` is a stand-in,
because tests have no systemd: it starts and stops what the unit in deploy/systemd says. `chown` and `runuser` are
stand-ins, because there is no user of that name here. `paramserver` and `paramserver-admin` run the programs of these
names in processes that are forked from a server which has imported them, so that no command imports them anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.namespaces import LINK
from tests.integration.support.forked import ROOT, Forked
from tests.integration.support.mounts import unmount
from tests.integration.support.operated_run import NO_LIMIT, Plan
from tests.integration.support.ranks import free_port
from trainer_client.client.transport.channel import is_serving, open_channel

PAGE = ROOT / "docs" / "runbooks.md"
UNIT = ROOT / "deploy" / "systemd" / "paramserver@.service"
CONFIG = UNIT.with_name("paramserver.toml")
USER = "alice"
SECONDS = 400.0
SMALL_DISK_BYTES = 8 << 20
RUN = "tests.integration.support.operated_run"

# The directories that a machine has of its own.
PLACES = ("etc/paramserver", "var/lib/paramserver", "run/paramserver", "mnt", "backup")
# The sizes on the page and in the files of `deploy`, and those of the tests.
SIZES = {"64GiB": "32MiB", "96GiB": "48MiB", "2TiB": "256MiB", "3TiB": "384MiB", "1GiB": "1MiB"} | {
    "16GiB": "32MiB",
    "200GiB": "256MiB",
}

# The program behind the commands that the machine itself carries out: it sends the command, and prints the answer.
_STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as way:
    way.connect({path!r})
    way.sendall(json.dumps([{name!r}, sys.argv[1:], dict(os.environ)]).encode())
    way.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: way.recv(65536), b""))
status, said, told = json.loads(answer)
sys.stdout.write(said)
sys.stderr.write(told)
sys.exit(status)
"""
# The modules of the project's two programs.
_PROGRAMS = {"paramserver": "paramserver.cli", "paramserver-admin": "paramserver.admin.cli"}


def commands() -> dict[str, list[str]]:
    """Return the commands of the page: the shell blocks of each section, by its heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        heading: re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


class Machine:
    """A machine with the unit of one user's daemon, and an operator's shell.

    Attributes:
        directory: has the directories that are at the root of a real machine: etc, var, run, mnt, backup.
        address: the TCP address of the daemon.
        said: the standard output of the last block.
        told: its standard error.
    """

    def __init__(self, directory: Path, addresses: Mapping[str, str], name: str, namespace: str = "") -> None:
        """Make the machine, without a daemon.

        Args:
            directory: its files; made.
            addresses: the addresses of the page, HOST:PORT, with those of the tests.
            name: its own address on the page.
            namespace: the network namespace of its processes; "": that of the tests.
        """
        directory.mkdir(parents=True)
        self.directory = directory
        self.address = addresses[name]
        self.said = self.told = ""
        self.namespace = namespace
        self._daemon: Forked | None = None
        self._mounted = False
        self._log = directory / "journal"
        self._log.touch()
        self._replaced = {
            **{f"/{place}": f"{directory}/{place}" for place in PLACES},
            # These two are where Kubernetes mounts Secrets.
            "/etc/paramserver-tls": f"{directory}/etc/paramserver/tls",
            "/etc/paramserver-tokens": f"{directory}/etc/paramserver",
            **addresses,
            **{address.rpartition(":")[0]: here.rpartition(":")[0] for address, here in addresses.items()},
            **SIZES,
            "127.0.0.1:9464": f"127.0.0.1:{free_port()}",
        }
        for place in (*PLACES, "bin"):
            (directory / place).mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        # The kernel takes only short paths, and that of `directory` is long.
        self._place = Path(f"/tmp/paramserver-systemctl-{os.getpid()}-{id(self):x}")
        self._listener.bind(str(self._place))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()
        for command in ("systemctl", *_PROGRAMS):
            self._command(command, _STAND_IN.format(python=sys.executable, path=str(self._place), name=command))
        self._command("chown", "#!/bin/sh\n")
        self._command("runuser", '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')

    def mount_small_disk(self) -> bool:
        """Mount a small file system below the state directory; return whether that is allowed here."""
        place = self.directory / "var/lib/paramserver"
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=0700", "paramserver-test", str(place)]
        self._mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self._mounted

    def close(self) -> None:
        """Kill the daemon, if it runs, and take no commands any more."""
        self._listener.close()
        self._place.unlink()
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
        if self._mounted:
            unmount(self.directory / "var/lib/paramserver")

    def configure(self, text: str, *, whole: bool = False) -> None:
        """Write the daemon's configuration: the file of deploy/systemd and a text, or the text alone (`whole`)."""
        before = "" if whole else CONFIG.read_text()
        (self.directory / "etc/paramserver" / f"{USER}.toml").write_text(self.placed(f"{before}{text}"))

    def placed(self, text: str) -> str:
        """Return a text of the page with the paths, addresses and sizes of this machine."""
        names = sorted(self._replaced, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, names)), lambda found: self._replaced[found[0]], text)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a shell on this machine."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PARAMSERVER_", "RANK"))}
        path = f"{self.directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "400"}

    def sh(self, block: str, code: int = 0) -> str:
        """Run a block of the page, which must end with the status `code`, and return its standard output."""
        enter = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        ended = subprocess.run(
            [*enter, "bash", "-euo", "pipefail", "-c", self.placed(block)],
            cwd=self.directory,
            env=self.environment | self._variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        self.said, self.told = ended.stdout, ended.stderr
        assert ended.returncode == code, f"{block}\n{self.said}{self.told}\n{self._log.read_text()[-3000:]}"
        return self.said

    def remember(self, block: str) -> None:
        """Have all later blocks find what a block exports."""
        (self.directory / "profile").write_text(self.placed(block))

    def _variables(self) -> dict[str, str]:
        profile = self.directory / "profile"
        lines = profile.read_text().splitlines() if profile.exists() else []
        return dict(line.split()[1].split("=", 1) for line in lines if line.startswith("export "))

    @property
    def journal(self) -> str:
        """What the daemons of this machine have logged."""
        return self._log.read_text() + (self.directory / "log").read_text()

    def trainer_environment(self) -> dict[str, str]:
        """Return the variables of a trainer on this machine."""
        tls = self.directory / "etc/paramserver/tls"
        return {
            "PARAMSERVER_ADDRESS": self.address,
            "PARAMSERVER_TLS_CA": str(tls / "ca.pem"),
            "PARAMSERVER_TLS_CERTIFICATE": str(tls / "trainer.pem"),
            "PARAMSERVER_TLS_KEY": str(tls / "trainer-key.pem"),
            "PARAMSERVER_TOKEN_FILE": str(self.directory / "etc/paramserver/trainer.token"),
        }

    def fork(
        self, module: str, arguments: list[str], environment: Mapping[str, str], log: Path, errors: Path | None = None
    ) -> Forked:
        """Run the `main` of a module on this machine."""
        return Forked(module, arguments, environment=environment, log=log, errors=errors, namespace=self.namespace)

    def lose(self) -> None:
        """Kill the daemon, and delete all that it has stored, as when the machine is lost."""
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()
        for place in PLACES[1:]:
            shutil.rmtree(self.directory / place)
            (self.directory / place).mkdir()

    # The stand-ins.

    def _command(self, name: str, text: str) -> None:
        path = self.directory / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                way, _ = self._listener.accept()
                with way:
                    sent = b"".join(iter(lambda: way.recv(65536), b""))  # noqa: B023
                    try:
                        answer = self._carry_out(*json.loads(sent))
                    except Exception as error:
                        answer = 1, "", repr(error)
                    way.sendall(json.dumps(answer).encode())

    def _carry_out(self, name: str, words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        """Carry out a command, and return its exit status, its output and its errors."""
        if name in _PROGRAMS:
            return self._run(_PROGRAMS[name], words, environment)
        verb, unit = words
        assert unit == f"paramserver@{USER}", unit
        problem = {"start": self._start, "stop": self._stop, "restart": self._restart}[verb]()
        return (1 if problem else 0), "", problem

    def _run(self, module: str, words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        """Run a program to its end."""
        said, told = self.directory / "said", self.directory / "told"
        program = self.fork(module, words, environment, said, told)
        try:
            return program.wait(SECONDS), said.read_text(), told.read_text()
        finally:
            program.kill()

    def _restart(self) -> str:
        return self._stop() or self._start()

    def _start(self) -> str:
        """Start what the unit says, and return the problem, if there is one."""
        unit = UNIT.read_text().replace("%i", USER)
        (command,) = re.findall(r"^ExecStart=\S+/paramserver (.*)$", unit, flags=re.MULTILINE)
        variables = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, flags=re.MULTILINE))
        runtime, state = self.directory / "run/paramserver" / USER, self.directory / "var/lib/paramserver" / USER
        for path in (runtime, state):
            path.mkdir(exist_ok=True)
        environment = self.environment | {name: self.placed(value) for name, value in variables.items()}
        log = self.directory / "log"
        with self._log.open("a") as journal:
            journal.write(log.read_text() if log.exists() else "")
        self._daemon = self.fork("paramserver.cli", self.placed(command).split(), environment, log)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if (status := self._daemon.poll()) is not None:
                return f"Job for paramserver@{USER}.service failed with status {status}.\n{log.read_text()}"
            if (runtime / "paramserver.sock").exists():
                with open_channel(f"unix:{runtime}/paramserver.sock") as channel:
                    if is_serving(channel, 2.0):
                        return ""
            time.sleep(0.02)
        return "it does not serve"

    def _stop(self) -> str:
        if self._daemon is None or self._daemon.poll() is not None:
            return ""
        self._daemon.send_signal(signal.SIGTERM)
        status = self._daemon.wait(SECONDS)
        # systemd removes a RuntimeDirectory when its unit stops.
        shutil.rmtree(self.directory / "run/paramserver" / USER)
        return f"it ended with status {status}" if status else ""


class Training:
    """A training job of some ranks, which makes the steps that it is allowed to make."""

    def __init__(self, plan: Plan, machines: Sequence[Machine], prefixes: Sequence[Sequence[str]] = ()) -> None:
        """Make the job, without ranks that run. Rank N is on machine N of `machines`."""
        self.directory = Path(plan.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.change(plan, machines)
        self.ranks: list[Forked] = []
        self.allow(0)

    def change(self, plan: Plan, machines: Sequence[Machine]) -> None:
        """Have the next start follow another plan in the same directory, with rank N on machine N."""
        self.plan, self._machines = plan, machines
        (self.directory / "plan.json").write_text(json.dumps(asdict(plan)))

    def allow(self, step: int, *, and_end: bool = False) -> None:
        """Let the run go on up to a step."""
        unfinished = self.plan.limit_file.with_suffix(".unfinished")
        unfinished.write_text(f"{step} end" if and_end else str(step))
        unfinished.replace(self.plan.limit_file)

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the ranks, as after the end of their last start; with `variables` in place of the machines' own."""
        host = self._machines[0].address.rpartition(":")[0] or "127.0.0.1"
        common = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        if self._machines[0].namespace:
            common["GLOO_SOCKET_IFNAME"] = LINK
        self.ranks = []
        for rank, machine in enumerate(self._machines):
            of_rank = {"WORLD_SIZE": str(len(self._machines)), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment = machine.environment | common | of_rank | dict(variables or machine.trainer_environment())
            arguments = [str(self.directory / "plan.json")]
            self.ranks.append(machine.fork(RUN, arguments, environment, self.log_file(rank)))

    def log_file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    @property
    def log(self) -> str:
        """What the ranks have printed since their last start."""
        return "\n".join(self.log_file(rank).read_text() for rank in range(len(self._machines)))

    @property
    def step(self) -> int:
        """The last step that all ranks have made."""
        return min(max(losses, default=0) for losses in self.losses())

    def losses(self) -> list[dict[int, str]]:
        """Return the loss of each step by rank, in hexadecimal. A step that was made twice has its last loss."""
        found: list[dict[int, str]] = []
        for rank in range(len(self._machines)):
            file = self.plan.losses_file(rank)
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            found.append({int(number): loss for number, loss in map(str.split, lines)})
        return found

    def wait_for(self, step: int) -> None:
        """Wait until all ranks have made a step, and fail if one of them ends before."""
        deadline = time.monotonic() + SECONDS
        while self.step < step:
            assert all(rank.poll() is None for rank in self.ranks), self.log
            assert time.monotonic() < deadline, f"step {step} is not made\n{self.log}"
            time.sleep(0.01)

    @contextmanager
    def going_on(self, steps: int = 2) -> Iterator[None]:
        """Let the run go on during the context, and after it until it has made some steps more."""
        self.allow(NO_LIMIT)
        self.wait_for(self.step + 1)
        yield
        self.wait_for(self.step + steps)
        self.allow(self.step + 1)

    def resume(self) -> None:
        """Start the ranks again, and let them make two steps."""
        self.allow(self.step + 2)
        self.start()
        self.wait_for(self.step + 2)

    def finish(self, step: int) -> None:
        """Let the ranks train up to a step and end; start them if none of them runs."""
        self.allow(step, and_end=True)
        if all(rank.poll() is not None for rank in self.ranks):
            self.start()
        assert self.ended() == [0] * len(self._machines), self.log
        assert self.step == step

    def ended(self) -> list[int]:
        """Wait until all ranks have ended, and return their exit statuses."""
        return [rank.wait(SECONDS) for rank in self.ranks]

    def results(self) -> list[dict[str, Any]]:
        return [torch.load(self.plan.results_file(rank)) for rank in range(len(self._machines))]

    def close(self) -> None:
        """Kill the ranks that still run."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
