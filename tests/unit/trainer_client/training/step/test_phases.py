"""The phase changes only as the table in phases.py says."""

from __future__ import annotations

import re

import pytest

from tests.unit.state_tables import table_in
from trainer_client.errors import PhaseError
from trainer_client.training.step import phases
from trainer_client.training.step.phases import Phase, Phases, Verb

TABLE = table_in(phases.__doc__, Verb, Phase)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("verb", Verb)
def test_every_transition_is_the_documented_one(verb: Verb, phase: Phase) -> None:
    current = Phases()
    current.current = phase
    following = TABLE.get((verb, phase))

    if following is not None:
        current.enter(verb)
        assert current.current is following
        return
    with pytest.raises(PhaseError, match=re.escape(f"{verb.value} was called where it cannot be: {phase.value}")):
        current.enter(verb)
    assert current.current is phase


def test_the_table_has_a_row_for_each_verb_and_a_way_out_of_each_phase_but_the_last() -> None:
    assert {verb for verb, _ in TABLE} == set(Verb)
    assert {phase for _, phase in TABLE} == set(Phase) - {Phase.FAILED}
