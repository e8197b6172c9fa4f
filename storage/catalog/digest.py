"""Digests of database rows: XXH3-128 of a canonical encoding, the same for equal values of equal SQLite types."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

Value = int | float | str | bytes | None
Row = tuple[Value, ...]

_INTEGER = struct.Struct("<cq")
_REAL = struct.Struct("<cd")
_LENGTH = struct.Struct("<cQ")


def digest(values: Iterable[Value]) -> bytes:
    """Return the digest of the values, 16 bytes in XXH3's canonical (big-endian) order.

    Raises:
        TypeError: a value is of a type that SQLite does not store.
    """
    state = xxhash.xxh3_128()
    for value in values:
        match value:
            case int():
                state.update(_INTEGER.pack(b"i", value))
            case float():
                state.update(_REAL.pack(b"r", value))
            case str():
                text = value.encode()
                state.update(_LENGTH.pack(b"t", len(text)) + text)
            case bytes():
                state.update(_LENGTH.pack(b"b", len(value)))
                state.update(value)
            case None:
                state.update(b"n")
            case _:
                raise TypeError(f"{value!r} is of no type of SQLite")
    return state.digest()


def digest_of_rows(rows: Iterable[Row]) -> bytes:
    """Return the digest of all values of all rows, in order."""
    return digest(value for row in rows for value in row)
