"""The phase changes only as the table in phases.py says."""

from __future__ import annotations

import re

import pytest

from trainer_client.errors import PhaseError
from trainer_client.step import phases
from trainer_client.step.phases import Phase, Phases, Verb


def documented() -> dict[tuple[Verb, Phase], Phase]:
    """Return the transitions that the table in the docstring of phases.py lists."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (phases.__doc__ or "").splitlines()]
    header, _, *body = [row for row in rows if row]
    columns = [Phase[name] for name in header[1:]]
    return {
        (Verb[name.upper()], phase): Phase[cell]
        for name, *cells in body
        for phase, cell in zip(columns, cells, strict=True)
        if cell
    }


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("verb", Verb)
def test_every_transition_is_the_documented_one(verb: Verb, phase: Phase) -> None:
    current = Phases()
    current.current = phase
    following = documented().get((verb, phase))

    if following is not None:
        current.enter(verb)
        assert current.current is following
        return
    with pytest.raises(PhaseError, match=re.escape(f"{verb.value} was called where it cannot be: {phase.value}")):
        current.enter(verb)
    assert current.current is phase


def test_the_table_has_a_row_for_each_verb_and_a_way_out_of_each_phase_but_the_last() -> None:
    table = documented()

    assert {verb for verb, _ in table} == set(Verb)
    assert {phase for _, phase in table} == set(Phase) - {Phase.FAILED}
