"""Calls to daemons never go through a proxy of the environment. Many clusters set one for downloads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from paramserver.admin.cli import app
from tests.integration.support.daemon import Daemon
from tests.integration.support.guarded import guarded_daemon
from tests.integration.support.ranks import free_port
from trainer_client import Credentials, StoreClient, StoreClientSync
from trainer_client.client.transport.channel import wait_until_serving
from trainer_client.client.transport.rank_store import RankStore

VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


class Proxy:
    """A proxy that accepts connections, remembers the request of each, and closes them."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                request = connection.recv(4096)
                if request == b"stop":
                    return
                self.asked.append(request)

    def close(self) -> None:
        with socket.create_connection(self._listener.getsockname()) as last:
            last.sendall(b"stop")
        self._thread.join()
        self._listener.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy that every variable known to gRPC or other programs names, and no variable excludes."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with closing(Proxy()) as listening:
        for name in VARIABLES:
            monkeypatch.setenv(name, listening.url)
            monkeypatch.setenv(name.upper(), listening.url)
        yield listening


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A daemon on TCP, and the credentials with which clients connect to it."""

    address: str
    credentials: Credentials


@pytest.fixture(scope="module", params=["TLS", "in the clear"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    if request.param == "TLS":
        with guarded_daemon() as guarded:
            token_file = guarded.directory / "token"
            token_file.write_text(guarded.tokens["operator"])
            shown = guarded.credentials("operator", token=None, token_file=token_file)
            yield Node(address=guarded.address, credentials=shown)
    else:
        address = f"127.0.0.1:{free_port()}"
        with Daemon(tmp_path_factory.mktemp("clear") / "state", {"listen": address}):
            yield Node(address=address, credentials=Credentials())


def test_grpc_by_itself_would_ask_the_proxy(node: Node, proxy: Proxy) -> None:
    """gRPC alone would ask the proxy. This shows that the next tests can fail."""
    with grpc.insecure_channel(node.address) as channel, pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert proxy.asked and proxy.asked[0].startswith(f"CONNECT {node.address}".encode())


async def test_no_client_does(node: Node, proxy: Proxy) -> None:
    shown = node.credentials
    wait_until_serving(node.address, 30, shown)
    with closing(RankStore(node.address, "a trainer", shown, prefer_streams=True)) as store:
        assert store.plane.name == "streams"
    weight = {"w": torch.ones(10)}
    with StoreClientSync.connect(node.address, credentials=shown) as client, client.open("job", weight) as job:
        job.put(weight)
        job.commit()
    async with (
        await StoreClient.connect(node.address, credentials=shown, prefer_streams=True) as reading,
        await reading.read("job") as reader,
    ):
        assert torch.equal(await reader.get("w"), weight["w"])
    assert proxy.asked == []


def test_the_admin_tool_does_not(node: Node, proxy: Proxy) -> None:
    shown = [(f.name.replace("_", "-"), getattr(node.credentials, f.name)) for f in fields(Credentials)]
    options = [f"--{name}={value}" for name, value in shown if value]
    answered = CliRunner().invoke(app, [*options, "tiers", "--address", node.address])
    assert answered.exit_code == 0 and "host" in answered.output, answered.output
    assert proxy.asked == []
