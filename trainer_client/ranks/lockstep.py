"""Before ranks gather a unit together they make sure that it is the same one for all.

Owns the announcement under way. Must never let a gather begin that could fill a unit with another one's bytes.

[Note: announcements] A rank announces the unit that it expects to gather next, by an exchange of headers that is under
way while the current unit computes; where the expectation was right on all ranks, no round trip is waited for. Else the
ranks exchange what they really want. All ranks expect and want the same as long as they run the same units in the same
order; a rank that does not is found by comparison, or by the time-out of the exchange that it does not come to. Headers
travel in a process group of their own and have one size: they cannot be taken for anything else.
"""

from __future__ import annotations

import hashlib

import torch

from trainer_client.errors import CollectiveMismatchError
from trainer_client.ranks.collectives import Collectives, PendingRows

_DIGEST_BYTES = 16
_HEADER_BYTES = 128


class Lockstep:
    """The gathers of one rank, in step with those of the others."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._announced: tuple[str, PendingRows] | None = None
        self._gathers = 0

    def announce(self, unit: str) -> None:
        """This rank expects to gather `unit` next. A collective, which is not waited for; without effect as long as an
        announcement is under way."""
        if self._announced is None and self._collectives.world_size > 1:
            header = _header(unit, self._gathers + 1)
            self._announced = unit, self._collectives.start_gather_headers(header, what=f"the gather of {unit}")

    def confirm(self, unit: str) -> None:
        """This rank is about to gather `unit`: returns if the others are, too. A collective.

        Raises:
            CollectiveMismatchError: others are about to gather another unit.
            CollectiveError: others did not come.
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
    """[_HEADER_BYTES] uint8: digest of the name, number of the gather, and the end of the name for people."""
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
