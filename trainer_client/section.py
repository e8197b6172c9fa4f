"""What all sections of the training config have in common: unknown keys are refused, nothing changes later, and each
key says which ranks must have the same value of it."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Agreement(enum.Enum):
    """Which ranks must have the same value of a key. A key that is not annotated with one is RUN's, so a new key is
    compared unless its author says otherwise."""

    RUN = "all ranks"
    NODE = "the ranks of a node"
    """The key is about what ranks of a node share: the daemon that one of them starts."""

    NONE = "no other rank"
    """The key is about this rank alone, or what follows from it is compared instead."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def values(self, agreement: Agreement, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Give each key that is set and on which those ranks must agree: its dotted name, and its value as JSON."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            wanted = next((mark for mark in field.metadata if isinstance(mark, Agreement)), Agreement.RUN)
            if isinstance(value, Section) and wanted is not Agreement.NONE:
                yield from value.values(agreement, f"{prefix}{name}.")
            elif value is not None and wanted is agreement:
                yield f"{prefix}{name}", json.dumps(value, default=str, sort_keys=True)
