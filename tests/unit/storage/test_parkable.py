"""Where a gradient or an activation is changes only as the table in parkable.py says."""

from __future__ import annotations

import pytest

from storage.base.errors import NotFoundError
from storage.memory import parkable
from storage.memory.parkable import Activation, ParkState, ParkVerb
from tests.unit.state_tables import table_in

TABLE = table_in(parkable.__doc__, ParkVerb, ParkState)


@pytest.mark.parametrize("state", ParkState)
@pytest.mark.parametrize("verb", ParkVerb)
def test_every_transition_is_the_documented_one(verb: ParkVerb, state: ParkState) -> None:
    memory = Activation(job="job", label="an activation", size_bytes=1)
    memory.state = state
    following = TABLE.get((verb, state))

    if following is not None:
        assert memory.enter(verb) is following
        return
    refusal = NotFoundError if state is ParkState.FREED else AssertionError
    with pytest.raises(refusal, match="an activation is "):
        memory.enter(verb)
    assert memory.state is state


def test_the_table_has_a_row_for_each_verb_and_a_way_out_of_each_state() -> None:
    assert {verb for verb, _ in TABLE} == set(ParkVerb)
    assert {state for _, state in TABLE} == set(ParkState)


def test_a_client_may_not_touch_freed_bytes_and_their_recall_says_that_they_are_freed() -> None:
    """A range that a tile still reads stays in the arena, so the state alone keeps the client away from it."""
    memory = Activation(job="job", label="an activation", size_bytes=1)
    for verb in (ParkVerb.PARK, ParkVerb.FREE):
        memory.enter(verb)

    assert memory.is_parked
    with pytest.raises(NotFoundError, match="an update was its last use"):
        memory.enter(ParkVerb.RECALL)
