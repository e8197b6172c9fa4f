"""Networks that tests can break: a link of packets between two network namespaces, and a proxy before a TCP port.

Both can delay, throttle and stop everything. The link can also lose packets, and the proxy can reset connections. The
link forwards packets in this process, because not every kernel has netem. It needs root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
# A slow link buffers this many seconds of packets, and drops the packets that come while its buffer is full.
_BUFFER_SECONDS = 0.2
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """The condition of a network, the same for both directions.

    Attributes:
        delay_seconds: the delay of every packet (link) or piece (proxy).
        loss: the share of packets that are lost (links only).
        bytes_per_second: the bandwidth; None: unlimited.
        black_hole: no packet passes, and neither side gets an error.
    """

    delay_seconds: float = 0.0
    loss: float = 0.0
    bytes_per_second: float | None = None
    black_hole: bool = False


CLEAR = Weather()


def why_no_link() -> str | None:
    """Return the reason why a Link cannot be made on this machine; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not TUN.exists():
        return f"there is no {TUN}"
    try:
        made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
        subprocess.run(["ip", "-V"], capture_output=True, check=True)
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    return None if made.returncode == 0 else "network namespaces are not allowed here"


class Link:
    """A network namespace, and the only link into it.

    Attributes:
        weather: the present condition of the link.
        host: the address in the namespace.
        prefix: the words that start a command within the namespace.
    """

    def __init__(self) -> None:
        self.weather = CLEAR
        number = os.getpid()
        self._name = f"ps{number}"
        # 198.18.0.0/15 is reserved for tests of networks (RFC 2544). Each process uses four of its addresses.
        network = f"198.{18 + (number >> 14 & 1)}.{number >> 6 & 255}."
        self.host = f"{network}{(number & 63) * 4 + 2}"
        self.prefix = ("ip", "netns", "exec", self._name)
        self._rng = random.Random(1)
        self._ends = _open_tun(f"{self._name}a"), _open_tun(f"{self._name}b")
        _ip("netns", "add", self._name)
        _ip("link", "set", f"{self._name}b", "netns", self._name)
        _ip("address", "add", f"{network}{(number & 63) * 4 + 1}/30", "dev", f"{self._name}a")
        _ip("link", "set", f"{self._name}a", "up")
        _ip("-n", self._name, "address", "add", f"{self.host}/30", "dev", f"{self._name}b")
        _ip("-n", self._name, "link", "set", f"{self._name}b", "up")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._forward)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        for end in self._ends:
            os.close(end)
        _ip("netns", "delete", self._name)

    def _forward(self) -> None:
        other = {self._ends[0]: self._ends[1], self._ends[1]: self._ends[0]}
        free_at = dict.fromkeys(self._ends, 0.0)
        under_way: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        while not self._stopped.is_set():
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.05
            for end in select.select(self._ends, [], [], min(wait, 0.05))[0]:
                packet, now, weather = os.read(end, _PIECE_BYTES), time.monotonic(), self.weather
                if weather.black_hole or self._rng.random() < weather.loss:
                    continue
                if weather.bytes_per_second is not None:
                    free_at[end] = max(now, free_at[end]) + len(packet) / weather.bytes_per_second
                    if free_at[end] > now + _BUFFER_SECONDS:
                        free_at[end] -= len(packet) / weather.bytes_per_second
                        continue
                due = max(now, free_at[end]) + weather.delay_seconds
                heapq.heappush(under_way, (due, next(numbers), other[end], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(under_way)
                # The other end may not be up yet, or may be down already.
                with suppress(OSError):
                    os.write(end, packet)


class Proxy:
    """A proxy on a loopback address before another port. `reset` breaks its connections with a TCP RST."""

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.2") -> None:
        self.weather = CLEAR
        self._target = target
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._reset_after: int | None = None
        self._stopped = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.resets = 0

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        # This wakes the thread in `accept`. Closing the socket would not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.reset()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def reset(self) -> None:
        """Break every connection at once."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            self._reset_after = None
        for pair in pairs:
            for end in pair:
                # With no time to linger, `close` sends RST and drops unsent bytes. A thread in `recv` would delay that,
                # so `shutdown` wakes the thread first.
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)
                end.close()
        self.resets += len(pairs)

    def reset_after(self, nbytes: int) -> None:
        """Break every connection after `nbytes` more bytes have passed, both directions counted together."""
        self._reset_after = nbytes

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._pairs.append((client, server))
                self._start(self._pump, (client, server), client, server)
                self._start(self._pump, (client, server), server, client)

    def _pump(self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                while self.weather.black_hole and not self._stopped.is_set():
                    time.sleep(0.01)
                time.sleep(self.weather.delay_seconds)
                if self.weather.bytes_per_second is not None:
                    time.sleep(len(piece) / self.weather.bytes_per_second)
                if self._is_due(len(piece)):
                    self.reset()
                    return
                sink.sendall(piece)
            # After a reset the pair is not in the list. Then the connection must not be closed in the normal way.
            with self._lock:
                if pair in self._pairs:
                    sink.shutdown(socket.SHUT_WR)

    def _is_due(self, nbytes: int) -> bool:
        with self._lock:
            if self._reset_after is None:
                return False
            self._reset_after -= nbytes
            return self._reset_after < 0


def _open_tun(name: str) -> int:
    end = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_WITHOUT_HEADER))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
