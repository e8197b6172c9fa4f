"""The pulse of a rank finds silent peers in both directions of a link, passes news on, and accuses no closed rank.

The ranks are objects of this process with sockets of their own on loopback. Relays between them can drop datagrams.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from paramserver.contract import silence
from tests.integration.support.waiting import wait_until
from trainer_client.training.ranks import pulse as module
from trainer_client.training.ranks.pulse import Pulse, _Card, watched_by

BEAT_SECONDS = 0.05
# The pulses of this test share one process, so one of them may not run for long.
RANK_SECONDS = 2.0


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "BEAT_SECONDS", BEAT_SECONDS)
    monkeypatch.setattr(silence, "RANK_SECONDS", RANK_SECONDS)


class Relay:
    """A relay between two UDP sockets, which one of them knows only by this relay.

    Attributes:
        address: its address, from which the second socket hears the first one.
        drops: the directions that are cut: "there" is to the target, "back" is from it.
        seen: the datagrams to the target.
    """

    def __init__(self, target: int) -> None:
        self.drops: set[str] = set()
        self.seen: list[bytes] = []
        self._target = ("127.0.0.1", target)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._forward)
        self._thread.start()

    def send(self, datagram: bytes) -> None:
        """Send a datagram to the target, as from the relay's own address."""
        self._socket.sendto(datagram, self._target)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _forward(self) -> None:
        source = None
        while not self._ended.is_set():
            if not select.select([self._socket], [], [], 0.05)[0]:
                continue
            datagram, address = self._socket.recvfrom(2048)
            if address != self._target:
                source = address
                self.seen.append(datagram)
                if "there" not in self.drops:
                    self._socket.sendto(datagram, self._target)
            elif source is not None and "back" not in self.drops:
                self._socket.sendto(datagram, source)


@dataclass(slots=True)
class Ranks:
    """The pulses of all ranks.

    Attributes:
        news: what each rank has heard or found.
        relays: by (higher rank, lower rank), the relay by which the first one reaches the second one.
    """

    nodes: Sequence[str]
    pulses: list[Pulse] = field(default_factory=list)
    news: list[list[str]] = field(default_factory=list)
    relays: dict[tuple[int, int], Relay] = field(default_factory=dict)

    def told(self) -> list[int]:
        return [rank for rank, news in enumerate(self.news) if news]


@contextmanager
def started(*nodes: str, relayed: bool = False) -> Iterator[Ranks]:
    """Yield pulses of ranks on these nodes; with `relayed`, each link has a relay."""
    ranks = Ranks(nodes, news=[[] for _ in nodes])
    cards: list[bytes] = [b""] * len(nodes)
    met = threading.Barrier(len(nodes))
    guard = threading.Lock()

    def gather(rank: int, content: bytes) -> list[bytes]:
        cards[rank] = replace(_Card.from_bytes(content), node=nodes[rank]).to_bytes()
        met.wait()
        if not relayed:
            return list(cards)
        # The lower rank learns the address of the higher one from its datagrams, which come from the relay.
        shown = []
        for other, one in enumerate(map(_Card.from_bytes, cards)):
            port = one.port if other == rank else 9
            if other < rank and other in watched_by(rank, nodes):
                with guard:
                    ranks.relays[rank, other] = Relay(one.port)
                port = ranks.relays[rank, other].port
            shown.append(replace(one, port=port).to_bytes())
        return shown

    def start(rank: int) -> Pulse:
        return Pulse(rank, partial(gather, rank), "127.0.0.1", ranks.news[rank].append)

    with ThreadPoolExecutor(len(nodes)) as pool, ExitStack() as made:
        ranks.pulses += pool.map(start, range(len(nodes)))
        for relay in ranks.relays.values():
            made.callback(relay.close)
        # Ranks that close at the same time do not wait for each other.
        made.callback(lambda: list(pool.map(Pulse.close, ranks.pulses)))
        yield ranks


def kill(pulse: Pulse) -> None:
    """Have a pulse send and read nothing any more, as if its process were killed."""
    pulse._links.clear()
    pulse.close()


