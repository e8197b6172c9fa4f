"""Who is next, where several share something that is short: weighted fair queueing by virtual time.

Items belong to flows, and flows to flows: a session's chunks to the session, the session to its job. Of the flows that
want something, the one is next that has had the least for its weight (start-time fair queueing: Goyal, Vin and Cheng,
SIGCOMM 1996); a flow that was idle begins where the others are, and cannot save up. Inside the innermost flow, order
and then arrival decide. Knows nothing of what the items are, and must never start or wait for one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Share:
    """A flow among those of its parent, and its weight (> 0) there."""

    flow: Hashable
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _Flow(Generic[ItemT]):
    key: Hashable = None
    weight: float = 1.0
    # In the parent's virtual time: where its next item begins, and where it may begin again after a pause.
    start: float = 0.0
    finish: float = 0.0
    # Items in it and in the flows inside it. Flows that wait in a heap without any are skipped, and leave it then.
    waiting: int = 0
    in_heap: bool = False
    # Of the flows inside it: their virtual time, all that have had something, and those that wait.
    now: float = 0.0
    flows: dict[Hashable, _Flow[ItemT]] = field(default_factory=dict)
    heap: list[tuple[float, int, _Flow[ItemT]]] = field(default_factory=list)
    # Of the innermost: order, arrival.
    items: list[tuple[float, int, ItemT]] = field(default_factory=list)


class FairQueue(Generic[ItemT]):
    """Each item is in it once."""

    def __init__(self) -> None:
        self._root: _Flow[ItemT] = _Flow()
        # The flows of an item, outermost first, and its arrival: what `items` has of another arrival was removed.
        self._entries: dict[ItemT, tuple[tuple[_Flow[ItemT], ...], int]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._entries

    def push(self, item: ItemT, path: Sequence[Share], order: float = 0.0) -> None:
        """Queues an item at the end of a path of flows, outermost first."""
        parent, flows = self._root, []
        self._root.waiting += 1
        for share in path:
            flow = parent.flows.get(share.flow)
            if flow is None:
                self._forget_idle(parent)
                flow = parent.flows[share.flow] = _Flow(share.flow)
            flow.weight = share.weight
            flow.waiting += 1
            if not flow.in_heap:
                self._wait(parent, flow, max(parent.now, flow.finish))
            flows.append(flow)
            parent = flow
        arrival = next(self._arrivals)
        heapq.heappush(parent.items, (order, arrival, item))
        self._entries[item] = ((self._root, *flows), arrival)

    def remove(self, item: ItemT) -> None:
        """Takes an item out that is not wanted any more; it costs its flows nothing."""
        path = self._leave(item)
        self._reset_idle(path)

    def peek(self, excluding: Collection[Hashable] = ()) -> ItemT | None:
        """The next item, which stays; None if there is none but in the outermost flows that are excluded."""
        if not self._root.waiting:
            return None
        flow = self._root
        if excluding:
            waiting = ((start, arrival, f) for start, arrival, f in self._root.heap if f.waiting)
            allowed = [entry for entry in waiting if entry[2].key not in excluding]
            if not allowed:
                return None
            flow = min(allowed)[2]
        while flow.flows:
            flow = self._next(flow)
        self._drop_removed(flow)
        return flow.items[0][2]

    def take(self, item: ItemT, cost: float) -> None:
        """Takes out an item that `peek` gave; it costs its flows that much."""
        path = self._leave(item)
        heapq.heappop(path[-1].items)
        for parent, flow in itertools.pairwise(path):
            if parent.heap[0][2] is flow:
                heapq.heappop(parent.heap)
            else:
                parent.heap = [entry for entry in parent.heap if entry[2] is not flow]
                heapq.heapify(parent.heap)
            flow.in_heap = False
            parent.now = max(parent.now, flow.start)
            flow.finish = flow.start + cost / flow.weight
            if flow.waiting:
                self._wait(parent, flow, flow.finish)
        self._reset_idle(path)

    def _leave(self, item: ItemT) -> tuple[_Flow[ItemT], ...]:
        path, _ = self._entries.pop(item)
        for flow in path:
            flow.waiting -= 1
        return path

    def _reset_idle(self, path: tuple[_Flow[ItemT], ...]) -> None:
        """Where nobody waits any more, all are equal again."""
        for flow in path:
            if not flow.waiting:
                flow.now = 0.0
                flow.flows.clear()
                flow.heap.clear()
                flow.items.clear()

    def _wait(self, parent: _Flow[ItemT], flow: _Flow[ItemT], start: float) -> None:
        flow.start, flow.in_heap = start, True
        heapq.heappush(parent.heap, (start, next(self._arrivals), flow))

    def _next(self, parent: _Flow[ItemT]) -> _Flow[ItemT]:
        while not (flow := parent.heap[0][2]).waiting:
            heapq.heappop(parent.heap)
            flow.in_heap = False
            flow.items.clear()
        return flow

    def _drop_removed(self, flow: _Flow[ItemT]) -> None:
        while flow.items and not self._is_live(flow.items[0]):
            heapq.heappop(flow.items)

    def _is_live(self, queued: tuple[float, int, ItemT]) -> bool:
        _, arrival, item = queued
        return item in self._entries and self._entries[item][1] == arrival

    def _forget_idle(self, parent: _Flow[ItemT]) -> None:
        """Drops flows that wait for nothing and have no more behind them than a new one; costs little on average."""
        if len(parent.flows) > 2 * len(parent.heap) + 16:
            parent.flows = {key: f for key, f in parent.flows.items() if f.in_heap or f.finish > parent.now}
