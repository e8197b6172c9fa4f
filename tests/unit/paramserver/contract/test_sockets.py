"""A UNIX socket is reached at any path: by the kernel, which takes 107 bytes, and by gRPC, which reads a URI."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paramserver.contract.address import socket_path
from paramserver.contract.channel import channel_to
from paramserver.contract.sockets import grpc_target, system_path, with_real_paths
from tests.integration.support.daemon import CHANNEL_OPTIONS
from tests.integration.support.forked import ROOT

LONG = "d" * 200

# A program that connects to the socket, and then connects again from a child that it forks.
CONNECT = """
import os, socket, sys
from pathlib import Path
from paramserver.contract.sockets import system_path

def greeting():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(system_path(Path(sys.argv[1])))
        return client.recv(9)

assert greeting() == b"hello"
child = os.fork()
if child == 0:
    os._exit(0 if greeting() == b"hello" else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def serves(address: str) -> bool:
    with channel_to(address, options=CHANNEL_OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest()
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20, wait_for_ready=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """Run a gRPC server at the socket."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(grpc_target(path))
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    "name", ["plain", "a b", "50%41", "what?", "n#1", "\N{SNOWMAN}", "two\nlines", "a:b", "a+b", "'\"", LONG]
)
def test_grpc_serves_and_connects_whatever_the_directory_is_called(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    with serving(directory / "s"):
        assert (directory / "s").is_socket() and list(tmp_path.iterdir()) == [directory]
        assert serves(f"unix:{directory}/s") and serves(f"unix://{directory}/s")


def test_two_long_directories_that_differ_at_the_end_are_two(tmp_path: Path) -> None:
    one, two = tmp_path / LONG / "one", tmp_path / LONG / "two"
    one.mkdir(parents=True)
    two.mkdir()
    with serving(one / "s"):
        assert serves(f"unix:{one}/s") and not (two / "s").exists()
        with channel_to(f"unix:{two}/s") as channel, pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert isinstance(caught.value, grpc.Call) and "/proc/self/fd/" in (caught.value.details() or "")
    assert f"unix:{two}/s" in with_real_paths(caught.value.details() or "")


def test_a_channel_finds_the_server_again_and_one_in_a_directory_that_was_made_anew(tmp_path: Path) -> None:
    directory = tmp_path / LONG
    directory.mkdir()
    with channel_to(f"unix:{directory}/s", options=CHANNEL_OPTIONS) as channel:
        for _ in range(2):
            with serving(directory / "s"):
                stub = health_pb2_grpc.HealthStub(channel)
                assert stub.Check(health_pb2.HealthCheckRequest(), timeout=20, wait_for_ready=True)
    directory.rmdir()
    with pytest.raises(FileNotFoundError):
        channel_to(f"unix:{directory}/s")
    directory.mkdir()
    with serving(directory / "s"):
        assert serves(f"unix:{directory}/s")


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_long_directory_costs_one_descriptor_and_a_short_one_none(tmp_path: Path) -> None:
    (tmp_path / LONG).mkdir()
    system_path(tmp_path / LONG / "s")
    before = open_descriptors()
    for _ in range(100):
        system_path(tmp_path / LONG / "s")
        system_path(tmp_path / "s")
    assert open_descriptors() == before


def test_another_program_and_its_forked_child_reach_the_socket(tmp_path: Path) -> None:
    path = tmp_path / LONG / LONG / "s"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(system_path(path))
        listener.listen()
        listener.settimeout(60)
        program = subprocess.Popen([sys.executable, "-c", CONNECT, str(path)], cwd=ROOT)
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"hello")
        assert program.wait(60) == 0


def test_addresses_as_people_write_them() -> None:
    assert socket_path("unix:/run/p.sock") == socket_path("unix:///run/p.sock") == Path("/run/p.sock")
    with pytest.raises(ValueError, match="absolute path of the socket after 'unix:'"):
        socket_path("unix:p.sock")