@pytest.mark.parametrize("cut", [{"there"}, {"back"}, {"there", "back"}])
def test_both_ends_of_a_link_notice_that_a_direction_of_it_is_cut(cut: set[str]) -> None:
    with started("a", "b", relayed=True) as ranks:
        assert ranks.told() == []
        ranks.relays[1, 0].drops |= cut
        wait_until(lambda: ranks.told() == [0, 1], seconds=30)

    # The end that notices it first tells the other one, if it can.
    said = {text for news in ranks.news for text in news}
    found = {f"rank {1 - rank} is silent: it has not answered rank {rank} for 2 s" for rank in range(2)}
    assert said and all(any(text.startswith(one) for one in found) for text in said), said


def test_a_link_that_comes_back_in_time_is_no_silence() -> None:
    with started("a", "b", relayed=True) as ranks:
        ranks.relays[1, 0].drops |= {"there", "back"}
        wait_until(lambda: max(link.missed for link in ranks.pulses[0]._links.values()) > 5, seconds=30)
        ranks.relays[1, 0].drops.clear()
        # A beat counts as missed until its answer comes, and the two ends need not beat at the same time.
        links = [link for pulse in ranks.pulses for link in pulse._links.values()]
        wait_until(lambda: all(link.missed <= 1 for link in links), seconds=30)
        assert ranks.told() == []


def test_a_lost_node_is_told_to_all_ranks_of_all_others() -> None:
    nodes = [f"node {number}" for number in range(9) for _ in range(2)]
    with started(*nodes) as ranks:
        for lost in (4, 5):
            kill(ranks.pulses[lost])
        remain = [rank for rank in range(len(nodes)) if rank not in (4, 5)]
        wait_until(lambda: ranks.told() == remain, seconds=60)
    assert all("rank 4 is silent" in news[0] for rank, news in enumerate(ranks.news) if rank in remain)


def test_what_a_rank_tells_is_known_to_all_others_once() -> None:
    with started("a", "a", "b", "c", "c") as ranks:
        ranks.pulses[1].tell("rank 1 is in a step, which it gave up")
        ranks.pulses[4].tell("a later one")
        wait_until(lambda: ranks.told() == [0, 2, 3], seconds=30)
    assert {text for news in ranks.news for text in news} <= {"rank 1 is in a step, which it gave up", "a later one"}
    assert all(len(news) <= 1 for news in ranks.news)


def test_a_rank_that_closes_is_not_taken_for_silent() -> None:
    with started("a", "b", "c") as ranks:
        ranks.pulses[1].close()
        assert [link.is_closed for link in ranks.pulses[0]._links.values()] == [True, False]
        count = [link.sent for link in ranks.pulses[2]._links.values()]
        beats = RANK_SECONDS / BEAT_SECONDS
        wait_until(lambda: ranks.pulses[2]._links[0].sent > max(count) + 2 * beats, seconds=60)
        assert ranks.told() == []


def test_forged_and_repeated_datagrams_are_ignored() -> None:
    with started("a", "b", relayed=True) as ranks:
        relay, link = ranks.relays[1, 0], ranks.pulses[0]._links[1]
        wait_until(lambda: len(relay.seen) > 3, seconds=30)
        relay.drops |= {"there"}
        *_, former, last = relay.seen
        for forged in (former, last[:20], b"", bytes(64), last[:-1] + b"\x01", last + b"news", last):
            relay.send(forged)
        wait_until(lambda: ranks.told() == [0, 1], seconds=30)
        assert "news" not in str(ranks.news)
        assert link.heard <= len(relay.seen)


def test_a_peer_that_never_answers_is_named_and_not_accused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_START_SECONDS", 0.5)
    monkeypatch.setattr(Pulse, "_addresses_of", lambda *_: [("127.0.0.1", 9)])
    with started("a", "b") as ranks:
        assert "no answer over UDP came from rank 1 (127.0.0.1:9)" in caplog.text
        beats = RANK_SECONDS / BEAT_SECONDS
        wait_until(lambda: ranks.pulses[0]._links[1].sent > 2 * beats, seconds=60)
        assert ranks.told() == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64, 1000])
def test_the_links_are_mutual_few_and_join_all_ranks(count: int) -> None:
    nodes = [f"node {number}" for number in range(count) for _ in range(3)]
    watched = [set(watched_by(rank, nodes)) for rank in range(len(nodes))]
    assert all(rank in watched[other] and other != rank for rank, peers in enumerate(watched) for other in peers)
    assert max(map(len, watched)) <= 2 + 2 * max(1, count.bit_length())
    seen, waiting = {0}, [0]
    while waiting:
        new = watched[waiting.pop()] - seen
        seen |= new
        waiting += new
    assert len(seen) == len(nodes)
