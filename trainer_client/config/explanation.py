"""The sentences about keys that a config cannot have, made from pydantic's errors.

This module owns the words of these messages. Each names the key in full, its value, and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from trainer_client.config.keys import sections_in
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.config.top_level import meant
from trainer_client.section import Section
from trainer_client.standing import REFUSED_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A key whose section depends on its key `type`.

    Attributes:
        names: the values that `type` may have.
        why_refused: returns a sentence about any other value.
    """

    names: Collection[str]
    why_refused: Callable[[str], str]


def explain(error: ValidationError, model: type[Section], choices: Mapping[str, Choice]) -> str:
    """Return a line for each problem in pydantic's error.

    Args:
        error: the error of the whole config.
        model: the class of the config.
        choices: the keys whose sections depend on their `type`.
    """
    explainer = _Explainer(model, choices)
    return "\n".join(explainer.sentence(detail) for detail in error.errors())


class _Explainer:
    """The sentences about one class of config."""

    def __init__(self, model: type[Section], choices: Mapping[str, Choice]) -> None:
        self._model = model
        self._choices = choices

    def sentence(self, detail: Any) -> str:
        """Return a sentence about a dotted key for one of pydantic's errors."""
        location = tuple(str(part) for part in detail["loc"])
        path = ".".join(self._keys_of(location))
        value = detail["input"]
        kind = detail["type"]
        if kind.startswith("union_tag"):
            choice = self._choices[path]
            if kind.endswith("not_found"):
                return f"{path}.type is missing: write one of {', '.join(choice.names)}"
            given = detail["ctx"]["tag"]
            return f"{path}.type = {given!r} is refused: {choice.why_refused(given)}"
        if kind == "extra_forbidden":
            return f"{path} is unknown to DeepSpeed and to this library; {self._hint(location)}"
        if kind == "missing":
            return f"{path} is missing"
        # A section that is refused as a whole may be long, and its name says enough.
        shown = "" if kind == REFUSED_ERROR and isinstance(value, Mapping) else f" = {value!r}"
        reason = "write 0, 1, 2 or 3" if path == "zero_optimization.stage" else detail["msg"]
        return f"{path}{shown} is refused: {reason}"

    def _keys_of(self, location: tuple[str, ...]) -> list[str]:
        """Return pydantic's location as keys, without the values of `type` that pydantic puts between them."""
        return [
            part for index, part in enumerate(location) if not (index == 1 and self._is_tag(location[0], location[1]))
        ]

    def _is_tag(self, key: str, part: str) -> bool:
        return key in self._choices and part in self._choices[key].names

    def _hint(self, location: tuple[str, ...]) -> str:
        """Return what to do about an unknown key.

        The hint names the known key with the most similar name, if one is similar enough.
        """
        if len(location) == 1:
            near = meant(location[0], self._model)
        else:
            near = next(iter(difflib.get_close_matches(location[-1], self._keys_beside(location), n=1)), None)
        if near is not None:
            return f"did you mean {near}?"
        return "remove it; docs/config.md lists the known keys"

    def _keys_beside(self, location: tuple[str, ...]) -> list[str]:
        """Return the known keys of the section that holds the key at `location`."""
        section = self._model
        keys = self._keys_of(location)
        tag = location[1] if len(location) > 1 and self._is_tag(location[0], location[1]) else None
        for depth, key in enumerate(keys[:-1]):
            candidates = sections_in(section.model_fields[key].annotation)
            section = next(
                (c for c in candidates if depth == 0 and tag is not None and _has_tag(c, tag)), candidates[0]
            )
        prefix = ".".join(keys[:-1])
        older = [name.name for name in OLDER_NAMES if name.section == prefix]
        return sorted([*section.model_fields, *older])


def _has_tag(section: type[Section], tag: str) -> bool:
    return tag in get_args(section.model_fields["type"].annotation)
