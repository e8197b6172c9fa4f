"""Where in a step the engine is, and which verb may follow: the only place that changes the phase.

[Note: the transitions]

| verb \\ phase   | IDLE      | INFERENCE | FORWARD  | BACKWARD | STEP | OFFLOADED | FAILED |
|----------------|-----------|-----------|----------|----------|------|-----------|--------|
| begin_forward  | FORWARD   |           | FORWARD  |          |      |           |        |
| begin_inference| INFERENCE |           | FORWARD  |          |      |           |        |
| end_inference  |           | IDLE      |          |          |      |           |        |
| fail_forward   |           | IDLE      | IDLE     |          |      |           |        |
| begin_backward | BACKWARD  |           | BACKWARD |          |      |           |        |
| end_backward   |           |           |          | IDLE     |      |           |        |
| fail_backward  |           |           |          | FAILED   |      |           |        |
| begin_step     | STEP      |           | STEP     |          |      |           |        |
| end_step       |           |           |          |          | IDLE |           |        |
| offload        | OFFLOADED |           |          |          |      | OFFLOADED |        |
| reload         |           |           |          |          |      | IDLE      |        |
| fail_change    | FAILED    |           | FAILED   |          |      |           |        |

An empty field means that the verb is refused in that phase. An inference within FORWARD (an evaluation between a
forward and its backward) does not change the phase. Forwards within BACKWARD are recomputations, which belong to the
backward pass and have no verb. A forward that fails restores the phase that it began in, so only one that began in IDLE
enters fail_forward.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from paramserver.contract.transitions import Transitions
from trainer_client.errors import PhaseError


class Phase(enum.Enum):
    """The phases of an engine. The value of each is the text of an error: why a verb is refused, and what to do."""

    IDLE = "nothing is under way"
    """The engine is between steps or micro-batches, or after an inference. No unit is in use."""

    INFERENCE = "a forward without gradients is under way: let it end first"
    """The engine is in a forward without gradients."""

    FORWARD = "a forward is under way, or its backward is to come"
    """The engine is in, or after, a forward with gradients. The root is in use."""

    BACKWARD = "a backward pass is under way: let backward() return first"
    """The engine is in `engine.backward`, or autograd in the user's `loss.backward()`. Forwards that run now are
    recomputations."""

    STEP = "engine.step() is under way, or has failed: then restart the job, it resumes from the last commit"
    """The engine is in `engine.step`, at an accumulation boundary: the parameters are about to change."""

    OFFLOADED = "states are in host memory: call engine.reload_states() first"
    """`engine.offload_states` has moved states off the device, so nothing can be computed with them."""

    FAILED = "a backward pass or a change of states has failed: restart the job, it resumes from the last commit"
    """A backward has raised, so the step's gradients are incomplete on this rank, and the step cannot be made any more.
    Or a change of states by hand has raised half-way, so that a part of it would go into the next commit. All leases
    are released, and with several ranks this rank has told the other ranks."""


class Verb(enum.Enum):
    """The verbs that lead from one phase to another. The value of each is the name of the call in errors."""

    BEGIN_FORWARD = "the model's forward"
    BEGIN_INFERENCE = "the model's forward (without gradients)"
    END_INFERENCE = "the end of an inference"
    FAIL_FORWARD = "the failure of a forward"
    BEGIN_BACKWARD = "backward()"
    END_BACKWARD = "the end of a backward pass"
    FAIL_BACKWARD = "the failure of a backward pass"
    BEGIN_STEP = "engine.step()"
    END_STEP = "the end of a step"
    OFFLOAD = "offload_states()"
    RELOAD = "reload_states()"
    FAIL_CHANGE = "the failure of a change of states"


_TRANSITIONS = Transitions(
    {
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
        (Verb.OFFLOAD, Phase.IDLE): Phase.OFFLOADED,
        (Verb.OFFLOAD, Phase.OFFLOADED): Phase.OFFLOADED,
        (Verb.RELOAD, Phase.OFFLOADED): Phase.IDLE,
        (Verb.FAIL_CHANGE, Phase.IDLE): Phase.FAILED,
        (Verb.FAIL_CHANGE, Phase.FORWARD): Phase.FAILED,
    },
    lambda phase, verb: PhaseError(f"{verb.value} was called where it cannot be: {phase.value}"),
)


class Phases:
    """The phase of one engine. The hooks change it by verbs, and a verb that the phase does not allow is an error."""

    def __init__(self, entered: Callable[[str], None] = lambda _: None) -> None:
        """Begin in the phase IDLE.

        Args:
            entered: called with the name of each phase that is entered, in lower case.
        """
        self.current = Phase.IDLE
        self._entered = entered

    def enter(self, verb: Verb) -> None:
        """Enter the phase that follows the present one by `verb`. Raise PhaseError if there is none."""
        self.current = self.check(verb)
        self._entered(self.current.name.lower())

    def check(self, verb: Verb) -> Phase:
        """Return the phase that follows the present one by `verb`. Raise PhaseError if there is none."""
        return _TRANSITIONS.following(self.current, verb)
