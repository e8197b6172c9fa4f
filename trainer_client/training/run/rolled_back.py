"""The roll-backs of a job by operators, and the rule that says which steps a roll-back has given up.

A daemon records a roll-back (`paramserver-admin rollback`) under a random name, and each commit that a run makes later
names all roll-backs that the run knew. So a step is given up if it is above the step of a roll-back that its commit
does not name: this step was made before the roll-back. A store may still have it, because a replica or another node was
not rolled back with the job. No run resumes from a step that is given up, even if it is the newest one.

This module owns the comparison. It must never change what is stored.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TypeAlias

from trainer_client.client.store_client.reader import StoreReaderSync
from trainer_client.client.store_client.types import StoredLayout
from trainer_client.errors import ClientStateError
from trainer_client.training.run.stored_state import decode_stored

# Maps the name of each roll-back of a job to the step to which the job went back.
RollBacks: TypeAlias = Mapping[str, int]


def of_layouts(layouts: Iterable[StoredLayout]) -> dict[str, int]:
    """Return the roll-backs that a store has recorded for layouts of a job: by name, the step gone back to."""
    return {name: step for layout in layouts for name, step in layout.rolled_back.items()}


def of_states(states: Mapping[int, bytes]) -> RollBacks:
    """Return the roll-backs that a commit names in the client states of its ranks, which all name the same."""
    return of_state(next(iter(states.values()), b""))


def of_state(encoded: bytes) -> RollBacks:
    """Return the roll-backs that a commit names in its client state: none if no trainer has made the commit."""
    if not encoded:
        return {}
    try:
        found: RollBacks = decode_stored(encoded)["rolled_back"] or {}
    except ClientStateError:
        return {}
    return found


def of_step(reader: StoreReaderSync) -> RollBacks:
    """Return the roll-backs that the commit of a step names. It can raise StoreError."""
    ranks = reader.ranks
    return of_state(reader.client_state(ranks[0])) if ranks else {}


def went_back_to(known: RollBacks, step: int, made_after: Container[str]) -> int | None:
    """Return the step to which a roll-back went back that has given up `step`; None if no roll-back has given it up.

    If several roll-backs have given the step up, the lowest of their steps is returned.

    Args:
        known: the roll-backs of the job: for each name, the number of the step to which it went back.
        step: the number of the step that may be given up.
        made_after: the names of the roll-backs after which `step` was made. These have not given `step` up.
    """
    return min((to for name, to in known.items() if to < step and name not in made_after), default=None)
