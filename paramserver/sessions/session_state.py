"""The states of a session at the daemon, and which verb may follow: the only place that changes the state.

[Note: the transitions]

| verb \\ state | ATTACHED | DETACHED | ENDED |
|--------------|----------|----------|-------|
| take_up      | ATTACHED | ATTACHED |       |
| detach       | DETACHED |          |       |
| end          | ENDED    | ENDED    |       |

A verb is refused in the states where its field is empty. `take_up` in ATTACHED replaces a stream whose connection is
dead without the daemon's knowledge. docs/silence.md says how long a client may be silent in each state.
"""

from __future__ import annotations

import enum

from paramserver.contract.transitions import Transitions
from storage.base.errors import NotFoundError


class SessionState(enum.Enum):
    """The states of a session. A session has its leases and readers in each state but the last."""

    ATTACHED = enum.auto()
    """The session's stream is open. The session ends when no heartbeat comes for the heartbeat time-out."""

    DETACHED = enum.auto()
    """The session's stream broke. The session ends unless its client takes it up within the grace time."""

    ENDED = enum.auto()
    """The session has lost its leases and readers, and no call can use it. Its client may begin another session."""

    @property
    def has_leases(self) -> bool:
        """Whether a session in this state keeps its leases and readers, and remains a rank of its run."""
        return self is not SessionState.ENDED


class SessionVerb(enum.Enum):
    """The verbs that change a session's state. The value of each is its name in errors."""

    TAKE_UP = "be taken up"
    DETACH = "be detached"
    END = "end"


_TRANSITIONS = Transitions(
    {
        (SessionVerb.TAKE_UP, SessionState.ATTACHED): SessionState.ATTACHED,
        (SessionVerb.TAKE_UP, SessionState.DETACHED): SessionState.ATTACHED,
        (SessionVerb.DETACH, SessionState.ATTACHED): SessionState.DETACHED,
        (SessionVerb.END, SessionState.ATTACHED): SessionState.ENDED,
        (SessionVerb.END, SessionState.DETACHED): SessionState.ENDED,
    },
    lambda state, verb: NotFoundError(f"a session that is {state.name.lower()} cannot {verb.value}; open a new one"),
)


def following(state: SessionState, verb: SessionVerb) -> SessionState:
    """Return the state that follows `state` by `verb`. Raise NotFoundError if the verb is refused in this state."""
    return _TRANSITIONS.following(state, verb)
