"""The sentences about keys that a config cannot have, made from pydantic's errors.

This module owns the words of these messages. Each names the key in full, its value, and what to write instead.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainer_client.base.section import Section
from trainer_client.base.standing import REFUSED_ERROR
from trainer_client.config.keys import section_at
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.config.paramserver import PlacementSection
from trainer_client.config.top_level import meant

# The names that other libraries use for keys of this config and that `difflib` does not find, because they are not
# alike enough. Errors about unknown keys suggest the key of this config.
_OTHER_WORDS = {
    "learning_rate": "lr",
    "decay": "weight_decay",
    "epsilon": "eps",
}
# The types of pydantic's errors about a value, such as a number, that stands where a section (a dict) is expected.
_NO_SECTION = frozenset({"model_type", "model_attributes_type"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedSection:
    """A key whose section depends on its key `type`.

    Attributes:
        names: the values that `type` may have.
        why_refused: returns a sentence about any other value.
    """

    names: Collection[str]
    why_refused: Callable[[str], str]


def explain(error: ValidationError, model: type[Section], choices: Mapping[str, TypedSection]) -> str:
    """Return a line for each problem in pydantic's error.

    Args:
        error: the error of the whole config.
        model: the class of the config.
        choices: the keys whose sections depend on their `type`.
    """
    explainer = _Explainer(model, choices)
    return "\n".join(explainer.sentence(detail) for detail in error.errors())


class _Explainer:
    """The maker of the sentences that `explain` returns, for a config of the class `model`."""

    def __init__(self, model: type[Section], choices: Mapping[str, TypedSection]) -> None:
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
        # The error shows no value for a section that is refused as a whole, because the value may be long, and the
        # section's name says enough.
        shown = "" if kind == REFUSED_ERROR and isinstance(value, Mapping) else f" = {value!r}"
        reason = "write 0, 1, 2 or 3" if path == "zero_optimization.stage" else detail["msg"]
        if kind in _NO_SECTION:
            reason = f"write a section, such as {self._example(path, location, value)}"
        return f"{path}{shown} is refused: {reason}"

    def _example(self, path: str, location: tuple[str, ...], value: Any) -> str:
        """Return an example, in JSON, of the section to write for the user's value, with that value if possible."""
        section = self._section_of((*location, ""))
        names = list(section.model_fields)
        if isinstance(value, bool) and "enabled" in names:
            written: dict[str, Any] = {"enabled": value}
        elif isinstance(value, str) and issubclass(section, PlacementSection):
            written = {"parameters": value, "optimizer": value}
        elif isinstance(value, str) and names[0] in ("device", "type"):
            written = {names[0]: value}
        else:
            default = section.model_fields[names[0]].get_default()
            written = {names[0]: default if isinstance(default, bool | int | float | str) else "..."}
        return json.dumps({path.rpartition(".")[2]: written})[1:-1]

    def _keys_of(self, location: tuple[str, ...]) -> list[str]:
        """Return pydantic's location as keys, without the values of `type` that pydantic puts between them."""
        key, *inner = location
        if inner and key in self._choices and inner[0] in self._choices[key].names:
            del inner[0]
        return [key, *inner]

    def _hint(self, location: tuple[str, ...]) -> str:
        """Return what to do about an unknown key.

        The hint names the known key with the most similar name, if one is similar enough.
        """
        if len(location) == 1:
            near = meant(location[0], self._model)
        else:
            beside, key = self._keys_beside(location), location[-1]
            instead = _OTHER_WORDS.get(key)
            near = instead if instead in beside else next(iter(difflib.get_close_matches(key, beside, n=1)), None)
        if near is not None:
            return f"did you mean {near}?"
        return "remove it; docs/config.md lists the known keys"

    def _keys_beside(self, location: tuple[str, ...]) -> list[str]:
        """Return the known keys of the section that holds the key at `location`."""
        section = self._section_of(location)
        prefix = ".".join(self._keys_of(location)[:-1])
        older = [name.name for name in OLDER_NAMES if name.section == prefix]
        return sorted([*section.model_fields, *older])

    def _section_of(self, location: tuple[str, ...]) -> type[Section]:
        """Return the class of the section that holds the key at `location`."""
        keys = self._keys_of(location)
        tag = location[1] if len(keys) < len(location) else None
        section = section_at(self._model, {location[0]: {"type": tag}}, tuple(keys[:-1]))
        assert section is not None
        return section
