"""The keys of DeepSpeed's config that have no meaning here: the rows of deepspeed_keys.toml, as keys of their sections.

Such a key is known by its name, type and default, so that a config may have it, and a mistyped name or value is found.
This module owns the form of the rows, which the file explains. It must never look at a config.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model

from trainer_client.base.section import Section
from trainer_client.base.standing import Refused, WithoutEffect, is_absent, is_at_most_one, is_off
from trainer_client.config.dtype_names import DTypeName

SectionT = TypeVar("SectionT", bound=Section)

_TABLE = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))
_REASONS: Mapping[str, str] = _TABLE.pop("reasons")

# The meanings of words in the rows of deepspeed_keys.toml: `_TYPES` has the types of keys, and `_VALUES` the values
# that a refused key may have.
_TYPES: Mapping[str, Any] = {
    "float": float,
    "bool or null": bool | None,
    "int or null": int | None,
    "str or null": str | None,
    "strings or null": tuple[str, ...] | None,
    "mapping or null": Mapping[str, Any] | None,
    "mapping, bool or null": Mapping[str, Any] | bool | None,
    "dtype or null": DTypeName | None,
}
_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "off": is_off,
    "absent": is_absent,
    "at_most_one": is_at_most_one,
    "dense": lambda value: value == "dense",
}
_DESCRIPTION = "a key that has no meaning here"


def with_rows(path: str = "") -> Callable[[type[SectionT]], type[SectionT]]:
    """Return a decorator that adds the section's keys in deepspeed_keys.toml to its class, behind its own keys.

    Args:
        path: the dotted name of the section; "" is the whole config.
    """
    rows = reduce(lambda table, name: table[name], path.split(".") if path else [], _TABLE)

    def add(section: type[SectionT]) -> type[SectionT]:
        fields: dict[str, Any] = {name: _field(name, row) for name, row in rows.items() if _is_row(row)}
        return create_model(
            section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields
        )

    return add


def row_paths(rows: Mapping[str, Any] = _TABLE, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of the key that each row of deepspeed_keys.toml describes, in the file's order."""
    for name, row in rows.items():
        if _is_row(row):
            yield f"{prefix}{name}"
        else:
            yield from row_paths(row, f"{prefix}{name}.")


def _is_row(row: Mapping[str, Any]) -> bool:
    """Return whether a table of deepspeed_keys.toml describes a key, and not a section with keys of its own."""
    return "meaning" in row


def _field(name: str, row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the type and the pydantic field of the key that `row` describes, as `create_model` takes them."""
    annotation: Any
    default: Any = row.get("default")
    if "keys" in row or "others" in row:
        section = _section(name, row)
        annotation, default = (section | None, None) if row.get("optional") else (section, section())
    elif "type" in row:
        annotation = _TYPES[row["type"]]
    elif isinstance(default, list):
        annotation, default = tuple[str, ...], tuple(default)
    else:
        annotation = Mapping[str, Any] if isinstance(default, dict) else type(default)
    if "why" in row:
        annotation = Annotated[annotation, _mark(row)]
    shown = not row.get("secret", False)
    return annotation, Field(default=default, description=row.get("meaning", _DESCRIPTION), repr=shown)


def _section(name: str, row: Mapping[str, Any]) -> type[Section]:
    """Return the class of a section that consists only of keys without meaning here, from its rows of the file."""
    fields: dict[str, Any] = {
        key: _field(key, value if isinstance(value, dict) else {"default": value})
        for key, value in row.get("keys", {}).items()
    }
    fields |= {key: (Any, Field(default=None, description=_DESCRIPTION)) for key in row.get("others", ())}
    return create_model(name, __base__=Section, __module__=__name__, **fields)


def _mark(row: Mapping[str, Any]) -> WithoutEffect | Refused:
    why = _REASONS.get(row["why"], row["why"])
    if "instead" not in row:
        return WithoutEffect(why=why)
    return Refused(why=why, instead=row["instead"], unless=_harmless(row.get("unless", "off")))


def _harmless(unless: str | Mapping[str, str]) -> Callable[[Any], bool]:
    """Return the function `Refused.unless` for a key: it returns whether a value means that the feature is off.

    Args:
        unless: the entry `unless` of the key's row in deepspeed_keys.toml.
    """
    if isinstance(unless, str):
        return _VALUES[unless]
    ((key, value),) = unless.items()
    return lambda section: section is None or _VALUES[value](getattr(section, key))
