"""Tensor bytes stay in the arena: they neither pass through the socket nor add to the daemon's memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind
from tests.integration.support import stream_client
from tests.integration.support.daemon import MIB, Daemon, Overhead, stated_overhead
from tests.integration.support.store_client import Clients, Rank
from tests.unit.storage.builders import Layout

KIB = 1 << 10


class CountingProxy:
    """A UNIX socket that forwards to another one, and counts the bytes that pass in both directions."""

    def __init__(self, path: Path, target: Path) -> None:
        self.address = f"unix:{path}"
        self._target = str(target)
        self._lock = threading.Lock()
        self._passed = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def __enter__(self) -> CountingProxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._sockets]:
            end.close()

    @property
    def passed_bytes(self) -> int:
        """The number of bytes that have passed so far."""
        with self._lock:
            return self._passed

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                server.connect(self._target)
                self._start(partial(self._pump, client, server))
                self._start(partial(self._pump, server, client))

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(256 * KIB):
                with self._lock:
                    self._passed += len(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()


def bytes_of_two_steps(proxy: CountingProxy, group_bytes: int) -> int:
    """Train a job with one group of `group_bytes` for two steps, and return the bytes that the proxy forwarded from its
    opening on."""
    layout = Layout(name=f"of-{group_bytes}", numels=(group_bytes // 4,), groups=("a",), with_skips=False)
    with Clients(proxy.address) as clients:
        before = proxy.passed_bytes
        rank = clients.rank(layout).begin()
        for step in (1, 2):
            # The forward and the backward each read the weights once.
            for _ in range(2):
                lease = rank.acquire("a", Kind.PARAM, pb.LEASE_MODE_READ)
                assert lease.size_bytes == group_bytes
                assert rank.tensor(lease, Kind.PARAM).isfinite().all()
                rank.release(lease)
            rank.train(step, step)
        passed = proxy.passed_bytes - before
        if group_bytes < MIB:
            rank.assert_at(2)
        return passed


def test_bytes_on_the_wire_do_not_grow_with_the_tensors(tmp_path: Path) -> None:
    config = {"host_budget": "416MiB", "nvme_budget": "512MiB"}
    with (
        Daemon(tmp_path / "state", config) as daemon,
        CountingProxy(tmp_path / "counted.sock", daemon.socket) as proxy,
    ):
        small = bytes_of_two_steps(proxy, 64 * KIB)
        large = bytes_of_two_steps(proxy, 64 * MIB)
        # The remaining bytes are heartbeats and window updates of HTTP/2. They grow with time, not with the size of
        # tensors.
        print(f"{small} bytes on the wire for 64 KiB, {large} for 64 MiB")
        assert small < 16 * KIB and large < 16 * KIB, f"{small} and {large} bytes"
        assert abs(large - small) < 4 * KIB, f"{small} and {large} bytes"
        assert daemon.stop() == 0


def test_the_daemon_stays_within_its_budget_and_the_stated_overhead(tmp_path: Path) -> None:
    """The daemon stays within its stated overhead with states of five times its host budget, while eight readers read
    whole tensors."""
    budget = 32 * MIB
    # Each of the 80 groups has 150,000 parameters of 14 bytes each. The gradients alone, at 2 bytes each, are most of
    # the budget.
    layout = Layout(
        numels=(150_000,), groups=tuple(f"block.{i}" for i in range(80)), precision=DType.BFLOAT16, with_skips=False
    )
    assert sum(layout.group(g).numel for g in layout.groups) * 14 > 5 * budget
    with Daemon(tmp_path / "state", {"host_budget": budget, "nvme_budget": "512MiB"}, fresh=True) as daemon:
        idle = daemon.overhead
        readings = [idle]
        with Clients(daemon.address) as clients:
            rank = clients.rank(layout).begin()
            readings.append(daemon.overhead)
            for step in (1, 2, 3):
                rank.train(step, step)
                readings.append(daemon.overhead)
            read_everything(rank)
            readings.append(daemon.overhead)
        assert daemon.stop() == 0
    peak = Overhead(
        private_bytes=max(reading.private_bytes for reading in readings),
        mapped_bytes=max(reading.mapped_bytes for reading in readings),
    )
    print(f"overhead: {idle} when idle, {peak} at the peaks")
    stated = stated_overhead()
    assert peak.private_bytes < stated.private_bytes
    assert peak.mapped_bytes < stated.mapped_bytes
    # The states are five times the budget, so growth by the size of the states would exceed this limit.
    assert peak.private_bytes - idle.private_bytes < 64 * MIB


def read_everything(rank: Rank) -> None:
    """Read every master weight by name, over eight streams at once."""

    def read(groups: tuple[str, ...]) -> None:
        for group in groups:
            source = pb.TensorRange(fqn=f"{group}.weight.0", kind=pb.KIND_MASTER, offset=0, numel=150_000)
            header, data = stream_client.read(rank, range=source)
            assert len(data) == header.size_bytes

    readers = [threading.Thread(target=read, args=[rank.groups[i::8]]) for i in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
