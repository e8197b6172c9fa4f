"""Hostile clients take as many connections, descriptors, sessions and calls as they can get. Operators and local
clients are served nevertheless, and when the flood ends all clients are served as before."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paramserver.security.certificates import make_certificates
from paramserver.security.tokens import remove_token
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.integration.support.daemon import CHANNEL_OPTIONS, Daemon, tiers
from tests.integration.support.guarded import Guarded, guarded_daemon
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import CALL_SECONDS, Client, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.client.transport.credentials import Credentials

CODE = grpc.StatusCode
# The limit of open files is so low that one flood would take all of them.
FILES = 200
FLOOD = 300
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
LIMITED = ["sh", "-c", f'ulimit -n {FILES} && exec "$0" "$@"']


def descriptors(daemon: Daemon) -> int:
    """Return the number of descriptors that the daemon has open."""
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def arena_of(daemon: Daemon) -> int:
    """Connect to the arena's socket, and return the number of descriptors that it sends."""
    with socket.socket(socket.AF_UNIX) as arena_socket:
        arena_socket.connect(f"{daemon.socket}.arena")
        return receive(arena_socket)


def receive(arena_socket: socket.socket) -> int:
    """Receive descriptors over a connection, close them, and return their number."""
    arena_socket.settimeout(CALL_SECONDS)
    _, received, _, _ = socket.recv_fds(arena_socket, 1, 1)
    for descriptor in received:
        os.close(descriptor)
    return len(received)


def is_served(address: str) -> bool:
    """Return whether the daemon answers an admin call."""
    try:
        tiers(address)
    except grpc.RpcError:
        return False
    return True


@contextlib.contextmanager
def flood(family: socket.AddressFamily, address: Any) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing, connections that send something other than HTTP/2, and connections that send
    HTTP/2's preface and make no call."""
    with contextlib.ExitStack() as opened:
        connections = []
        for words, _ in zip(itertools.cycle([b"", HTTP2_PREFACE, b"GET / HTTP/1.1\r\n"]), range(FLOOD), strict=False):
            connection = opened.enter_context(socket.socket(family))
            connection.settimeout(CALL_SECONDS)
            connection.connect(address)
            with contextlib.suppress(OSError):  # The daemon may have closed the connection.
                connection.sendall(words)
            connections.append(connection)
        yield connections


@pytest.mark.parametrize("flooded", ["tcp", "unix"])
def test_connections_without_a_call_take_nothing_from_another_listener_and_are_closed(
    tmp_path: Path, flooded: str
) -> None:
    tcp = f"127.0.0.1:{free_port()}"
    config = {"listen": tcp, "connection_idle_seconds": 1.0}
    with Daemon(tmp_path / "state", config, prefix=LIMITED) as daemon:
        other, family, target = {
            "tcp": (daemon.address, socket.AF_INET, ("127.0.0.1", int(tcp.rpartition(":")[2]))),
            "unix": (tcp, socket.AF_UNIX, str(daemon.socket)),
        }[flooded]
        hit = tcp if flooded == "tcp" else daemon.address
        rank = Rank(other, Layout(name="job", numels=(5_000,), groups=("a",))).begin()
        rank.map_arena()
        wait_until(lambda: is_served(tcp) and is_served(daemon.address))
        # After this time the daemon has closed the idle connections that this test made before the flood.
        time.sleep(1.5)
        before = descriptors(daemon)
        with flood(family, target):
            assert descriptors(daemon) < FILES - 40, "the daemon keeps descriptors for its own files"
            # Operators, local clients and commits are served through the other listener and the arena's socket.
            assert is_served(other)
            assert arena_of(daemon) == 1
            rank.train(1, 2)
            # The flood's clients have closed no connection. The daemon closes idle ones, so the flooded listener serves
            # again.
            wait_until(lambda: is_served(hit))
        rank.assert_at(2)
        rank.close()
        wait_until(lambda: descriptors(daemon) <= before)
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log
        assert f"the limit of {FILES} open files allows" in daemon.log


