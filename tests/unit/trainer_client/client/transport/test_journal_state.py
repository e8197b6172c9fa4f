"""The state of a journal changes only as the table in journal_state.py says."""

from __future__ import annotations

import pytest

from tests.unit.state_tables import check_transition, table_in
from trainer_client.client.transport import journal_state
from trainer_client.client.transport.journal_state import JournalState, JournalVerb, following

TABLE = table_in(journal_state.__doc__, JournalVerb, JournalState)


@pytest.mark.parametrize("state", JournalState)
@pytest.mark.parametrize("verb", JournalVerb)
def test_every_transition_is_the_documented_one(verb: JournalVerb, state: JournalState) -> None:
    words = f"a journal that is {state.name} cannot {verb.name}"
    check_transition(TABLE, following, state, verb, RuntimeError, words)


def test_bytes_without_a_copy_are_remembered_until_the_commit_exists() -> None:
    lacking = {state for state in JournalState if state.lacks_bytes}
    left = {verb for (verb, state), after in TABLE.items() if state in lacking and after not in lacking}
    assert left == {JournalVerb.ACKNOWLEDGE}
