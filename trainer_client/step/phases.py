"""Where in a step the engine is, and which verb may follow: the only place that changes the phase.

[Note: the transitions]

| verb \\ phase   | IDLE      | INFERENCE | FORWARD  | BACKWARD | STEP | FAILED |
|----------------|-----------|-----------|----------|----------|------|--------|
| begin_forward  | FORWARD   |           | FORWARD  |          |      |        |
| begin_inference| INFERENCE |           | FORWARD  |          |      |        |
| end_inference  |           | IDLE      |          |          |      |        |
| fail_forward   |           | IDLE      | IDLE     |          |      |        |
| begin_backward | BACKWARD  |           | BACKWARD |          |      |        |
| end_backward   |           |           |          | IDLE     |      |        |
| fail_backward  |           |           |          | FAILED   |      |        |
| begin_step     | STEP      |           | STEP     |          |      |        |
| end_step       |           |           |          |          | IDLE |        |
| fail_change    | FAILED    |           |          |          |      |        |

An empty field is refused. An inference within FORWARD (an evaluation between a forward and its backward) leaves the
phase alone. Forwards within BACKWARD are recomputations and no verb: they belong to the backward pass. A forward that
fails leaves the phase that it began in: fail_forward is entered by one that began in IDLE.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from trainer_client.errors import PhaseError


class Phase(enum.Enum):
    """The value says why a verb may be refused, and what to do."""

    IDLE = "nothing is under way"
    """Between steps or micro-batches, or after an inference; no unit is in use."""

    INFERENCE = "a forward without gradients is under way: let it end first"
    """In a forward without gradients."""

    FORWARD = "a forward is under way, or its backward is to come"
    """In, or after, a forward with gradients; the root is in use."""

    BACKWARD = "a backward pass is under way: let engine.backward() return first"
    """In `engine.backward`; forwards that run now are recomputations."""

    STEP = "engine.step() is under way, or has failed: then restart the job, it resumes from the last commit"
    """In `engine.step`, at an accumulation boundary: the parameters are about to change."""

    FAILED = "a backward pass or a change of states has failed: restart the job, it resumes from the last commit"
    """A backward raised: the step's gradients are incomplete on this rank, and the step cannot be made any more. Or a
    change of states by hand raised half-way: some of it would become a part of the next commit. All leases are given
    back, and on several ranks the others are told."""


class Verb(enum.Enum):
    """The value is what the user sees of it."""

    BEGIN_FORWARD = "the model's forward"
    BEGIN_INFERENCE = "the model's forward (without gradients)"
    END_INFERENCE = "the end of an inference"
    FAIL_FORWARD = "the failure of a forward"
    BEGIN_BACKWARD = "engine.backward()"
    END_BACKWARD = "the end of a backward pass"
    FAIL_BACKWARD = "the failure of a backward pass"
    BEGIN_STEP = "engine.step()"
    END_STEP = "the end of a step"
    FAIL_CHANGE = "the failure of a change of states"


_TRANSITIONS: Mapping[tuple[Verb, Phase], Phase] = {
    (Verb.BEGIN_FORWARD, Phase.IDLE): Phase.FORWARD,
    (Verb.BEGIN_FORWARD, Phase.FORWARD): Phase.FORWARD,
    (Verb.BEGIN_INFERENCE, Phase.IDLE): Phase.INFERENCE,
    (Verb.BEGIN_INFERENCE, Phase.FORWARD): Phase.FORWARD,
    (Verb.END_INFERENCE, Phase.INFERENCE): Phase.IDLE,
    (Verb.FAIL_FORWARD, Phase.INFERENCE): Phase.IDLE,
    (Verb.FAIL_FORWARD, Phase.FORWARD): Phase.IDLE,
    (Verb.BEGIN_BACKWARD, Phase.IDLE): Phase.BACKWARD,
    (Verb.BEGIN_BACKWARD, Phase.FORWARD): Phase.BACKWARD,
    (Verb.END_BACKWARD, Phase.BACKWARD): Phase.IDLE,
    (Verb.FAIL_BACKWARD, Phase.BACKWARD): Phase.FAILED,
    (Verb.BEGIN_STEP, Phase.IDLE): Phase.STEP,
    (Verb.BEGIN_STEP, Phase.FORWARD): Phase.STEP,
    (Verb.END_STEP, Phase.STEP): Phase.IDLE,
    (Verb.FAIL_CHANGE, Phase.IDLE): Phase.FAILED,
}


class Phases:
    """The phase of one engine. Raises PhaseError where the table has no transition."""

    def __init__(self, entered: Callable[[str], None] = lambda _: None) -> None:
        """`entered` is told the name of each phase that is entered, in lower case."""
        self.current = Phase.IDLE
        self._entered = entered

    def enter(self, verb: Verb) -> None:
        following = _TRANSITIONS.get((verb, self.current))
        if following is None:
            raise PhaseError(f"{verb.value} was called where it cannot be: {self.current.value}")
        self.current = following
        self._entered(following.name.lower())
