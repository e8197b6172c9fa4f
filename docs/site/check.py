"""Checks of the built site: `python -m docs.site.check DIRECTORY` ends with 1 where a page does not hold what it says.

Every relative link has its file and its anchor, and no page loads anything from another host: no style, script, font or
picture. Links that a reader may click lead where they like. This module must never use the network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# The attributes whose addresses a browser loads by itself, by tag.
_LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src", "video": "src"}
_ELSEWHERE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)""")


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        having = {name: value for name, value in attrs if value}
        self.anchors.update(having[name] for name in ("id", "name") if name in having)
        if tag == "a" and "href" in having:
            self.links.append(having["href"])
        if (name := _LOADED.get(tag)) and name in having:
            self.loaded.append(having[name])


def problems(site: Path) -> Iterator[str]:
    """Yield one line for each link of the site that leads nowhere, and for each thing that is loaded from elsewhere."""
    site = site.resolve()
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for address in (*page.links, *page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    yield f"{path}: loads {address}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file() or not target.is_relative_to(site):
                yield f"{path}: {address} is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{path}: {address} has no such anchor"
    for style in sorted(site.rglob("*.css")):
        for match in _ELSEWHERE.finditer(style.read_text(encoding="utf-8")):
            yield f"{style}: loads {match[1]}"


def main(arguments: Sequence[str]) -> int:
    """Print the problems of the site in the first argument. Return the exit code."""
    site = Path(arguments[0])
    if not any(site.rglob("*.html")):
        print(f"{site} has no page: run `make docs`", file=sys.stderr)
        return 1
    found = list(problems(site))
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
