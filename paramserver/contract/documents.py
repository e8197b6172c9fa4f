"""The parsing of JSON and TOML that came from a file or over the network.

The standard library raises RecursionError for a text that is nested a thousand times. This module raises ValueError for
it, as for every other text that cannot be parsed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def parse_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what `json.loads` returns. Raise ValueError if the text is no JSON, or is nested too deeply."""
    return _parsed(lambda: json.loads(text, object_pairs_hook=object_pairs_hook))


def parse_small_json(content: bytes, most_values: int) -> Any:
    """Return what `parse_json` returns for a document of a foreign file.

    The number of values is bounded, because 100 MB of empty lists would take 2 GB and minutes of garbage collection.

    Raises:
        ValueError: see `parse_json`; or the document may have more than `most_values` values.
    """
    if (values := sum(content.count(sign) for sign in (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"it has {values} values, above {most_values}")
    return parse_json(content)


def parse_toml(text: str) -> dict[str, Any]:
    """Return what `tomllib.loads` returns. Raise ValueError if the text is no TOML, or is nested too deeply."""
    return _parsed(lambda: tomllib.loads(text))


def _parsed(parse: Callable[[], T]) -> T:
    try:
        return parse()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
