"""A table of states and verbs, in which a state changes only as the table says.

A module that owns such a state has the transitions as a table in its docstring and as a Transitions object, which it
gives the error with which a verb is refused. `tests/unit/state_tables.py` compares the docstring with the object.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=enum.Enum)
VerbT = TypeVar("VerbT", bound=enum.Enum)


class Transitions(Generic[StateT, VerbT]):
    """A table that says which state follows a given state by a given verb."""

    def __init__(
        self, table: Mapping[tuple[VerbT, StateT], StateT], refusal: Callable[[StateT, VerbT], Exception]
    ) -> None:
        """Make the table of a kind of state.

        Args:
            table: the state that follows, by verb and state. A pair that it lacks is refused.
            refusal: makes the error about a verb that is refused in a state.
        """
        self._table = table
        self._refusal = refusal

    def following(self, state: StateT, verb: VerbT) -> StateT:
        """Return the state that follows `state` by `verb`. Raise the error of `refusal` if there is none."""
        if (found := self._table.get((verb, state))) is None:
            raise self._refusal(state, verb)
        return found
