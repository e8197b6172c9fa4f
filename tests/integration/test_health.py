"""Probes without certificate and token learn whether the daemon serves, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.contract.channel import channel_to
from paramserver.listening import HEALTH_CONNECTIONS
from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import CHANNEL_OPTIONS, SERVICE, Daemon, admin_of, run_serve
from tests.integration.support.ranks import free_port
from tests.integration.support.waiting import wait_until

SECONDS = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING


def status_at(address: str, service: str) -> int:
    with channel_to(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)


def is_serving_at(address: str) -> bool:
    try:
        return status_at(address, "") == SERVING
    except grpc.RpcError:
        return False


def code_of_tiers(address: str) -> grpc.StatusCode | None:
    with admin_of(address) as admin, pytest.raises(grpc.RpcError) as caught:
        admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code()


def admin_health(address: str) -> subprocess.CompletedProcess[str]:
    program = "from paramserver.__main__ import admin; admin()"
    return subprocess.run(
        [sys.executable, "-c", program, "health", "--address", address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_probe_needs_neither_certificate_nor_token_and_gets_the_health_service_only(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", hosts=["127.0.0.1"], clients=["trainer"], days=1)
    add_token(tmp_path / "tokens.toml", name="operator", role=Role.ADMIN)
    health, listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    files = {"tls_certificate": "server.pem", "tls_key": "server-key.pem", "tls_client_ca": "ca.pem"}
    tls = {key: str(tmp_path / "tls" / name) for key, name in files.items()}
    config = {"health_listen": health, "listen": listen, "token_file": str(tmp_path / "tokens.toml")} | tls
    with Daemon(tmp_path / "state", config) as daemon:
        assert [status_at(health, service) for service in (SERVICE, "")] == [SERVING, SERVING]
        assert code_of_tiers(health) is grpc.StatusCode.UNIMPLEMENTED
        assert code_of_tiers(daemon.address) is grpc.StatusCode.UNAUTHENTICATED

        found = admin_health(daemon.address)
        assert (found.returncode, found.stdout, found.stderr) == (0, "SERVING\n", "")
        assert daemon.stop() == 0
        missing = admin_health(daemon.address)
        assert (missing.returncode, missing.stdout) == (1, "")
        assert "no daemon answers at" in missing.stderr


def test_an_address_of_the_probes_that_is_taken_ends_the_start_before_a_client_is_served(tmp_path: Path) -> None:
    address, waiting_at = f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/second/paramserver.sock"
    with (
        Daemon(tmp_path / "first", {"health_listen": address}),
        channel_to(waiting_at, options=CHANNEL_OPTIONS) as channel,
    ):
        # A trainer waits like this for the next daemon.
        check = health_pb2_grpc.HealthStub(channel).Check
        call = check.future(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
        second = ("--state-dir", str(tmp_path / "second"), "--host-budget", "16MiB")
        ended = run_serve(*second, "--health-listen", address)
        assert not call.done()
        call.cancel()
    assert ended.returncode == 1
    assert f"cannot listen on health_listen address {address}" in ended.stderr


def test_callers_that_watch_for_ever_do_not_keep_probes_out(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"health_listen": address}), ExitStack() as cleanup:
        for _ in range(HEALTH_CONNECTIONS):
            channel = cleanup.enter_context(channel_to(address, options=CHANNEL_OPTIONS))
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            assert next(watch).status == SERVING
        with pytest.raises(grpc.RpcError):
            status_at(address, "")
        wait_until(lambda: is_serving_at(address))
