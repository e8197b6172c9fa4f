"""The mark on a call by which the store recognises a repetition of it.

If a connection breaks, a client does not know which of its calls the store has made. So the client makes the calls
again on the next stream of its session, with the same numbers. The store makes the call of each number only once.

A call that was sent on an earlier connection can arrive after its repetition was answered, for example when a link
comes back and the kernel sends what it still has. So each call also has the number of the stream of its session, and
the store makes no new call of an earlier stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KEY = "paramserver-call"
# The most numbers of answered calls that a client puts into the mark of one call. The mark travels in the call's
# metadata, which gRPC limits to some KiB.
MOST_ANSWERED = 256
_MOST_CHARACTERS = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMark:
    """The mark of one call, which a client puts into the metadata of the call.

    Attributes:
        stream: the number of the session's stream when the call was made.
        number: the call's number in the session.
        answered: numbers of calls whose answers have arrived at the client, so that the store may forget the answers.
    """

    stream: int
    number: int
    answered: Sequence[int] = ()

    def to_metadata(self) -> tuple[tuple[str, str]]:
        """Return the metadata of the call that carry the mark."""
        return ((KEY, f"{self.stream} {self.number} {','.join(map(str, self.answered))}"),)

    @classmethod
    def of(cls, metadata: Iterable[Any] | None) -> CallMark | None:
        """Return the mark of a call with these metadata; None if the call has none.

        Raises:
            ValueError: the mark is malformed.
        """
        text = next((value for key, value in metadata or () if key == KEY), None)
        if text is None:
            return None
        if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
            raise ValueError(f"the metadata {KEY} are too long")
        stream, number, answered = text.split(" ")
        return cls(
            stream=int(stream),
            number=int(number),
            answered=[int(one) for one in answered.split(",")] if answered else [],
        )
