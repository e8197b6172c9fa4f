"""The state of a session at its client changes only as the table in session_state.py says."""

from __future__ import annotations

import pytest

from tests.unit.state_tables import check_transition, table_in
from trainer_client.client.transport import session_state
from trainer_client.client.transport.session_state import SessionState, SessionVerb, following

TABLE = table_in(session_state.__doc__, SessionVerb, SessionState)


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("verb", SessionVerb)
def test_every_transition_is_the_documented_one(verb: SessionVerb, state: SessionState) -> None:
    words = f"a session that is {state.name} cannot {verb.name}"
    check_transition(TABLE, following, state, verb, RuntimeError, words)


def test_a_session_that_is_over_stays_so() -> None:
    over = {state for state in SessionState if state.is_over}
    assert all(after in over for (_, before), after in TABLE.items() if before in over)
