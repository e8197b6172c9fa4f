"""Lists that are given out a page at a time. A page's token says where the next one begins, and is good at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from storage.errors import InvalidRequestError

DEFAULT_PAGE = 1000
MAX_PAGE = 10_000

ItemT = TypeVar("ItemT")


def page(items: Sequence[ItemT], size: int, token: str) -> tuple[Sequence[ItemT], str]:
    """The items of one page, and the next one's token (empty: that was the last); `size` 0 is the default.

    Raises:
        InvalidRequestError: the size is above the largest, or the token is none.
    """
    if size > MAX_PAGE:
        raise InvalidRequestError(f"page_size {size} is above {MAX_PAGE}")
    if token and not (token.isdecimal() and token.isascii() and len(token) < 20):
        raise InvalidRequestError(f"page_token {token[:40]!r} was not given out by this store")
    start = int(token or 0)
    stop = start + (size or DEFAULT_PAGE)
    return items[start:stop], str(stop) if stop < len(items) else ""
