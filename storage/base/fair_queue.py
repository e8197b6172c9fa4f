"""A weighted fair queue: it decides which of several waiting items is served next.

Items belong to flows, and flows to outer flows. For example, chunks belong to a session and the session to its job.
The next flow is the waiting one that has been served the least for its weight (start-time fair queueing by virtual
time: Goyal, Vin and Cheng, SIGCOMM 1996). A flow that was idle starts level with the others, so it cannot save up
service. Items of one innermost flow are served by their order and then by their arrival.

This module does not know what the items are, and must never start an item or wait for one.
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
    """One flow on the path to an item, and the weight (> 0) by which the flow shares its outer flow's service."""

    flow: Hashable
    weight: float = 1.0


@dataclass(slots=True, eq=False)
class _Flow(Generic[ItemT]):
    key: Hashable = None
    weight: float = 1.0
    # The start of this flow's next item and the end of its last item, in the virtual time of the outer flow. The next
    # item must not start before that end.
    start: float = 0.0
    finish: float = 0.0
    # The number of waiting items in this flow and its inner flows. If it is 0, the flow may still be in its outer
    # flow's heap, until `_next` removes it.
    waiting: int = 0
    # True while the flow is in its outer flow's heap.
    in_heap: bool = False
    # The inner flows of this flow: their virtual time, all known inner flows by key, and the inner flows with waiting
    # items, as a heap of (start, arrival, flow).
    now: float = 0.0
    flows: dict[Hashable, _Flow[ItemT]] = field(default_factory=dict)
    heap: list[tuple[float, int, _Flow[ItemT]]] = field(default_factory=list)
    # The waiting items, as a heap of (order, arrival, item). Only innermost flows have items of their own.
    items: list[tuple[float, int, ItemT]] = field(default_factory=list)


class FairQueue(Generic[ItemT]):
    """A queue that serves its waiting items fairly by the flows that they belong to, as this module describes.

    The items are distinct: an item must not be pushed again while it is in the queue.
    """

    def __init__(self) -> None:
        self._root: _Flow[ItemT] = _Flow()
        # The flows of each waiting item, outermost first, and the item's arrival number. An entry of `_Flow.items` with
        # another arrival number is stale, because its item was removed.
        self._entries: dict[ItemT, tuple[tuple[_Flow[ItemT], ...], int]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._entries

    def push(self, item: ItemT, path: Sequence[Share], order: float = 0.0) -> None:
        """Add an item to the last flow of `path`. The flows before it are its outer flows, outermost first.

        Within its flow, an item with a lower `order` is served first.
        """
        parent, flows = self._root, []
        self._root.waiting += 1
        for share in path:
            flow = parent.flows.get(share.flow)
            if flow is None:
                self._remove_idle(parent)
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
        """Remove an item without serving it, at no cost to its flows."""
        path = self._leave(item)
        self._reset_idle(path)

    def peek(self, excluding: Collection[Hashable] = ()) -> ItemT | None:
        """Return the next item without removing it; None if all items are in the excluded outermost flows."""
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
        self._pop_removed(flow)
        return flow.items[0][2]

    def take(self, item: ItemT, cost: float) -> None:
        """Remove the item that `peek` returned, and charge `cost` to its flows, which lets others go first."""
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
        """Reset the virtual time of each flow in which no item waits, so that its inner flows are equal again."""
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

    def _pop_removed(self, flow: _Flow[ItemT]) -> None:
        while flow.items and not self._is_live(flow.items[0]):
            heapq.heappop(flow.items)

    def _is_live(self, queued: tuple[float, int, ItemT]) -> bool:
        _, arrival, item = queued
        return item in self._entries and self._entries[item][1] == arrival

    def _remove_idle(self, parent: _Flow[ItemT]) -> None:
        """Remove idle flows whose `finish` has passed. A new flow of the same key would be served in the same way.

        The scan runs only when idle flows outnumber waiting ones, so it costs little on average.
        """
        if len(parent.flows) > 2 * len(parent.heap) + 16:
            parent.flows = {key: f for key, f in parent.flows.items() if f.in_heap or f.finish > parent.now}
