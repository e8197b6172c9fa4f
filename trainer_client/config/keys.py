"""Walks over the typed config: which sections and keys there are, by dotted name.

This module owns nothing. It must never look at values, except at the optimizer's type, which chooses a section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from trainer_client.base.section import Section


def sections_in(annotation: Any) -> list[type[Section]]:
    """Return the classes of sections that a key's type allows, in the order of the type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def leaves(model: type[Section], prefix: str = "") -> Iterator[tuple[str, list[FieldInfo]]]:
    """Yield each key that is no section: its dotted name, and the fields on the way to it, outermost first.

    A key that several optimizers have is yielded once for each of them.
    """
    for name, field in model.model_fields.items():
        inner = sections_in(field.annotation)
        for section in inner:
            for path, fields in leaves(section, f"{prefix}{name}."):
                yield path, [field, *fields]
        if not inner:
            yield f"{prefix}{name}", [field]


def all_paths(model: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys and sections, those of outer sections first."""
    later: list[tuple[type[Section], str]] = []
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        later += [(section, f"{prefix}{name}.") for section in sections_in(field.annotation)]
    for section, inner in later:
        yield from all_paths(section, inner)


def section_at(model: type[Section], config: Mapping[str, Any], path: tuple[str, ...]) -> type[Section] | None:
    """Return the class of the section at a path; None if there is none.

    Args:
        config: the raw config, whose `type` keys choose between sections that a key allows.
    """
    section = model
    values: Any = config
    for key in path:
        if key not in section.model_fields:
            return None
        candidates = sections_in(section.model_fields[key].annotation)
        values = values.get(key) if isinstance(values, Mapping) else None
        chosen = values.get("type") if isinstance(values, Mapping) else None
        if not candidates:
            return None
        section = next((c for c in candidates if _is_of_type(c, chosen)), candidates[0])
    return section


def _is_of_type(section: type[Section], chosen: Any) -> bool:
    """Return whether this class of a section allows the value `chosen` of the key `type`."""
    field = section.model_fields.get("type")
    return field is not None and chosen in get_args(field.annotation)
