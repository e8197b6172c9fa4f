"""The reading of a config file: JSON, with the comments and trailing commas that DeepSpeed's reader accepts.

This module must never change a string of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paramserver.contract.documents import parse_json
from trainer_client.errors import ConfigError

# A pattern for a string, or a comment in one of the three forms of Hjson, which DeepSpeed reads. Strings are matched so
# that no comment is found within one.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
# A pattern for a string, or a comma before the end of an object or a list. Strings are matched so that no comma is
# found within one.
_STRING_OR_LAST_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])', re.DOTALL)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON in UTF-8, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {path} is not text in UTF-8: {error}") from None
    try:
        raw = parse_json(_plain_json(text), _without_duplicates)
    except ValueError as error:
        raise ConfigError(f"config {path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds a {type(raw).__name__}: write a JSON object")
    return raw


def _plain_json(text: str) -> str:
    """Return the text without comments and trailing commas. Lines keep their numbers, which errors name."""
    without_comments = _STRING_OR_COMMENT.sub(
        lambda match: match[0] if match[0].startswith('"') else "\n" * match[0].count("\n"), text
    )
    return _STRING_OR_LAST_COMMA.sub(lambda match: match[0] if match[0].startswith('"') else "", without_comments)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of one JSON object, for `json.loads`. Raise ValueError for a key that the object has twice."""
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"the key {repeated[0]!r} is there twice: remove one")
    return dict(pairs)
