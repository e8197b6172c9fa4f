"""The daemon keeps its last events, a bounded number of each kind, in the order in which they happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from paramserver import events
from paramserver.events import EventKind, EventLog


def texts(log: EventLog, limit: int = 10_000, *, after: int = 0, kinds: Sequence[EventKind] = ()) -> list[str]:
    return [event.text for event in log.recent(limit, after=after, kinds=kinds)]


def test_the_newest_events_come_oldest_first_with_their_time_and_a_growing_number() -> None:
    log, began = EventLog(), time.time()
    assert log.recent(5) == [] and log.newest_number == 0
    log.add(EventKind.JOB, "a", "one")
    log.add(EventKind.SESSION, "client", "two")
    log.add(EventKind.JOB, "a", "three")
    assert texts(log) == ["one", "two", "three"]
    assert texts(log, 2) == ["two", "three"] and texts(log, 0) == []
    assert texts(log, after=1) == ["two", "three"] and texts(log, after=3) == []
    assert texts(log, kinds=[EventKind.JOB]) == ["one", "three"]
    first, second, third = log.recent(3)
    assert (first.number, second.number, third.number) == (1, 2, 3) and log.newest_number == 3
    assert began <= first.time <= second.time <= third.time <= time.time()
    assert (second.kind, second.subject) == ("session", "client")


def test_many_events_of_one_kind_push_out_no_event_of_another() -> None:
    log = EventLog()
    log.add(EventKind.DAMAGE, "nvme", "a block")
    for step in range(3 * events.KEPT_OF_A_KIND):
        log.add(EventKind.COMMIT, "job", f"step {step}")
    kept = log.recent(10_000)
    assert len(kept) == events.KEPT_OF_A_KIND + 1
    assert (kept[0].text, kept[1].text) == ("a block", f"step {2 * events.KEPT_OF_A_KIND}")


def test_a_text_is_cut_and_an_event_that_is_to_be_there_once_is_not_repeated() -> None:
    log = EventLog()
    for _ in range(3):
        log.add(EventKind.DAMAGE, "nvme", "x" * 5000, once=True)
    log.add(EventKind.DAMAGE, "nvme", "another block", once=True)
    assert texts(log) == ["x" * events.MAX_TEXT_BYTES + "...", "another block"]
    log.add(EventKind.ADMIN, "DeleteJob", "\N{GRINNING FACE}" * 5000)
    (longest,) = texts(log, kinds=[EventKind.ADMIN])
    assert longest == "\N{GRINNING FACE}" * (events.MAX_TEXT_BYTES // 4) + "..."
    log.add(EventKind.SESSION, "client", "\udcff is not in UTF-8")
    assert texts(log, 1) == ["\\udcff is not in UTF-8"]


async def test_a_follower_sees_each_event_once() -> None:
    log = EventLog()
    seen: list[str] = []

    async def follow() -> None:
        number = 0
        while len(seen) < 3:
            await log.wait_after(number)
            for event in log.recent(10, after=number):
                seen.append(event.text)
                number = event.number

    following = asyncio.ensure_future(follow())
    for text in ("one", "two", "three"):
        log.add(EventKind.TIER, "nvme", text)
        await asyncio.sleep(0)
    await asyncio.wait_for(following, 5)
    assert seen == ["one", "two", "three"]
