"""The check, before each gather of a unit, that all ranks are about to gather the same unit.

This module owns the announcement under way. It must never let a gather begin that could fill a unit with another unit's
bytes.

[Note: announcements] While a unit computes, the ranks exchange headers. A header names the unit that the rank expects
to gather next. When a rank then needs a unit, it looks at the headers: if all ranks expected this unit, the gather
begins without a further round trip. If a header differs, the ranks exchange headers again, now with the unit that each
rank needs. Ranks that run the same units in the same order expect and need the same units. A rank that runs another
unit is found because its header differs, or because it never joins the exchange, which then times out. Headers have one
size and a process group of their own, so no other message is taken for a header.
"""

from __future__ import annotations

import hashlib

import torch

from trainer_client.errors import CollectiveMismatchError
from trainer_client.training.ranks.collectives import Collectives, PendingRows

_DIGEST_BYTES = 16
_HEADER_BYTES = 128


class Lockstep:
    """Checks for one rank, before each of its gathers, that all ranks are about to gather the same unit.

    `announce` sends the name of the unit that the rank expects, and `confirm` compares the names of all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._announced: tuple[str, PendingRows] | None = None
        self._gathers = 0

    def announce(self, unit: str) -> None:
        """Announce that this rank expects to gather `unit` next. All ranks must call this; it does not wait for them.

        The call does nothing while an announcement is under way.
        """
        if self._announced is None and self._collectives.world_size > 1:
            header = _header(unit, self._gathers + 1)
            self._announced = unit, self._collectives.start_gather_headers(header, what=f"the gather of {unit}")

    def confirm(self, unit: str) -> None:
        """Wait for the headers of all ranks, and check that all are about to gather `unit`. All ranks must call this.

        Raises:
            CollectiveMismatchError: another rank is about to gather another unit.
            CollectiveError: another rank did not take part.
        """
        if self._collectives.world_size == 1:
            return
        if self._announced is not None:
            announced, headers = self._announced
            self._announced = None
            if _are_equal(headers.wait()) and announced == unit:
                self._gathers += 1
                return
        self.announce(unit)
        assert self._announced is not None
        _, headers = self._announced
        self._announced = None
        if not _are_equal(wanted := headers.wait()):
            raise CollectiveMismatchError(
                f"ranks were about to gather different units with one another ({_wishes(wanted)}): nothing was mixed. "
                "All ranks must run the same units in the same order, unless they share a node's store "
                '(paramserver.gather: "store"); restart the job, it resumes from the last commit'
            )
        self._gathers += 1


def _header(unit: str, number: int) -> torch.Tensor:
    """Return a header, uint8 [_HEADER_BYTES]: digest of the unit's name, number of the gather, end of that name."""
    name = unit.encode()
    fixed = hashlib.sha256(name).digest()[:_DIGEST_BYTES] + number.to_bytes(8, "little")
    shown = name[-(_HEADER_BYTES - len(fixed)) :]
    return torch.tensor(list((fixed + shown).ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _are_equal(headers: torch.Tensor) -> bool:
    return bool((headers == headers[0]).all())


def _wishes(headers: torch.Tensor) -> str:
    wishes = []
    for rank, row in enumerate(headers.tolist()):
        number = int.from_bytes(bytes(row[_DIGEST_BYTES : _DIGEST_BYTES + 8]), "little")
        name = bytes(row[_DIGEST_BYTES + 8 :]).rstrip(b"\0").decode(errors="replace")
        wishes.append(f"rank {rank}: {name}, its gather {number}")
    return "; ".join(wishes)