def test_every_acceptor_outlives_a_lack_of_descriptors() -> None:
    """The test lowers the daemon's limit to its open descriptors, as if other work had taken all the rest."""
    with guarded_daemon() as guarded:
        daemon, limits = guarded.daemon, resource.RLIMIT_NOFILE
        operator = guarded.channel("operator", tcp=False)
        admin = admin_grpc.StoreAdminStub(operator)
        admin.GetTiers(admin_pb.GetTiersRequest(), timeout=CALL_SECONDS)
        alice = Client(guarded.address, channel=guarded.channel("alice"))
        allowed = resource.prlimit(daemon.process.pid, limits)
        before = descriptors(daemon)
        resource.prlimit(daemon.process.pid, limits, (before, allowed[1]))
        with socket.socket(socket.AF_UNIX) as arena_socket, socket.create_connection(_host_and_port(guarded.address)):
            arena_socket.connect(f"{daemon.socket}.arena")
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(str(daemon.socket))
                guarded.wait_for_log("to hand out the arena failed")
                # The daemon cannot read the token file now. When it can again, it must withdraw this token's rights.
                remove_token(guarded.token_file, "alice")
                guarded.wait_for_log("the changed token file cannot be used")
                # The daemon still serves a client that is already connected.
                admin.GetTiers(admin_pb.GetTiersRequest(), timeout=CALL_SECONDS)
                resource.prlimit(daemon.process.pid, limits, allowed)
                assert receive(arena_socket) == 1
        assert arena_of(daemon) == 1
        for tcp in (True, False):
            with guarded.channel("operator", tcp=tcp) as channel:
                late = admin_grpc.StoreAdminStub(channel)
                late.GetTiers(admin_pb.GetTiersRequest(), timeout=CALL_SECONDS, wait_for_ready=True)
        wait_until(alice.ended.is_set)
        alice.close()
        wait_until(lambda: descriptors(daemon) <= before)
        operator.close()
        assert daemon.log.count("to hand out the arena failed") == 1, "a failure that lasts is one line"
        assert f"[Errno {errno.EMFILE}]" in daemon.log
        assert daemon.stop() == 0


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_too_low_a_limit_of_open_files_is_refused_at_the_start_by_what_to_set(tmp_path: Path) -> None:
    with Daemon(tmp_path / "low", prefix=["sh", "-c", 'ulimit -n 80 && exec "$0" "$@"'], wait=False) as daemon:
        assert daemon.wait() == 1
        assert "the limit of 80 open files leaves room for" in daemon.log and "ulimit -Hn" in daemon.log
        assert "Traceback" not in daemon.log


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    prefix = ["sh", "-c", 'ulimit -Sn 100 && ulimit -Hn 1000 && exec "$0" "$@"']
    with Daemon(tmp_path / "state", prefix=prefix) as daemon:
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (1000, 1000)
        assert daemon.stop() == 0
        assert "open files allows" not in daemon.log


class Hoarder:
    """A client that opens sessions until the daemon refuses, and keeps them."""

    def __init__(self, guarded: Guarded, token: str, *, tcp: bool) -> None:
        self.clients: list[Client] = []
        self.refusal = ""
        while not self.refusal and len(self.clients) < FLOOD:
            try:
                self.clients.append(Client(guarded.address, token, channel=guarded.channel(token, tcp=tcp)))
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call) and error.code() is CODE.RESOURCE_EXHAUSTED
                self.refusal = error.details() or ""

    def close(self) -> None:
        for client in self.clients:
            client.close()


def test_a_holder_of_a_jobs_token_leaves_seats_for_local_clients_and_operators() -> None:
    sessions = {"max_sessions": 16, "reserved_sessions": 2, "max_sessions_per_identity": 99}
    with guarded_daemon(**sessions, max_sessions_per_address=99) as guarded:
        remote = Hoarder(guarded, "alice", tcp=True)
        assert len(remote.clients) == 12
        assert "max_sessions: 12 sessions are open, of 16, and the 4 that are left are kept" in remote.refusal
        local = Hoarder(guarded, "bob", tcp=False)
        assert len(local.clients) == 2 and "the 2 that are left are kept" in local.refusal
        for tcp in (True, False):
            operator = Client(guarded.address, channel=guarded.channel("operator", tcp=tcp))
            assert len(operator.admin.ListSessions(admin_pb.ListSessionsRequest(), timeout=CALL_SECONDS).sessions) > 14
            operator.close()
        local.close()
        remote.close()
        again = Hoarder(guarded, "alice", tcp=True)
        assert len(again.clients) == 12
        again.close()


