"""The state of a gradient changes only as the table in gradient_state.py says."""

from __future__ import annotations

import pytest

from tests.unit.state_tables import check_transition, table_in
from trainer_client.training.step import gradient_state
from trainer_client.training.step.gradient_state import GradientState, GradientVerb, following

TABLE = table_in(gradient_state.__doc__, GradientVerb, GradientState)


@pytest.mark.parametrize("state", GradientState)
@pytest.mark.parametrize("verb", GradientVerb)
def test_every_transition_is_the_documented_one(verb: GradientVerb, state: GradientState) -> None:
    words = f"a gradient that is {state.name} cannot {verb.name}"
    check_transition(TABLE, following, state, verb, RuntimeError, words)


def test_only_a_withdrawal_and_the_end_of_the_step_lead_out_of_sent() -> None:
    assert {verb for (verb, state) in TABLE if state is GradientState.SENT} == {
        GradientVerb.WITHDRAW,
        GradientVerb.FINISH,
    }


def test_a_reduction_leaves_nothing_whole() -> None:
    assert not any(after.has_whole for (verb, _), after in TABLE.items() if verb is GradientVerb.ADD_UP)
