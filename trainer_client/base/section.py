"""The base of all sections of the training config.

A section refuses unknown keys and cannot be changed after it was read. Each of its keys says which ranks must have the
same value for it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from trainer_client.base.standing import Refused, WithoutEffect

MarkT = TypeVar("MarkT")


class Agreement(enum.Enum):
    """The ranks that must have the same value for a key of the config. It is an annotation of the key's field.

    A key without this annotation has RUN, so that all ranks compare a new key unless its author chooses another value.
    Ranks may differ in a key without effect, and in a key that is refused unless it is off.
    """

    RUN = "all ranks"
    NODE = "the ranks of a node"
    """The key is about the daemon that one of the ranks of a node starts and all of them share."""

    NONE = "no other rank"
    """The key is about this rank alone, or the ranks compare instead what follows from it."""


def mark_of(field: FieldInfo, kind: type[MarkT]) -> MarkT | None:
    """Return the object of class `kind` among the annotations of a key's field, or None if there is none."""
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)


def is_honoured(field: FieldInfo) -> bool:
    """Return whether this library honours a key: its annotation has no mark WithoutEffect or Refused."""
    return not any(isinstance(mark, WithoutEffect | Refused) for mark in field.metadata)


def agreement_of(field: FieldInfo) -> Agreement:
    """Return which ranks must have the same value for a key, from the annotation of its field."""
    if not is_honoured(field):
        return Agreement.NONE
    return mark_of(field, Agreement) or Agreement.RUN


class Section(BaseModel):
    """The base class of the sections of the training config: a pydantic model, each field of which is a key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def values(self, agreement: Agreement, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield the keys that are set and on which the ranks of `agreement` must agree.

        Each key is yielded as its dotted name and its value in JSON.
        """
        for name, field in type(self).model_fields.items():
            value: Any = getattr(self, name)
            wanted = agreement_of(field)
            if isinstance(value, Section) and wanted is not Agreement.NONE:
                yield from value.values(agreement, f"{prefix}{name}.")
            elif value is not None and wanted is agreement:
                yield f"{prefix}{name}", json.dumps(value, default=str, sort_keys=True)
