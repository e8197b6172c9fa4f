"""The comparison of config, model and optimizer, which must be the same on all ranks, at the start of an engine.

The ranks exchange digests first, and then only the values that differ, for the error message. This module must never
send a value that does not differ. Every decision follows from what all ranks have received, so that either all ranks
raise the same error or none does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_client.base.index_ranges import to_ranges
from trainer_client.errors import RankMismatchError
from trainer_client.training.ranks.collectives import Collectives

_DIGEST_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WHAT = "the comparison of configs"

# Limits of the error message about settings that differ between ranks, so that the message is short even with many
# ranks and keys.
_SHOWN_KEYS = 10
_SHOWN_VALUES = 4
_SHOWN_RANGES = 6
_SHOWN_CHARACTERS = 160

_ABSENT = "not set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The settings and objects that one rank was given, as texts that are compared between ranks.

    A text that differs appears in the error message, so no text may be a secret.

    Attributes:
        run: values that all ranks must have alike, by key.
        node: values that the ranks of one node must have alike, by key.
        lists: long lists that all ranks must have alike, by the name of one item, for example "parameter". The message
            shows the first item that differs.
    """

    run: Mapping[str, str]
    node: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)


def require_agreement(mine: Declaration, local_rank: int, collectives: Collectives) -> None:
    """Compare what all ranks declare. All ranks must call this; if they agree, each sends 56 bytes.

    Raises:
        RankMismatchError: the ranks differ. Every rank raises it, with the same message.
    """
    if collectives.world_size == 1:
        return
    identity = _boot_id() + local_rank.to_bytes(8, "little", signed=True)
    digests = (_digest([mine.run, mine.lists]), _digest(mine.node))
    rows = collectives.gather_ids(identity + b"".join(digests), _WHAT)
    nodes = _nodes([(row[:_DIGEST_BYTES], row[_DIGEST_BYTES : len(identity)]) for row in rows])
    everybody = [list(range(collectives.world_size))]
    of_run = [row[len(identity) : -_DIGEST_BYTES] for row in rows]
    of_node = [row[-_DIGEST_BYTES:] for row in rows]
    if not _differ(of_run, everybody) and not _differ(of_node, nodes):
        return
    comparison = _Comparison(collectives)
    lines = [
        *comparison.of_keys(mine.run, everybody, ""),
        *comparison.of_lists(mine.lists),
        *comparison.of_keys(mine.node, nodes, " (ranks of one node)"),
    ]
    if more := lines[_SHOWN_KEYS:]:
        lines[_SHOWN_KEYS:] = [f"and {len(more)} more"]
    raise RankMismatchError(
        "the ranks of this run do not have the same config, model and optimizer:\n  "
        + "\n  ".join(lines)
        + "\nGive all of them the same (docs/config.md says which keys may differ); nothing was started"
    )


class _Comparison:
    """Finds out by collectives which values differ between ranks, and makes the error message's lines about them."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def of_keys(self, mine: Mapping[str, str], groups: Iterable[Sequence[int]], suffix: str) -> list[str]:
        """Return a line for each key whose values differ within one of the groups of ranks, such as one node's ranks.

        All ranks must call this.
        """
        groups = list(groups)
        digests = self._gather({key: _digest(value).hex() for key, value in mine.items()})
        keys = sorted({key for row in digests for key in row})
        differing = [key for key in keys if _differ([row.get(key) for row in digests], groups)]
        values = self._gather({key: _cut(mine[key]) for key in differing[:_SHOWN_KEYS] if key in mine})
        lines = []
        for key in differing:
            found = [row.get(key, _ABSENT) for row in values]
            odd = [rank for group in groups if _differ([row.get(key) for row in digests], [group]) for rank in group]
            lines.append(f"{key}: {_who_has_what(found, odd)}{suffix}")
        return lines

    def of_lists(self, mine: Mapping[str, Sequence[str]]) -> list[str]:
        """Return a line for each list that differs, with the first item that differs. All ranks must call this."""
        lines = []
        for name, items in sorted(mine.items()):
            sizes = self._gather(len(items))
            if not self._differs_within(items, max(sizes)):
                continue
            # The first item that differs is found by bisection. The first `equal` items of the lists are alike on all
            # ranks, and the first `differing` items are not.
            equal, differing = 0, max(sizes)
            while differing - equal > 1:
                middle = (equal + differing) // 2
                if self._differs_within(items, middle):
                    differing = middle
                else:
                    equal = middle
            values = self._gather(_cut(items[equal]) if equal < len(items) else f"none, of {len(items)}")
            lines.append(f"{name} {equal}: {_who_has_what(values, range(len(values)))}")
        return lines

    def _differs_within(self, items: Sequence[str], count: int) -> bool:
        digests = self._collectives.gather_ids(_digest(list(items[:count])), _WHAT)
        return len(set(digests)) > 1

    def _gather(self, value: Any) -> list[Any]:
        return [json.loads(row) for row in self._collectives.gather_bytes(json.dumps(value).encode(), _WHAT)]


def _nodes(places: Sequence[tuple[bytes, bytes]]) -> list[list[int]]:
    """Group the ranks by node, given (boot id, local rank) of each rank.

    Ranks of one node have the same boot id of the kernel. If a local rank occurs twice with one boot id, the second one
    is taken for the first rank of another node, because tests run several nodes on one machine.
    """
    nodes: list[list[int]] = []
    current: dict[bytes, tuple[list[int], set[bytes]]] = {}
    for rank, (boot, local_rank) in enumerate(places):
        if boot not in current or local_rank in current[boot][1]:
            current[boot] = [], set()
            nodes.append(current[boot][0])
        current[boot][0].append(rank)
        current[boot][1].add(local_rank)
    return nodes


def _boot_id() -> bytes:
    return hashlib.sha256(_BOOT_ID.read_bytes()).digest()[:_DIGEST_BYTES]


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()[:_DIGEST_BYTES]


def _differ(values: Sequence[object], groups: Iterable[Sequence[int]]) -> bool:
    return any(len({values[rank] for rank in group}) > 1 for group in groups)


def _who_has_what(values: Sequence[str], ranks: Iterable[int]) -> str:
    """Return a text that says which of `ranks` have which value, such as "3 on ranks 0, 2-5; 2 on rank 1"."""
    by_value: dict[str, list[int]] = {}
    for rank in ranks:
        by_value.setdefault(values[rank], []).append(rank)
    shown = [f"{value} on {_ranks(held)}" for value, held in list(by_value.items())[:_SHOWN_VALUES]]
    if (others := len(by_value) - _SHOWN_VALUES) > 0:
        shown.append(f"{others} other values")
    return "; ".join(shown)


def _ranks(ranks: Sequence[int]) -> str:
    ranges = to_ranges(ranks)
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_SHOWN_RANGES]]
    if len(ranges) > _SHOWN_RANGES:
        shown.append("...")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def _cut(text: str) -> str:
    """Shorten a long text for an error message. Its digest is at the end, so two shortened texts still differ."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... (digest {_digest(text).hex()[:8]})"
