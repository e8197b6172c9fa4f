"""The state of a session at the daemon changes only as the table in session_state.py says."""

from __future__ import annotations

import pytest

from paramserver.sessions import session_state
from paramserver.sessions.session_state import SessionState, SessionVerb, following
from storage.base.errors import NotFoundError
from tests.unit.state_tables import check_transition, table_in

TABLE = table_in(session_state.__doc__, SessionVerb, SessionState)


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("verb", SessionVerb)
def test_every_transition_is_the_documented_one(verb: SessionVerb, state: SessionState) -> None:
    words = f"a session that is {state.name.lower()} cannot {verb.value}"
    check_transition(TABLE, following, state, verb, NotFoundError, words)


def test_no_session_comes_back_from_its_end() -> None:
    assert {state for _, state in TABLE} == {state for state in SessionState if state.has_leases}
