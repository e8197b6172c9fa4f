"""A real Prometheus scrapes real daemons under training load, with the rules of deploy/prometheus: each planted fault
raises its alert, and a healthy daemon raises none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from tests.faults.shim import environment
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.following import following
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Client, Clients
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.credentials import NO_CREDENTIALS
from trainer_client.copying.follow import DaemonPlace, Follower, FollowerOrder

DIRECTORY = Path(__file__).parents[2] / "deploy" / "prometheus"
STALL_SOURCE = Path(__file__).parents[1] / "faults" / "stall.c"
# The damaged job has more bytes than the host tier has room for, so that the scrubber reads them from the disk.
TRAINED = Layout(groups=tuple(f"block.{number}" for number in range(4)))
LARGE = Layout(groups=tuple(f"block.{number}" for number in range(12)))
NUMEL = 256 << 10
# A scrape each second, and the alerts' own thresholds in seconds (a client that is silent for 10 s) take this long.
ALERT_SECONDS = 180.0
HEALTHY_SECONDS = 15.0
FAULTS = ("alone", "damaged", "full", "silent", "stuck")

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (apt install prometheus)"
    ),
]


def shortened(rules: str) -> str:
    """Return the rules with shorter durations: each is a 12th, but ranges and offsets are at least 5 s.

    On a busy machine a scrape may take longer than the second between two of them, so a daemon that is down for a
    minute is down for five seconds here.
    """

    def seconds(text: str) -> float:
        return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]

    rules = re.sub(r"for: (\d+[sm])\b", lambda found: f"for: {max(1, round(seconds(found[1]) / 12))}s", rules)
    return re.sub(
        r"(\[|offset )(\d+[sm])\b", lambda found: f"{found[1]}{max(5, round(seconds(found[2]) / 12))}s", rules
    )


class Prometheus:
    """A Prometheus with the project's configuration, for other targets and with shorter intervals."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        """Start it. `targets` are the addresses of metrics by the name of the daemon."""
        self._names = {address: name for name, address in targets.items()}
        config = (DIRECTORY / "prometheus.yml").read_text().replace("15s", "1s")
        config = config.replace('"127.0.0.1:9464"', ", ".join(f'"{address}"' for address in targets.values()))
        (directory / "prometheus.yml").write_text(config)
        rules = shortened((DIRECTORY / "paramserver.rules.yml").read_text())
        (directory / "paramserver.rules.yml").write_text(rules)
        self._address = f"127.0.0.1:{free_port()}"
        self._log = directory / "prometheus.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an instant query."""
        url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def up(self) -> set[str]:
        """Return the names of the daemons whose last scrape succeeded."""
        return {self._names[found["metric"]["instance"]] for found in self.query('up{job="paramserver"} == 1')}

    def alerts(self, expression: str = 'ALERTS{alertstate="firing"}') -> dict[str, set[str]]:
        """Return the names of the alerts that fire now, by the name of the daemon."""
        firing: dict[str, set[str]] = {}
        for found in self.query(expression):
            metric = found["metric"]
            firing.setdefault(self._names[metric["instance"]], set()).add(metric["alertname"])
        return firing


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    directory.mkdir()
    started = Prometheus(directory, targets)
    try:
        wait_until(started.is_ready, seconds=60)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(30)


class Load(threading.Thread):
    """A rank that trains until it is stopped, or until its daemon fails it."""

    def __init__(self, clients: Clients, layout: Layout) -> None:
        super().__init__()
        self.rank = clients.rank(layout).begin()
        self.step = 0
        self.stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(0.05):
            try:
                self.rank.train(self.step + 1, self.step + 1)
            except Exception:
                # A device that does not answer, or a daemon that was killed, ends the training.
                return
            self.step += 1


def stalling(directory: Path, stall_while: Path) -> dict[str, str]:
    """Return the environment of a daemon whose device stalls while a file exists."""
    library = directory / "stall.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(STALL_SOURCE), "-ldl"], check=True)
    return environment(library) | {"STALL_WHILE": str(stall_while)}


def fill_host_memory(clients: Clients) -> None:
    """Lease the host tier in ever smaller pieces, until there is no room for one of 4 KiB."""
    rank = clients.rank(Layout(name="holder", numels=(NUMEL,), groups=("a",)), run_id="holder").begin()
    reader = rank.call("OpenReader", job="holder").reader_id
    numel = NUMEL
    while numel > 1024:
        # The ranges differ, because leases on the same range would share its memory.
        numel -= 1
        wanted = pb.TensorRange(fqn="a.weight.0", kind=pb.KIND_PARAM, numel=numel, reader_id=reader)
        try:
            rank.call("AcquireLeases", wants=[pb.AcquireLeasesRequest.Want(mode=pb.LEASE_MODE_READ, range=wanted)])
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            numel //= 2


def write_over(daemon: Daemon) -> None:
    """Write zeros over all data of a daemon, as a device that loses its contents."""
    for device in tiers(daemon.address)[1].devices:
        with Path(device.path).open("r+b") as file:
            file.write(bytes(Path(device.path).stat().st_size))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH, which makes a device stall")
