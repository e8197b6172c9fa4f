"""The pulse: each rank learns within seconds that another one is silent or has given up, whatever else hangs.

gloo and NCCL see that a connection was closed, and not always that. They do not see the loss of a node or of a link,
nor a process that was stopped. So each rank has a UDP socket and a thread, and sends a datagram to a few other ranks in
every beat. The datagram has a number, and the newest number that has come from the other rank. A rank is silent if it
has confirmed no newer number for RANK_SECONDS. Because a confirmation needs both directions, both ends of a link
notice at the same time that one direction is cut.

[Note: who watches whom] The ranks of a node watch the first rank of the node, and it watches them. The first ranks of
the nodes are a ring with chords: node n and the nodes n + 1, n + 2, n + 4, ... watch each other, modulo the number of
nodes. A rank of 1 000 nodes sends some 40 datagrams in a second. These links connect all ranks, so each part of the
ranks that remains next to lost ones has a rank that notices the loss. It tells its other peers, and they tell theirs.

| what happens                                    | the peers on its links         | all other ranks               |
|-------------------------------------------------|--------------------------------|-------------------------------|
| a process, node or link is silent for < 20 s    | go on                          | go on                         |
| it is silent for >= 20 s                        | end their collectives          | hear of it, and end theirs    |
| a rank has given up, or the daemon has ended it | hear of it, and end theirs     | hear of it, and end theirs    |
| a rank closes                                   | watch it no longer             | go on                         |
| this machine is suspended with all ranks        | go on                          | go on                         |
| no answer ever came, as behind a firewall       | warn once, and do not watch it | go on                         |

Silence is counted in beats of this rank and not in time, so a rank that could not run itself accuses no other one.

The ranks exchange their addresses and a secret through the process group. Each datagram has a keyed hash over its
receiver and its content, and is ignored unless its number is new. This module must never wait for another rank, except
for some seconds at the start and one at the end.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paramserver.contract import silence

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
# The receiver, the sender, the number, the newest number that the sender has heard from the receiver, and whether the
# sender closes. A text about a rank that is silent or has given up follows, if there is one.
_HEAD = struct.Struct("!IIQQ?")
_HASH_BYTES = 16
_MOST_BYTES = 1200
# A rank sends a beat after so many datagrams, however many more have come. A socket's queue has some hundreds.
_MOST_AT_ONCE = 1000
# The longest text. With it, a datagram fits into one packet.
_TEXT_BYTES = 800
# The longest wait for the first answers, and for the ranks to know that this one closes.
_START_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_CLOSE_BEAT_SECONDS = 0.1
# Any port will do, because a UDP socket that connects sends nothing.
_DISCARD_PORT = 9

_Address = tuple[Any, ...]


@dataclass(slots=True)
class _Link:
    """What this rank knows of another one that it watches.

    Attributes:
        peer: the other rank.
        addresses: where it may be reached; only the address from which it has sent, once it has.
        sent: the number of the newest datagram to it.
        heard: the number of the newest datagram from it.
        confirmed: the newest number of this rank that it has heard.
        missed: the beats since `confirmed` has grown.
        is_closed: whether it has said that it closes.
    """

    peer: int
    addresses: Sequence[_Address]
    sent: int = 0
    heard: int = 0
    confirmed: int = 0
    missed: int = 0
    is_closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """What a rank tells the others at the start.

    Attributes:
        node: the name of its network stack, which the ranks of a node share.
        address: the address of the node on the way to the host of rank 0.
        master: the address at which this rank reaches the host of rank 0; "" if it knows none.
        port: the port of its socket.
        secret: the secret of the run in hexadecimal digits, of which that of rank 0 counts.
    """

    node: str
    address: str
    master: str
    port: int
    secret: str = field(repr=False)

    def to_bytes(self) -> bytes:
        return json.dumps([self.node, self.address, self.master, self.port, self.secret]).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> _Card:
        node, address, master, port, secret = json.loads(content)
        return cls(node=node, address=address, master=master, port=port, secret=secret)


class Pulse:
    """The pulse of this rank. The constructor is a collective of all ranks.

    Args:
        rank: number of this rank.
        gather: returns the contents that all ranks give it, in their order.
        host: name or address of the host of rank 0; None if it is not known.
        on_news: called once, on any thread, with a text for people: who is silent or has given up.
    """

    def __init__(
        self, rank: int, gather: Callable[[bytes], Sequence[bytes]], host: str | None, on_news: Callable[[str], None]
    ) -> None:
        self._rank = rank
        self._on_news = on_news
        self._news: str | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        family, own, master = _route_to(host)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self._port = self._socket.getsockname()[1]
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        card = _Card(
            node=f"{_BOOT_ID.read_text().strip()} {_NETWORK.readlink()}",
            address=own,
            master=master,
            port=self._port,
            secret=secrets.token_hex(),
        )
        cards = [_Card.from_bytes(content) for content in gather(card.to_bytes())]
        self._key = bytes.fromhex(cards[0].secret)
        peers = watched_by(rank, [one.node for one in cards])
        self._links = {peer: _Link(peer, self._addresses_of(peer, cards)) for peer in peers}
        self._thread = threading.Thread(target=self._run, name="paramserver-pulse", daemon=True)
        self._thread.start()
        self._wait_for_answers()

    def tell(self, news: str) -> None:
        """Tell all ranks that a rank has given up or gone, unless there was other news before. It does not wait.

        Any thread may call this.
        """
        self._take(news)

    def close(self) -> None:
        """Tell the peers that this rank closes, so that they do not take it for silent; idempotent."""
        self._closing.set()
        # The thread may wait for datagrams, and any datagram ends that.
        loopback = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
        with suppress(OSError):
            self._socket.sendto(b"", (loopback, self._port))
        if self._thread is not threading.current_thread():
            self._thread.join(_START_SECONDS)

    def _addresses_of(self, peer: int, cards: Sequence[_Card]) -> Sequence[_Address]:
        # A host often knows itself by another address than others do, such as 127.0.1.1.
        known = cards[self._rank].master if peer == 0 else ""
        return [(host, cards[peer].port) for host in dict.fromkeys((cards[peer].address, known)) if host]

    def _wait_for_answers(self) -> None:
        """Wait for the first answer of each peer, and warn of those that do not answer."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._deaf), _START_SECONDS)
        if deaf := list(self._deaf):
            log.warning(
                "no answer over UDP came from %s: if one of them falls silent, this rank notices it only after "
                "paramserver.collective_timeout_seconds; let UDP pass between the nodes",
                ", ".join(f"rank {link.peer} ({link.addresses[0][0]}:{link.addresses[0][1]})" for link in deaf),
            )

    @property
    def _open(self) -> Iterator[_Link]:
        return (link for link in self._links.values() if not link.is_closed)

    @property
    def _deaf(self) -> Iterator[_Link]:
        return (link for link in self._open if not link.confirmed)

    def _run(self) -> None:
        due = time.monotonic()
        with self._socket:
            while not self._closing.is_set():
                self._receive(due - time.monotonic())
                if time.monotonic() >= due:
                    self._count()
                    self._send_all()
                    # A rank that could not run makes up for no beat that it has left out.
                    due = time.monotonic() + silence.BEAT_SECONDS
            self._say_bye()

    def _say_bye(self) -> None:
        byes = {link.peer: link.sent + 1 for link in self._open if link.confirmed}
        due, until = time.monotonic(), time.monotonic() + _CLOSE_SECONDS
        while any(link.confirmed < byes.get(link.peer, 0) for link in self._open) and time.monotonic() < until:
            self._receive(due - time.monotonic())
            if time.monotonic() >= due:
                self._send_all()
                due = time.monotonic() + _CLOSE_BEAT_SECONDS

    def _count(self) -> None:
        """Count a beat, and take note of a peer that is silent."""
        for link in self._open:
            link.missed += 1
            if link.confirmed and link.missed * silence.BEAT_SECONDS >= silence.RANK_SECONDS:
                news = (
                    f"rank {link.peer} is silent: it has not answered rank {self._rank} for "
                    f"{silence.RANK_SECONDS:g} s, as after a loss of its node, of the link between the two, or of its "
                    "process"
                )
                if self._take(news):
                    self._on_news(news)

    def _take(self, news: str) -> bool:
        """Keep the first news, and pass it on. Return whether this is the first."""
        with self._lock:
            if self._news is not None:
                return False
            self._news = news
        self._send_all()
        return True

    def _send_all(self) -> None:
        for link in list(self._open):
            self._send(link)

    def _send(self, link: _Link) -> None:
        with self._lock:
            link.sent += 1
            content = _HEAD.pack(link.peer, self._rank, link.sent, link.heard, self._closing.is_set())
            content += (self._news or "").encode()[:_TEXT_BYTES]
            addresses = link.addresses
        datagram = self._hash(content) + content
        for address in addresses:
            # There is no way to the host, or no room in a queue, or this rank has closed. The next beat tries again.
            with suppress(OSError):
                self._socket.sendto(datagram, address)

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=_HASH_BYTES).digest()

    def _receive(self, seconds: float) -> None:
        """Wait for datagrams for up to `seconds`, and read those that have come."""
        self._poll.poll(max(0.0, seconds * 1000))
        for _ in range(_MOST_AT_ONCE):
            try:
                datagram, address = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # Linux reports errors of earlier datagrams here.
                continue
            self._on_datagram(datagram, address)

    def _on_datagram(self, datagram: bytes, address: _Address) -> None:
        content = datagram[_HASH_BYTES:]
        if len(content) < _HEAD.size or not hmac.compare_digest(datagram[:_HASH_BYTES], self._hash(content)):
            return
        receiver, sender, number, confirmed, is_closing = _HEAD.unpack_from(content)
        link = self._links.get(sender)
        if receiver != self._rank or link is None or number <= link.heard:
            return
        # Two ranks that close would answer each other's answers.
        is_answered = (not link.heard or is_closing) and not (link.is_closed and self._closing.is_set())
        with self._changed:
            link.heard, link.addresses = number, [address]
            if confirmed > link.confirmed:
                link.confirmed, link.missed = confirmed, 0
            link.is_closed |= is_closing
            self._changed.notify_all()
        if is_answered:
            self._send(link)
        news = content[_HEAD.size :].decode(errors="replace")
        if news and self._take(news):
            self._on_news(news)


