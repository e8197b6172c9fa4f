"""The tables of states and verbs in docstrings, which tests compare with the code."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest

VerbT = TypeVar("VerbT", bound=enum.Enum)
StateT = TypeVar("StateT", bound=enum.Enum)


def table_in(text: str | None, verbs: type[VerbT], states: type[StateT]) -> dict[tuple[VerbT, StateT], StateT]:
    """Return the transitions that the table in a docstring lists; an empty field is none."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (text or "").splitlines()]
    header, _, *body = [row for row in rows if row]
    columns = [states[name] for name in header[1:]]
    return {
        (verbs[name.upper()], state): states[cell]
        for name, *cells in body
        for state, cell in zip(columns, cells, strict=True)
        if cell
    }


def check_transition(
    table: Mapping[tuple[VerbT, StateT], StateT],
    following: Callable[[StateT, VerbT], StateT],
    state: StateT,
    verb: VerbT,
    refusal: type[Exception],
    words: str,
) -> None:
    """Check that `following` gives what the table has, or raises `refusal` with `words` where the field is empty."""
    documented = table.get((verb, state))
    if documented is not None:
        assert following(state, verb) is documented
        return
    with pytest.raises(refusal, match=words):
        following(state, verb)