@pytest.mark.parametrize("key", ["identity", "address"])
def test_one_token_and_one_address_have_a_share_of_the_sessions(key: str) -> None:
    with guarded_daemon(**{f"max_sessions_per_{key}": 3}) as guarded:
        alice = Hoarder(guarded, "alice", tcp=True)
        who = "token alice" if key == "identity" else "ipv4:127.0.0.1"
        assert len(alice.clients) == 3
        assert f"max_sessions_per_{key} = 3: {who} has 3 sessions open" in alice.refusal
        bob = Hoarder(guarded, "bob", tcp=True)
        assert len(bob.clients) == (3 if key == "identity" else 0)
        # Operators have neither limit. A client over the UNIX socket has no address, so the limit per address does not
        # apply to it.
        for token, tcp in (("operator", True), ("operator", False), ("bob", False)):
            if key == "address" or token == "operator":
                Client(guarded.address, channel=guarded.channel(token, tcp=tcp)).close()
        alice.clients.pop().close()
        alice.clients.append(Client(guarded.address, channel=guarded.channel("alice")))
        alice.close()
        bob.close()


def test_without_tokens_a_certificate_is_an_identity(tmp_path: Path) -> None:
    tls, address = tmp_path / "tls", f"127.0.0.1:{free_port()}"
    make_certificates(tls, ["127.0.0.1"], ["one", "two"], 1)
    files = {"tls_certificate": "server.pem", "tls_key": "server-key.pem", "tls_client_ca": "ca.pem"}
    config = {"listen": address, "max_sessions_per_identity": 2} | {k: str(tls / v) for k, v in files.items()}

    def connect(name: str) -> Client:
        credentials = Credentials(
            tls_ca=tls / "ca.pem", tls_certificate=tls / f"{name}.pem", tls_key=tls / f"{name}-key.pem"
        )
        return Client(address, channel=credentials.connect(address, CHANNEL_OPTIONS))

    with Daemon(tmp_path / "state", config) as daemon:
        opened = [connect("one"), connect("one"), connect("two")]
        with refused(CODE.RESOURCE_EXHAUSTED, "max_sessions_per_identity = 2: certificate 'one' has 2 sessions open"):
            connect("one")
        opened += [Client(daemon.address) for _ in range(3)]
        for client in opened:
            client.close()


def test_an_operator_gets_in_while_the_holder_of_a_token_does_its_worst(tmp_path: Path) -> None:
    """A token's holder floods with everything at once: sessions, watches, silent transfers, connections, and calls
    without a pause."""
    config = {"max_sessions": 64, "reserved_sessions": 4, "connection_idle_seconds": 2.0}
    with guarded_daemon(**config) as guarded, contextlib.ExitStack() as cleanup:
        rank = Rank(
            guarded.daemon.address,
            Layout(name="bob", numels=(5_000,), groups=("a",)),
            channel=guarded.channel("bob", tcp=False),
        ).begin()
        hoarder = Hoarder(guarded, "alice", tcp=True)
        cleanup.callback(hoarder.close)
        stop = threading.Event()
        calls = [itertools.count() for _ in range(4)]

        def hammer(number: int) -> None:
            client = hoarder.clients[number]
            while not stop.is_set():
                with contextlib.suppress(grpc.RpcError):
                    client.call("ListStoredJobs")
                next(calls[number])

        def open_streams(channel: grpc.Channel) -> None:
            """Begin stream calls and never send a message in them."""
            for method in ("Read", "Write", "Session", "WatchJob"):
                stream: Any = channel.stream_stream(f"/paramserver.v1.ParameterStore/{method}")
                for _ in range(100):
                    cleanup.callback(stream(iter(threading.Event().wait, None)).cancel)

        threads = [threading.Thread(target=hammer, args=(number,)) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            cleanup.callback(thread.join)
        cleanup.callback(stop.set)
        open_streams(cleanup.enter_context(guarded.channel("alice")))
        cleanup.enter_context(flood(socket.AF_INET, _host_and_port(guarded.address)))
        for _ in range(5):
            with guarded.channel("operator", tcp=False) as channel:
                admin = admin_grpc.StoreAdminStub(channel)
                assert admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10.0).sessions > 10
                assert admin.ListSessions(admin_pb.ListSessionsRequest(), timeout=10.0).sessions
            operator = Client(guarded.address, channel=guarded.channel("operator", tcp=False))
            operator.call("ListStoredJobs")
            operator.close()
        rank.train(1, 3)
        rank.assert_at(3)
        rank.close()
        assert all(next(count) for count in calls), "the flood went on meanwhile"
