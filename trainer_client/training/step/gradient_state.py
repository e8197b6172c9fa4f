"""Where the gradient of a flat group is within a step, and which verb may follow: the only place that changes it.

[Note: the states of a gradient]

| verb \\ state | EMPTY  | WHOLE  | SUMMED | MIXED  | SENT   |
|--------------|--------|--------|--------|--------|--------|
| keep_whole   | WHOLE  | WHOLE  | MIXED  | MIXED  |        |
| add_up       | SUMMED | SUMMED | SUMMED | SUMMED |        |
| send         | SENT   |        | SENT   |        |        |
| withdraw     | EMPTY  | WHOLE  | SUMMED | MIXED  | SUMMED |
| finish       | EMPTY  | EMPTY  | EMPTY  | EMPTY  | EMPTY  |

An empty field is refused. A gradient that was sent is withdrawn before it changes, so SENT refuses `keep_whole` and
`add_up`. On an accelerator the norms of a group without a gradient are sent, too, so `send` follows EMPTY.
"""

from __future__ import annotations

import enum

from paramserver.contract.transitions import Transitions


class GradientState(enum.Enum):
    """What this rank has of a flat group's gradient of the step."""

    EMPTY = enum.auto()
    """No gradient has come in this step, and the memory of this rank's part is uninitialised."""

    WHOLE = enum.auto()
    """This rank has whole gradients that were not reduced over the ranks yet. A single rank is never in this state."""

    SUMMED = enum.auto()
    """This rank's part has the sum of all gradients that have come, over all ranks."""

    MIXED = enum.auto()
    """As SUMMED, and this rank has whole gradients besides, which came after the last reduction."""

    SENT = enum.auto()
    """The gradient is complete, and it and its norms are at their homes, or on their way there."""

    @property
    def has_whole(self) -> bool:
        """Whether this rank has gradients that are not yet added up over the ranks."""
        return self in (GradientState.WHOLE, GradientState.MIXED)

    @property
    def has_sum(self) -> bool:
        """Whether this rank's part has a sum of gradients of this step."""
        return self in (GradientState.SUMMED, GradientState.MIXED, GradientState.SENT)


class GradientVerb(enum.Enum):
    """The events that change the state of a gradient; see [Note: the states of a gradient]."""

    KEEP_WHOLE = enum.auto()
    ADD_UP = enum.auto()
    SEND = enum.auto()
    WITHDRAW = enum.auto()
    FINISH = enum.auto()


_NOT_SENT = (GradientState.EMPTY, GradientState.WHOLE, GradientState.SUMMED, GradientState.MIXED)
_TRANSITIONS = Transitions(
    {
        (GradientVerb.KEEP_WHOLE, GradientState.EMPTY): GradientState.WHOLE,
        (GradientVerb.KEEP_WHOLE, GradientState.WHOLE): GradientState.WHOLE,
        (GradientVerb.KEEP_WHOLE, GradientState.SUMMED): GradientState.MIXED,
        (GradientVerb.KEEP_WHOLE, GradientState.MIXED): GradientState.MIXED,
        **{(GradientVerb.ADD_UP, state): GradientState.SUMMED for state in _NOT_SENT},
        (GradientVerb.SEND, GradientState.EMPTY): GradientState.SENT,
        (GradientVerb.SEND, GradientState.SUMMED): GradientState.SENT,
        **{(GradientVerb.WITHDRAW, state): state for state in _NOT_SENT},
        (GradientVerb.WITHDRAW, GradientState.SENT): GradientState.SUMMED,
        **{(GradientVerb.FINISH, state): GradientState.EMPTY for state in GradientState},
    },
    lambda state, verb: RuntimeError(f"a gradient that is {state.name} cannot {verb.name}"),
)


def following(state: GradientState, verb: GradientVerb) -> GradientState:
    """Return the state that follows `state` by `verb`. Raise RuntimeError if the verb is refused in this state."""
    return _TRANSITIONS.following(state, verb)
