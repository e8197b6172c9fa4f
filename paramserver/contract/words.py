"""The words that people read and write for the values of the wire's enums, such as "param" for KIND_PARAM.

The words are derived from the generated enums, so that a value has its word at both ends as soon as the contract
defines it. This module must never import torch, because the admin tool prints these words and has to start quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

ValueT = TypeVar("ValueT", bound=int)


def words_of(enum: type[ValueT]) -> Mapping[str, ValueT]:
    """Return the values of a generated enum by their words, in the order of the contract, without the unspecified one.

    Example:
        >>> words_of(pb.Tier)
        {"gpu": 1, "host": 2, "nvme": 3}
    """
    prefix = _prefix(enum)
    values: list[tuple[str, ValueT]] = _wrapper(enum).items()
    return {name.removeprefix(prefix).lower(): value for name, value in values if value}


def word_of(enum: type[ValueT], value: ValueT) -> str:
    """Return the word for a value.

    Raises:
        ValueError: the contract of this version has no such value.
    """
    name: str = _wrapper(enum).Name(value)
    return name.removeprefix(_prefix(enum)).lower()


def _prefix(enum: type[ValueT]) -> str:
    """Return the prefix of the names of all values. The value 0 of every enum is named PREFIX_UNSPECIFIED."""
    name: str = _wrapper(enum).Name(0)
    return name.removesuffix("UNSPECIFIED")


def _wrapper(enum: type[ValueT]) -> Any:
    """Return the enum with the type that it has at run time; the generated stubs declare another one."""
    return enum
