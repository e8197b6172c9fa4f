"""The tables of docs/config.md, made from the typed config: `python -m trainer_client.config.reference [--check]`.

This module owns the parts of the page between its markers. It must never change the text around them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from trainer_client.base.section import Section, is_honoured, mark_of
from trainer_client.base.standing import Refused, WithoutEffect
from trainer_client.config.deepspeed_keys import row_paths
from trainer_client.config.keys import leaves, sections_in
from trainer_client.config.older_names import OLDER_NAMES
from trainer_client.config.training_config import TrainingConfig
from trainer_client.optimizers.registry import OPTIMIZERS

PAGE = Path(__file__).parents[2] / "docs" / "config.md"

_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# A row of the page of keys lists the types of a section only if there are at most this many.
_NAMED_TYPES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A key of the config, or a section that has one mark for all of its keys.

    Attributes:
        path: the dotted name of the key.
        field: the declaration of the key.
        types: the values of the key `type` in the same section for which this key exists; empty: it always exists.
        inner: the names of a section's keys, relative to the section.
    """

    path: str
    field: FieldInfo
    types: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()

    @property
    def without_effect(self) -> WithoutEffect | None:
        """The mark that says why the key has no effect; None if it has one."""
        return mark_of(self.field, WithoutEffect)

    @property
    def refused(self) -> Refused | None:
        """The mark that says why the key is refused; None if it is not."""
        return mark_of(self.field, Refused)

    @property
    def keys(self) -> int:
        """The number of keys that the entry stands for: those of a section with one mark, or 1."""
        return len(self.inner) or 1


def entries(model: type[Section] = TrainingConfig) -> list[KeyEntry]:
    """Return all keys of the config in their order, those without meaning in the order of deepspeed_keys.toml.

    A key that several optimizers have in the same form is returned once.
    """
    merged: dict[tuple[str, str], KeyEntry] = {}
    for entry in _walk(model):
        mark = entry.without_effect or entry.refused
        kind = (entry.path, repr((mark, entry.field.description, entry.field.default)))
        known = merged.get(kind)
        merged[kind] = entry if known is None else replace(known, types=known.types + entry.types)
    places: dict[str, int] = {}
    for path in (*row_paths(), *(path for path, _ in merged)):
        places.setdefault(path, len(places))
    return sorted(merged.values(), key=lambda entry: places[entry.path])


def count_keys(found: Iterable[KeyEntry]) -> int:
    """Return how many keys the entries stand for. A dotted name that several entries have is counted once."""
    return len({f"{entry.path}.{key}" for entry in found for key in entry.inner or ("",)})


def generated_parts() -> dict[str, str]:
    """Return the generated parts of the page, by the name in their markers."""
    found = entries()
    honoured = [entry for entry in found if is_honoured(entry.field)]
    without_effect = [entry for entry in found if entry.without_effect]
    refused = [entry for entry in found if entry.refused]
    return {
        "count": f"Of DeepSpeed's keys and those of `paramserver`, {count_keys(honoured)} are honoured, "
        f"{count_keys(without_effect)} are without effect, and {count_keys(refused)} are refused.\n",
        "honoured": _table(
            ("key", "default", "meaning"), ((_code(e.path), _default(e.field), _meaning(e)) for e in honoured)
        ),
        "without_effect": _table(
            ("key", "DeepSpeed's default", "meaning in DeepSpeed", "why it has no effect here"),
            (
                (_code(e.path), _default(e.field), _meaning(e), e.without_effect.why)
                for e in without_effect
                if e.without_effect
            ),
        ),
        "refused": _table(
            ("key", "off", "meaning in DeepSpeed", "why it is refused", "instead"),
            (
                (_code(e.path), _default(e.field), _meaning(e), e.refused.why, e.refused.instead)
                for e in refused
                if e.refused
            ),
        ),
        "older_names": _table(("older", "is read as"), _older_names()),
    }


def render(page: str) -> str:
    """Return the text `page` of docs/config.md, with each generated part replaced by a new one."""
    parts = generated_parts()
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n{match[3]}", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page or, with --check, print whether it is up to date. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is not up to date")
    check = parser.parse_args(arguments).check
    page = PAGE.read_text(encoding="utf-8")
    made = render(page)
    if made == page:
        return 0
    if check:
        print(f"{PAGE} is not up to date: run python -m trainer_client.config.reference", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


def _walk(model: type[Section], prefix: str = "", types: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = sections_in(field.annotation)
        if not is_honoured(field):
            keys = tuple(leaf for section in inner for leaf, _ in leaves(section))
            yield KeyEntry(path=path, field=field, types=types, inner=keys)
        elif len(inner) > 1:
            for section in inner:
                yield from _walk(section, f"{path}.", get_args(section.model_fields["type"].annotation))
        elif inner:
            yield from _walk(inner[0], f"{path}.", types)
        else:
            yield KeyEntry(path=path, field=field, types=types)


def _meaning(entry: KeyEntry) -> str:
    """Return the text for a key in the page's table: its description, for which `type` it exists, and inner keys."""
    text = entry.field.description or ""
    if entry.inner:
        text += f" ({', '.join(_code(key) for key in entry.inner)})"
    if entry.path.endswith(".type"):
        return ": ".join(filter(None, [text, ", ".join(_code(name) for name in entry.types)]))
    if entry.types and set(entry.types) != _all_types(entry.path):
        shown = ", ".join(entry.types) if len(entry.types) <= _NAMED_TYPES else "other types"
        text = f"{shown}: {text}"
    return text


def _all_types(path: str) -> set[str]:
    """Return all values that the key `type` may have in the section of the config that has the key at `path`."""
    field = TrainingConfig.model_fields[path.partition(".")[0]]
    return {
        name for section in sections_in(field.annotation) for name in get_args(section.model_fields["type"].annotation)
    }


def _default(field: FieldInfo) -> str:
    """Return the text for a key's default in the page's table: "" for a required key, "off" for a section."""
    if field.is_required():
        return ""
    if isinstance(field.default, Section):
        return "" if mark_of(field, WithoutEffect) else "off"
    return _code(_shown(field.default))


def _shown(value: Any) -> str:
    """Return a value of the config as JSON for the page's table, with large numbers and sizes in a short form."""
    if isinstance(value, ByteSize):
        return json.dumps(value.human_readable().replace(".0", ""))
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(each) for each in value)}]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        short = re.sub(r"e([-+])0*", lambda match: "e" + match[1].strip("+"), f"{value:g}")
        return short if float(short) == value else str(value)
    return json.dumps(value, default=str)


def _older_names() -> Iterator[tuple[str, str]]:
    yield _code("zero_optimization: true"), _code('zero_optimization: {"stage": 1}')
    for older in OLDER_NAMES:
        form = "" if older.switched_on is None else f": {json.dumps(older.switched_on)}"
        yield _code(older.path), _code(f"{older.path_instead}{form}")
    for record in OPTIMIZERS.values():
        for name in record.other_names:
            yield _code(f'optimizer.type: "{name}"'), _code(f'"{record.name}"')


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
