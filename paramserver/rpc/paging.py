"""The pages in which long lists are sent, and the tokens that name them.

A token names the tensor or shard with which the next page begins. So the daemon keeps nothing for a client between two
pages, a token stays valid for any time, and the last page costs no more than the first.
"""

from __future__ import annotations

from typing import NamedTuple

from storage.base.errors import InvalidRequestError

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

_MOST_DIGITS = 9


class PageStart(NamedTuple):
    """The tensor, or the shard of a tensor by kind and number, with which a page of a list begins."""

    fqn: str = ""
    kind: int = 0
    shard: int = 0

    def to_token(self) -> str:
        """Return the token of a page that begins here."""
        return f"{self.kind}.{self.shard}.{self.fqn}"

    @classmethod
    def of_token(cls, token: str) -> PageStart:
        """Return the page start that a token names. The empty token names the beginning of the list.

        Raises:
            InvalidRequestError: the text is not a token.
        """
        if not token:
            return cls()
        kind, _, rest = token.partition(".")
        shard, _, fqn = rest.partition(".")
        if not fqn or not (_is_number(kind) and _is_number(shard)):
            raise InvalidRequestError(f"page_token {token[:40]!r} was not given out by this store")
        return cls(fqn, int(kind), int(shard))


def page_size(asked: int) -> int:
    """Return how many items a page has; a client that sends 0 asks for the default.

    Raises:
        InvalidRequestError: the client asks for more than a page may have.
    """
    if asked > MAX_PAGE:
        raise InvalidRequestError(f"page_size {asked} is above {MAX_PAGE}")
    return asked or DEFAULT_PAGE


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= _MOST_DIGITS
