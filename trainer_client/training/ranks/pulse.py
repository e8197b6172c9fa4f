"""The pulse: each rank learns within seconds that another rank is silent or has given up, even if collectives hang.

gloo and NCCL mostly notice that a connection was closed, but not always. They do not notice the loss of a node or of a
link, nor a process that was stopped. So each rank has a UDP socket and a thread, and sends a datagram to a few other
ranks, its peers, in every beat. The datagram has a number of its own. It also has the newest number that has come from
the receiver, which confirms that number. A peer is silent if it has confirmed no newer number for RANK_SECONDS. Because
a confirmation needs both directions, both ends of a link notice at the same time that one direction is cut.

[Note: who watches whom] The ranks of a node watch the first rank of the node, and this rank watches them. The first
ranks of the nodes are a ring with chords: those of node n and of the nodes n + 1, n + 2, n + 4, ... watch each other,
modulo the number of nodes. A rank of 1 000 nodes sends some 40 datagrams in a second. These links connect all ranks. So
if some ranks are lost, at least one of the remaining ranks watches a lost rank, and notices the loss. This rank tells
its other peers, which tell their peers.

| what happens                                    | the peers on its links         | all other ranks               |
|-------------------------------------------------|--------------------------------|-------------------------------|
| a process, node or link is silent for < 20 s    | go on                          | go on                         |
| it is silent for >= 20 s                        | end their collectives          | hear of it, and end theirs    |
| a rank has given up, or the daemon has ended it | hear of it, and end theirs     | hear of it, and end theirs    |
| a rank closes                                   | watch it no longer             | go on                         |
| this machine is suspended with all ranks        | go on                          | go on                         |
| no answer ever came, as behind a firewall       | warn once, and do not watch it | go on                         |

Silence is counted in beats of this rank and not in time. So a rank that could not run for a while, as in a suspended
machine, does not take its peers for silent.

At the start, the ranks exchange their addresses and a secret through the process group. Each datagram has a keyed hash
over its receiver and its content. A datagram with a wrong hash, or whose number is not new, is ignored. This module
must never wait for another rank, except for some seconds at the start and one second at the end.
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
# The head of a datagram of the pulse: the rank of the receiver, the rank of the sender, the datagram's number, the
# newest number that has come to the sender from the receiver, and whether the sender closes. If the sender knows of a
# rank that is silent or has given up, a text about that rank follows.
_HEAD = struct.Struct("!IIQQ?")
_HASH_BYTES = 16
_MOST_BYTES = 1200
# A rank reads at most so many datagrams before it sends its own ones again, so that these are in time even if very many
# have come. A socket's queue has some hundreds of datagrams.
_MOST_AT_ONCE = 1000
# The most bytes of the text about a silent or failed rank in a datagram, so that the datagram fits into one packet.
_TEXT_BYTES = 800
# The longest wait at the start for the first answers of the peers; the longest wait at the end until the peers know
# that this rank closes; and the time between two datagrams during the wait at the end.
_START_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
_CLOSE_BEAT_SECONDS = 0.1
# A UDP socket connects to this port of another host, so that the kernel says which of this node's addresses reaches the
# host. Any port will do, because a connect over UDP sends nothing.
_DISCARD_PORT = 9

_Address = tuple[Any, ...]


@dataclass(slots=True)
class _Link:
    """What this rank knows of one peer, a rank with which it exchanges datagrams.

    Attributes:
        peer: the number of the peer.
        addresses: addresses at which the peer may be reached. Once a datagram has come from the peer, the only one is
            the address from which it came.
        sent: the number of the newest datagram to the peer.
        heard: the number of the newest datagram from the peer.
        confirmed: the newest number of this rank's datagrams that the peer has confirmed.
        missed: the beats since `confirmed` has grown.
        is_closed: whether the peer has said that it closes.
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
    """The addresses and the secret that a rank sends to all other ranks at the start, by a collective.

    Attributes:
        node: the name of the rank's network stack, which the ranks of a node share.
        address: the address of the rank's node on the way to the host of rank 0.
        master: the address at which the rank reaches the host of rank 0; "" if it knows no such address.
        port: the port of the rank's socket.
        secret: random hexadecimal digits. All ranks use the secret in rank 0's card as the key of the hashes.
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
    """Exchanges datagrams with some other ranks, and reports that a rank is silent or has given up.

    All ranks must call the constructor, because it exchanges their addresses.

    Args:
        rank: number of this rank.
        gather: a collective that returns the contents that all ranks have given it, in the order of the ranks.
        host: name or address of the host of rank 0; None if it is not known.
        on_news: called once, on any thread, with a text for an error that says which rank is silent or has given up.
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
        """Send `news`, which says that a rank has given up or gone, to all ranks. After earlier news do nothing.

        The call does not wait. Any thread may call this.
        """
        self._take(news)

    def close(self) -> None:
        """Tell the peers that this rank closes, so that they do not take it for silent; idempotent."""
        self._closing.set()
        # The pulse's thread may be waiting for datagrams. An empty datagram to its own socket ends that wait, so the
        # thread sees that it has to close.
        loopback = "::1" if self._socket.family == socket.AF_INET6 else "127.0.0.1"
        with suppress(OSError):
            self._socket.sendto(b"", (loopback, self._port))
        if self._thread is not threading.current_thread():
            self._thread.join(_START_SECONDS)

    def _addresses_of(self, peer: int, cards: Sequence[_Card]) -> Sequence[_Address]:
        # The host of rank 0 often has an address for itself, such as 127.0.1.1, at which other nodes cannot reach it.
        # So this rank also sends to the address at which it reaches the key-value store on that host.
        known = cards[self._rank].master if peer == 0 else ""
        return [(host, cards[peer].port) for host in dict.fromkeys((cards[peer].address, known)) if host]

    def _wait_for_answers(self) -> None:
        """Wait at the start for the first datagram of each peer, and log a warning about peers that do not answer."""
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
                    # This rank sends its next datagrams one interval from now. If it could not run for a while, it does
                    # not make up for the beats that it has missed, because it would count its peers as silent at once.
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
        """Add one to each peer's `missed` beats. If a peer is silent now, send that as news to the other peers.

        This rank's collectives get the news, too, by `on_news`.
        """
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
        """Keep `news`, the text about a lost rank, and send it to the peers, unless there is earlier news.

        Return whether there was no earlier news.
        """
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
            # sendto raises OSError if there is no route to the host or no room in a queue, or if this rank has closed
            # its socket. The error is ignored, because the next beat sends again.
            with suppress(OSError):
                self._socket.sendto(datagram, address)

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, key=self._key, digest_size=_HASH_BYTES).digest()

    def _receive(self, seconds: float) -> None:
        """Wait up to `seconds` for datagrams of peers, and note in the links what those that have come confirm."""
        self._poll.poll(max(0.0, seconds * 1000))
        for _ in range(_MOST_AT_ONCE):
            try:
                datagram, address = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # recvfrom raises an error on Linux if an earlier datagram of this socket could not be delivered. It
                # says nothing about received datagrams, so the loop reads on.
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
        # This rank answers a peer's first datagram at once, and one in which the peer says that it closes. If both
        # ranks close, this rank sends no answer, because the two would answer each other's answers without end.
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
    """Return the ranks that `rank` watches, which also watch `rank`; see [Note: who watches whom].

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
    """Return the route from this node to `host`: the address family, this node's address, and the address of `host`.

    If there is no route, the address of `host` is "", and this node's address is that of its own name.
    """
    for name in (host, socket.gethostname()):
        with suppress(OSError):
            found = socket.getaddrinfo(name, _DISCARD_PORT, type=socket.SOCK_DGRAM) if name else []
            # A host may have addresses of both families. IPv4 is tried before IPv6, so that all ranks use the same
            # family.
            for family, _, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)
                    return family, str(probe.getsockname()[0]), str(address[0]) if name == host else ""
    return socket.AF_INET, "127.0.0.1", ""


def host_of(store: Any) -> str | None:
    """Return the host of rank 0, from torch.distributed's key-value store or $MASTER_ADDR; None if in neither."""
    while (underlying := getattr(store, "underlying_store", None)) is not None:
        store = underlying
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
