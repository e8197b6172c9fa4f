"""The base of all sections of the training config.

A section refuses unknown keys and cannot be changed after it was read. Each of its keys says which ranks must have the
same value for it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Agreement(enum.Enum):
    """The ranks that must have the same value for a key.

    A key without this annotation has RUN, so that all ranks compare a new key unless its author chooses another value.
    """

    RUN = "all ranks"
    NODE = "the ranks of a node"
    """The key is about the daemon that one of the ranks of a node starts and all of them share."""

    NONE = "no other rank"
    """The key is about this rank alone, or the ranks compare instead what follows from it."""


class Section(BaseModel):
    """A section of the training config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def values(self, agreement: Agreement, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield the keys that are set and on which the ranks of `agreement` must agree.

        Each key is yielded as its dotted name and its value in JSON.
        """
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            wanted = next((mark for mark in field.metadata if isinstance(mark, Agreement)), Agreement.RUN)
            if isinstance(value, Section) and wanted is not Agreement.NONE:
                yield from value.values(agreement, f"{prefix}{name}.")
            elif value is not None and wanted is agreement:
                yield f"{prefix}{name}", json.dumps(value, default=str, sort_keys=True)