def watched_by(rank: int, nodes: Sequence[str]) -> Sequence[int]:
    """Return the ranks that a rank watches, each of which watches it; see [Note: who watches whom].

    Args:
        rank: the rank.
        nodes: the name of each rank's node.
    """
    first: dict[str, int] = {}
    for other, node in enumerate(nodes):
        first.setdefault(node, other)
    own = nodes[rank]
    if first[own] != rank:
        return [first[own]]
    heads = list(first.values())
    place, count = heads.index(rank), len(heads)
    distances = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    ring = {heads[(place + way * distance) % count] for distance in distances for way in (1, -1)}
    local = {other for other, node in enumerate(nodes) if node == own}
    return sorted((ring | local) - {rank})


def _route_to(host: str | None) -> tuple[socket.AddressFamily, str, str]:
    """Return the family, this node's address, and that of `host`, of a way from this node to `host`.

    Without a way, the last one is "", and the address is that of this node's name.
    """
    for name in (host, socket.gethostname()):
        with suppress(OSError):
            found = socket.getaddrinfo(name, _DISCARD_PORT, type=socket.SOCK_DGRAM) if name else []
            # IPv4 comes first, so that all ranks take the same one of the two.
            for family, _, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    return family, str(probe.getsockname()[0]), str(address[0]) if name == host else ""
    return socket.AF_INET, "127.0.0.1", ""


def host_of(store: Any) -> str | None:
    """Return the host of rank 0, as a key-value store of torch.distributed knows it; None if it knows none."""
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
