"""What the pages for users of another framework say about its names."""

from __future__ import annotations

import re


def words_by_name(page: str) -> dict[str, str]:
    """Return the word in the second column of a page's tables, such as "honoured", by each name in the first column."""
    rows = re.findall(r"^\| (`.*?`) \| ([\w ]+) \|", page, flags=re.MULTILINE)
    return {name: word for names, word in rows for name in re.findall(r"`(.*?)`", names)}
