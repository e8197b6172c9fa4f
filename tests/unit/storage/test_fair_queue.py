"""The fair queue serves flows by weight at each level, and items of a flow by order and arrival; no flow starves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

import pytest

from storage.base.fair_queue import FairQueue, Share

ItemT = TypeVar("ItemT", bound=Hashable)


def pop(queue: FairQueue[ItemT], cost: float = 1.0) -> ItemT:
    item = queue.peek()
    assert item is not None
    queue.take(item, cost)
    return item


def drain(queue: FairQueue[str], cost: float = 1.0) -> list[str]:
    return [pop(queue, cost) for _ in range(len(queue))]


def test_equal_flows_take_turns_and_each_is_first_in_first_out() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        for flow in "ab":
            queue.push(f"{flow}{number}", (Share(flow),))
    assert queue.peek() == "a0" and len(queue) == 6
    assert drain(queue) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert queue.peek() is None


def test_order_comes_before_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for order, item in [(9.0, "last"), (1.0, "first"), (5.0, "middle"), (5.0, "middle too")]:
        queue.push(item, (Share("job"),), order)
    assert drain(queue) == ["first", "middle", "middle too", "last"]


def test_weights_are_honoured_and_the_sessions_of_a_job_are_equal() -> None:
    """Job a has twice the weight of job b, and three sessions. Shares count the items' costs, not their number."""
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    cost = {"a": 1.0, "b": 4.0}
    for job, weight, sessions in [("a", 2.0, 3), ("b", 1.0, 1)]:
        for session in range(sessions):
            for number in range(1000):
                queue.push((job, session, number), (Share(job, weight), Share(session)))
    served: Counter[str] = Counter()
    sessions_of_a: Counter[int] = Counter()
    while sum(served.values()) < 900:
        item = queue.peek()
        assert item is not None
        pop(queue, cost[item[0]])
        served[item[0]] += int(cost[item[0]])
        if item[0] == "a":
            sessions_of_a[item[1]] += 1
    assert abs(served["a"] - 2 * served["b"]) <= 8
    assert max(sessions_of_a.values()) - min(sessions_of_a.values()) <= 1


def test_a_flow_that_was_idle_neither_catches_up_nor_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        queue.push(f"old{number}", (Share("old"),))
    for _ in range(100):
        pop(queue, 1)
    for number in range(100):
        queue.push(f"new{number}", (Share("new"),))
    first = [item[:3] for item in drain(queue)[:100]]
    assert abs(first.count("new") - 50) <= 1
    # One of the first two items is of the new flow.
    assert "new" in first[:2]


def test_flows_that_cannot_go_on_are_passed_over_and_keep_their_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        for flow in "abc":
            queue.push(f"{flow}{number}", (Share(flow),))
    for expected in ("b0", "b1"):
        assert queue.peek(excluding=("a", "c")) == expected
        queue.take(expected, 1.0)
    assert queue.peek(excluding=("a", "b", "c")) is None
    assert drain(queue) == ["a0", "c0", "a1", "c1", "b2", "a2", "c2"]


def test_what_is_removed_costs_nothing_and_may_come_back() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a0", "a1", "b0", "b1", "c0"):
        queue.push(item, (Share(item[0]), Share("session")), float(item[1]))
    queue.remove("a0")
    queue.remove("c0")
    queue.remove("b0")
    queue.push("b0", (Share("b"), Share("session")), 7.0)
    assert "a0" not in queue and "b0" in queue
    assert drain(queue) == ["a1", "b1", "b0"]


@pytest.mark.parametrize("others", [0, 1])
def test_flows_that_are_gone_are_forgotten(others: int) -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(10_000):
        for _ in range(others):
            queue.push(-number - 1, (Share("always there"),))
        queue.push(number, (Share(number),))
        for _ in range(1 + others if number else 1):
            pop(queue, 1.0)
    assert len(queue) == others
    assert len(queue._root.flows) < 100
    assert len(queue._root.heap) <= 1


def test_it_serves_what_a_plain_search_would() -> None:
    """The reference is the definition: the next flow is the waiting one with the least virtual start."""
    rng = random.Random(7)
    queue: FairQueue[int] = FairQueue()
    waiting: dict[str, list[int]] = {}
    start: dict[str, float] = {}
    finish: dict[str, float] = {}
    weight = {"a": 1.0, "b": 2.0, "c": 0.5}
    now = 0.0
    for number in range(3000):
        flow = rng.choice("abc")
        if rng.random() < 0.55:
            queue.push(number, (Share(flow, weight[flow]),))
            if not waiting.get(flow):
                start[flow] = max(now, finish.get(flow, 0.0))
            waiting.setdefault(flow, []).append(number)
        elif any(waiting.values()):
            cost = float(rng.randint(1, 5))
            served = pop(queue, cost)
            least = min(start[name] for name, items in waiting.items() if items)
            (of,) = (name for name, items in waiting.items() if served in items)
            assert start[of] == least and waiting[of][0] == served
            waiting[of].pop(0)
            now = start[of]
            finish[of] = start[of] + cost / weight[of]
            start[of] = finish[of]
            if not any(waiting.values()):
                now, start, finish = 0.0, {}, {}