def test_each_planted_fault_raises_its_alert_and_a_healthy_daemon_raises_none(tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    # A client sends five heartbeats within its time-out, and one that is silent for 10 s counts as stalled.
    common = {"nvme_budget": "256MiB", "heartbeat_timeout_seconds": 45.0, "device_timeout_seconds": 2.0}
    special: dict[str, dict[str, Any]] = {
        "damaged": {"host_budget": 4992 << 10, "scrub_bandwidth": "1GiB"},
        "full": {"admission_timeout_seconds": 0.5},
        "stuck": {"scrub_bandwidth": 0},
    }
    targets = {name: f"127.0.0.1:{free_port()}" for name in ("healthy", *FAULTS)}
    with ExitStack() as stack:
        daemons: dict[str, Daemon] = {}
        clients: dict[str, Clients] = {}
        loads: dict[str, Load] = {}
        for name, address in targets.items():
            config = common | {"metrics_listen": address} | special.get(name, {})
            stalled: Any = {"fresh": True, "environment": stalling(tmp_path, stall)} if name == "stuck" else {}
            daemons[name] = stack.enter_context(Daemon(tmp_path / name, config, **stalled))
            clients[name] = stack.enter_context(Clients(daemons[name].address))
            loads[name] = Load(clients[name], LARGE if name == "damaged" else TRAINED)
            stack.callback(loads[name].join)
            stack.callback(loads[name].stopped.set)
        holder = stack.enter_context(Daemon(tmp_path / "holder", common))
        stack.enter_context(replicated(daemons["alone"], holder))
        monitor = stack.enter_context(prometheus(tmp_path / "prometheus", targets))
        # The device answers again before anything is closed.
        stack.callback(stall.unlink, missing_ok=True)
        wait_until(lambda: monitor.up() == set(targets), seconds=ALERT_SECONDS)
        wait_until(lambda: all(load.step >= 3 for load in loads.values()), seconds=ALERT_SECONDS)
        time.sleep(HEALTHY_SECONDS)
        assert monitor.alerts() == {}, "no daemon has a fault yet"

        holder.kill()
        stack.enter_context(silent_client(daemons["silent"]))
        # Training needs host memory, and writes over damage.
        for name in ("full", "damaged"):
            loads[name].stopped.set()
            loads[name].join()
        fill_host_memory(clients["full"])
        write_over(daemons["damaged"])
        stall.touch()
        wanted = {
            "alone": {"ParamserverReplicaLag"},
            "damaged": {"ParamserverDataDamaged", "ParamserverTierDegraded"},
            "full": {"ParamserverTierFull", "ParamserverRequestsRefusedForRoom"},
            "silent": {"ParamserverClientStalled", "ParamserverClientLost"},
            "stuck": {"ParamserverDeviceStuck", "ParamserverTierDegraded"},
        }
        raised: dict[str, set[str]] = {name: set() for name in targets}

        def are_raised(expected: Mapping[str, set[str]]) -> bool:
            for name, alerts in monitor.alerts().items():
                raised[name] |= alerts
            return all(alerts <= raised[name] for name, alerts in expected.items())

        deadline = time.monotonic() + ALERT_SECONDS
        while not are_raised(wanted):
            assert time.monotonic() < deadline, f"{wanted} were to be raised, and {raised} were"
            time.sleep(0.5)

        daemons["silent"].kill()
        wait_until(lambda: are_raised({"silent": {"ParamserverDown"}}), seconds=ALERT_SECONDS)
        trained = loads["healthy"].step
        wait_until(lambda: loads["healthy"].step > trained)
        assert raised["healthy"] == set()
        ever = monitor.alerts('count_over_time(ALERTS{alertstate="firing"}[10m])')
        assert "healthy" not in ever, ever
        recorded = monitor.query("paramserver:commit_seconds:p99_5m > 0")
        assert recorded, "the recording rules are evaluated, too"


def replicated(own: Daemon, holder: Daemon) -> AbstractContextManager[Follower]:
    """Keep a replica of a daemon's job."""
    origin, target = (DaemonPlace.of(daemon.address, NO_CREDENTIALS) for daemon in (own, holder))
    return following(FollowerOrder(job=TRAINED.name, origin=origin, holder=target, finish_seconds=1.0))


@contextmanager
def silent_client(daemon: Daemon) -> Iterator[Client]:
    """Open a session that never sends a heartbeat, as of a client whose process is stopped."""
    client = Client(daemon.address, "stopped", silent=True)
    try:
        yield client
    finally:
        client.close()


def test_only_durations_differ_in_the_shortened_rules() -> None:
    rules = (DIRECTORY / "paramserver.rules.yml").read_text()
    durations = re.compile(r"(?<=for: )\d+[sm]\b|(?<=\[)\d+[sm](?=\])|(?<=offset )\d+[sm]\b")
    assert durations.sub("", shortened(rules)) == durations.sub("", rules)
    assert len(durations.findall(rules)) >= 12
