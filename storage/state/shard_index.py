"""The index of a job's shards: which group holds an element of a tensor, and the names of the tensors in order.

A look-up is a bisection, and the last page of a listing takes no longer than the first. This module owns no shards: the
groups own them. Shards are removed only when a registration fails, because a new layout of a job is a job of its own.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from storage.base.shard import Shard
from storage.base.slices import in_slices
from storage.state.slab import Group

# The names of tensors are kept in sorted runs of at most this many, and a listing merges the runs. One sort of all
# names would block the event loop for 0.3 s if the job has 200,000 of them.
_RUN_NAMES = 8192


class Placed(NamedTuple):
    """A result of a look-up in the index: a shard, and the group that has it."""

    shard: Shard
    group: Group


class ShardIndex:
    """Finds the shard that holds an element of a tensor, and lists tensor names, for one layout of a job."""

    def __init__(self) -> None:
        # The shards of each tensor, by its name, ascending by offset.
        self._placed: dict[str, list[Placed]] = {}
        # Only for tensors whose shards overlap: `_furthest[fqn][i]` is the index of the shard with the highest end
        # among shards 0 to i.
        self._furthest: dict[str, list[int]] = {}
        # The names of all tensors, in sorted runs of at most _RUN_NAMES.
        self._runs: list[list[str]] = []

    def __len__(self) -> int:
        """Return the number of tensors that have shards in this index."""
        return len(self._placed)

    def of(self, fqn: str) -> Sequence[Placed]:
        """Return the shards of a tensor ascending by offset; empty if this store has no element of it."""
        return self._placed.get(fqn, ())

    def locate(self, fqn: str, offset: int) -> Placed | None:
        """Return the shard that holds element `offset` of a tensor; None if this store does not have that element."""
        placed = self._placed.get(fqn, ())
        i = bisect_right(placed, offset, key=_offset) - 1
        if i < 0:
            return None
        if offset < _end(placed[i]):
            return placed[i]
        furthest = self._furthest.get(fqn)
        if furthest is not None and offset < _end(placed[furthest[i]]):
            return placed[furthest[i]]
        return None

    def names_from(self, first: str, prefix: str = "") -> Iterator[str]:
        """Return the names of tensors that begin with `prefix` and are not below `first`, in ascending order."""
        first = max(first, prefix)
        runs = (islice(run, bisect_left(run, first), None) for run in self._runs)
        return takewhile(lambda fqn: fqn.startswith(prefix), heapq.merge(*runs))

    async def add(self, groups: Iterable[Group]) -> None:
        """Add the shards of some groups, and let the event loop run in between. Calls for one job must not overlap."""
        async for _ in in_slices(self._adding(groups)):
            pass

    def add_at_once(self, groups: Iterable[Group]) -> None:
        """Add the shards of some groups without a pause. Use this only when a store is opened and serves no calls."""
        for _ in self._adding(groups):
            pass

    def remove(self, groups: Sequence[Group]) -> None:
        """Remove the shards of some groups. `add` may have been cancelled before it added all of them."""
        gone = set(map(id, groups))
        for fqn in {shard.fqn for group in groups for shard in group.spec.shards} & self._placed.keys():
            self._furthest.pop(fqn, None)
            self._placed[fqn] = [placed for placed in self._placed[fqn] if id(placed.group) not in gone]
            if self._placed[fqn]:
                self._order(fqn)
            else:
                del self._placed[fqn]
        self._runs = [[fqn for fqn in run if fqn in self._placed] for run in self._runs]

    def _adding(self, groups: Iterable[Group]) -> Iterator[None]:
        """Add the shards of some groups, and yield after each small piece of the work, so that the caller can pause."""
        new: list[str] = []
        grown: set[str] = set()
        for group in groups:
            for shard in group.spec.shards:
                self._put(Placed(shard, group), new, grown)
                yield
        for fqn in grown:
            self._order(fqn)
            yield
        for start in range(0, len(new), _RUN_NAMES):
            names = new[start : start + _RUN_NAMES]
            # Short runs of sorted names are joined, because a listing searches every run.
            if self._runs and len(self._runs[-1]) + len(names) <= _RUN_NAMES:
                names += self._runs.pop()
            self._runs.append(sorted(names))
            yield

    def _put(self, placed: Placed, new: list[str], grown: set[str]) -> None:
        shards = self._placed.get(placed.shard.fqn)
        if shards is None:
            self._placed[placed.shard.fqn] = [placed]
            new.append(placed.shard.fqn)
        else:
            shards.append(placed)
            grown.add(placed.shard.fqn)

    def _order(self, fqn: str) -> None:
        """Sort the shards of a tensor to which shards were added, and index their ends if they overlap."""
        placed = self._placed[fqn]
        placed.sort(key=_offset)
        furthest, reach, overlap = [], 0, False
        for i, one in enumerate(placed):
            overlap |= i > 0 and one.shard.offset < _end(placed[reach])
            if _end(one) >= _end(placed[reach]):
                reach = i
            furthest.append(reach)
        if overlap:
            self._furthest[fqn] = furthest


def _offset(placed: Placed) -> int:
    return placed.shard.offset


def _end(placed: Placed) -> int:
    return placed.shard.offset + placed.shard.numel
