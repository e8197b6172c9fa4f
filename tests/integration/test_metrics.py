"""The metrics of a real daemon: they agree with the admin service, and the endpoint stands its callers."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paramserver.metrics.visitors import LOG_SECONDS, MOST_VISITORS
from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import Kind
from storage.tiers.base import round_up
from tests.integration.support.daemon import MIB, Daemon, admin_of, run_serve, tiers
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Client, Clients, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

SECONDS = 30.0
ROOT = Path(__file__).parents[2]
HOSTILE = 64


def read(address: str, token: str = "", path: str = "/metrics", context: ssl.SSLContext | None = None) -> str:
    scheme = "http" if context is None else "https"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{scheme}://{address}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:
        text: str = answer.read().decode()
    return text


def status_of(address: str, token: str = "", path: str = "/metrics") -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        read(address, token, path)
    caught.value.close()
    return caught.value.code


def answer_to_a_hostile_request(host: str, port: int) -> bytes:
    with socket.create_connection((host, port)) as hostile:
        hostile.sendall(b"\x16\x03\x01" + bytes(200) + b"\r\n\r\n")
        return hostile.recv(64)


def tls_of(directory: Path) -> dict[str, str]:
    """Return the keys of the configuration for mutual TLS with the certificates of a directory."""
    names = (("certificate", "server"), ("key", "server-key"), ("client_ca", "ca"))
    return {f"tls_{key}": str(directory / f"{name}.pem") for key, name in names}


def known_client(directory: Path) -> ssl.SSLContext:
    """Return the TLS context of a client whose certificate the daemon accepts."""
    known = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    known.load_cert_chain(directory / "client.pem", directory / "client-key.pem")
    return known


def scrape(address: str) -> Mapping[tuple[str, ...], float]:
    """Return the value of each sample by its name and the values of its labels, which are in alphabetical order."""
    families = text_string_to_metric_families(read(address))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_metrics_agree_with_the_admin_service(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"metrics_listen": address, "metrics_jobs": 1}) as daemon:
        before = scrape(address)
        with Clients(daemon.address) as clients:
            clients.rank(Layout(name="idle", numels=(16,), groups=("a",))).begin().close()
            rank = clients.rank(Layout(name='a "job"\\', numels=(5000, 16), groups=("a", "b"))).begin()
            rank.train(1, 3)
            with refused(grpc.StatusCode.NOT_FOUND):
                rank.admin.ListShards(admin_pb.ListShardsRequest(job="nobody"))
            # The call is counted a moment after its answer was sent.
            refusals = ("paramserver_rpc_seconds_count", "NOT_FOUND", "ListShards")
            wait_until(lambda: scrape(address).get(refusals) == 1)
            found = scrape(address)
            some = read(address, path="/metrics?name[]=paramserver_jobs&name[]=paramserver_tier_damaged_blocks_total")
            with admin_of(daemon.address) as admin:
                shown = admin.GetTiers(admin_pb.GetTiersRequest())
                jobs = {job.name: job for job in admin.ListJobs(admin_pb.ListJobsRequest()).jobs}
        ended = scrape(address)
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log

    for tier, info in zip(("host", "nvme"), shown.tiers, strict=True):
        assert found["paramserver_tier_used_bytes", tier] == info.used_bytes
        assert found["paramserver_tier_budget_bytes", tier] == info.budget_bytes
        assert found["paramserver_tier_written_bytes_total", tier] == info.bytes_written
    assert found["paramserver_device_used_bytes", str(tmp_path / "state" / "data.0")] == shown.tiers[1].used_bytes
    assert found["paramserver_sessions",] == 1
    assert found["paramserver_jobs",] == 2
    # A scrape may name the metrics that it wants.
    samples = [line for line in some.splitlines() if not line.startswith("#")]
    assert samples == ['paramserver_tier_damaged_blocks_total{tier="nvme"} 0.0', "paramserver_jobs 2.0"]
    assert found["paramserver_job_committed_step", 'a "job"\\'] == 3 == jobs['a "job"\\'].committed_step
    assert ("paramserver_job_sessions", "idle") not in found, "one job has metrics of its own: the one in use"
    assert found["paramserver_rpc_seconds_count", "OK", "CommitStep"] >= 3
    assert found["paramserver_operation_seconds_count", "commit"] >= 4
    assert before["paramserver_operation_seconds_count", "commit"] == 0
    sessions = [value for key, value in ended.items() if key[0] == "paramserver_streams_total" and "Session" in key]
    assert sum(sessions) == 2
    assert ended["process_resident_memory_bytes",] > 0


def test_sessions_of_silent_clients_are_counted_as_lost_and_closed_ones_are_not(tmp_path: Path) -> None:
    """With short time-outs, no scrape may come while a client is silent, so a gauge alone would not show it."""
    address = f"127.0.0.1:{free_port()}"
    config = {"metrics_listen": address, "heartbeat_timeout_seconds": 1.0}
    with Daemon(tmp_path / "state", config) as daemon:
        Client(daemon.address, "closed").close()
        assert scrape(address)["paramserver_sessions_lost_total",] == 0
        silent = Client(daemon.address, "stopped", silent=True)
        wait_until(lambda: scrape(address)["paramserver_sessions_lost_total",] == 1)
        silent.close()


def test_parked_gradients_are_counted_on_the_tier_that_has_them(tmp_path: Path) -> None:
    """A daemon whose host memory has room for some of the gradients spills the rest."""
    address = f"127.0.0.1:{free_port()}"
    numel = 50_000
    layout = Layout(numels=(numel,), groups=tuple(f"block.{index}" for index in range(16)))
    config = {"metrics_listen": address, "host_budget": 4 * MIB, "nvme_budget": "256MiB"}

    def gradients() -> tuple[float, float]:
        found = scrape(address)
        host, nvme = (found["paramserver_tier_gradient_bytes", tier] for tier in ("host", "nvme"))
        return host, nvme

    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(layout).begin()
        leases: list[pb.Lease] = []
        for group in layout.groups:
            assert sum(gradients()) == len(leases) * round_up(4 * numel)
            leases.append(rank.acquire(group, Kind.GRAD, pb.LEASE_MODE_WRITE, step=1))
            rank.call("ParkGradients", lease_ids=[leases[-1].lease_id])

        def all_agree() -> bool:
            host, nvme = gradients()
            assert host > 0 and nvme > 0 and host + nvme == len(leases) * round_up(4 * numel)
            shown = {tier.tier: tier.gradient_bytes for tier in tiers(daemon.address)}
            page = {
                tier["name"]: tier["gradient_bytes"] for tier in json.loads(read(address, path="/data.json"))["tiers"]
            }
            return shown == {pb.TIER_HOST: host, pb.TIER_NVME: nvme} and page == {"host": host, "nvme": nvme}

        # The daemon may still be spilling a gradient between two of the readings.
        wait_until(all_agree)
        for lease in leases:
            rank.release(lease)
        assert gradients() == (0, 0)


@contextmanager
def hostile_clients(address: str, count: int, *certificates: str) -> Iterator[None]:
    """Have hostile clients connect to the endpoint, in another process, until the end of the context."""
    command = [sys.executable, "-m", "tests.integration.support.hostile_http", address.rpartition(":")[2], str(count)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *certificates], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as hostile:
        assert hostile.stdout is not None and hostile.stdin is not None
        assert hostile.stdout.readline() == "connected\n"
        yield
        assert hostile.poll() is None, "the hostile clients have given up"


@pytest.mark.parametrize("protocol", ["plain", "mutual TLS"])
def test_every_scrape_is_answered_beside_hostile_clients(tmp_path: Path, protocol: str) -> None:
    """They are silent, send a byte now and then, begin a handshake, guess a token, and come again at once."""
    address, context = f"127.0.0.1:{free_port()}", None
    certificates: tuple[str, ...] = ()
    operator = add_token(tmp_path / "tokens.toml", "operator", Role.ADMIN)
    config = {"metrics_listen": address, "token_file": str(tmp_path / "tokens.toml")}
    if protocol == "mutual TLS":
        make_certificates(tmp_path, ["127.0.0.1"], ["client"], 1)
        config |= tls_of(tmp_path)
        context, certificates = known_client(tmp_path), (str(tmp_path),)
    with Daemon(tmp_path / "state", config) as daemon:
        began = time.monotonic()
        with hostile_clients(address, HOSTILE, *certificates):
            answers = [read(address, operator, context=context) for _ in range(100)]
            wait_until(lambda: "with an unknown token" in daemon.log)
        assert all("paramserver_build_info" in answer for answer in answers)
        lines = [line for line in daemon.log.splitlines() if "metrics_listen: refused" in line]
        assert len(lines) <= 1 + (time.monotonic() - began) / LOG_SECONDS, "the log is bounded"
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_more_connections_than_there_are_places_give_way_to_later_ones(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    host, port = "127.0.0.1", int(address.rpartition(":")[2])
    with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon, ExitStack() as cleanup:
        silent = [cleanup.enter_context(socket.create_connection((host, port))) for _ in range(MOST_VISITORS + 8)]
        for _ in range(3):
            assert "paramserver_build_info" in read(address)
        assert status_of(address, path="/metric") == 404
        assert b"200" not in answer_to_a_hostile_request(host, port)
        # The oldest have given way, and the others keep their places.
        silent[0].settimeout(SECONDS)
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        wait_until(lambda: "gave way to others; the last was from 127.0.0.1" in daemon.log)
        assert daemon.stop() == 0, "a stop does not wait for callers"
        assert "Traceback" not in daemon.log


def test_a_stranger_cannot_have_a_large_request_collected(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    host, port = "127.0.0.1", int(address.rpartition(":")[2])
    header = b"X: " + b"x" * 1000 + b"\r\n"

    def answer(headers: int) -> bytes:
        with socket.create_connection((host, port), timeout=SECONDS) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + header * headers + b"\r\n")
            return stranger.recv(64)

    with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon:
        assert b"200" in answer(14)
        with contextlib.suppress(ConnectionError):
            assert answer(50) == b""
        assert daemon.stop() == 0


def test_metrics_need_the_token_of_an_admin(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    tokens = tmp_path / "tokens.toml"
    admin = add_token(tokens, "operator", Role.ADMIN)
    other = add_token(tokens, "trainer", Role.JOB, ["*"])
    with Daemon(tmp_path / "state", {"metrics_listen": address, "token_file": str(tokens)}) as daemon:
        assert status_of(address) == 401
        assert status_of(address, "guessed") == 401
        assert status_of(address, other) == 403
        assert "paramserver_tier_used_bytes" in read(address, admin)
        assert daemon.stop() == 0


def test_metrics_over_mutual_tls(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    make_certificates(tmp_path, ["127.0.0.1"], ["client"], 1)
    config = {"metrics_listen": address} | tls_of(tmp_path)
    stranger, known = ssl.create_default_context(cafile=str(tmp_path / "ca.pem")), known_client(tmp_path)
    with Daemon(tmp_path / "state", config) as daemon:
        assert "paramserver_build_info" in read(address, context=known)
        with pytest.raises(OSError):
            read(address, context=stranger)
        with pytest.raises(OSError):
            read(address)
        make_certificates(tmp_path, ["127.0.0.1"], ["client"], 2)
        assert "paramserver_build_info" in read(address, context=known), "renewed certificates are in use"
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_a_daemon_that_is_started_again_has_its_address_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon:
            assert "paramserver_build_info" in read(address)
            assert daemon.stop() == 0


def test_an_address_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_serve("--state-dir", str(tmp_path / "state"), "--metrics-listen", address, "--host-budget", "16MiB")
    assert ended.returncode == 1
    assert f"metrics_listen: cannot listen on {address}: Address already in use" in ended.stderr
