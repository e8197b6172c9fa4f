"""The states of a session at its client, and which verb may follow: the only place that changes the state.

[Note: the transitions]

| verb \\ state | OPENING  | ATTACHED | BROKEN   | ENDED | LOST | CLOSED |
|--------------|----------|----------|----------|-------|------|--------|
| attach       | ATTACHED |          | ATTACHED |       |      | CLOSED |
| detach       |          | BROKEN   |          |       |      | CLOSED |
| end          | LOST     | ENDED    | ENDED    |       |      | CLOSED |
| lose         | LOST     | LOST     | LOST     |       |      | CLOSED |
| close        | CLOSED   | CLOSED   | CLOSED   | ENDED | LOST | CLOSED |

An empty field is refused. The session's own thread makes all transitions but `close`, which any thread may make, so
nothing changes a session that is closed. ENDED and LOST are two states because different data is left. After ENDED, the
daemon still has all that the client had not left half-way. After LOST, the next daemon has what it finds on its disks.
docs/silence.md says after how long a session gets into each state.
"""

from __future__ import annotations

import enum

from paramserver.contract.transitions import Transitions


class SessionState(enum.Enum):
    """The states of a session, as its client knows them; see [Note: the transitions]."""

    OPENING = enum.auto()
    """The daemon has not sent its Welcome yet."""

    ATTACHED = enum.auto()
    """Calls can be made."""

    BROKEN = enum.auto()
    """The stream broke, and the session's thread tries to resume it. Leases are valid, but calls would fail."""

    ENDED = enum.auto()
    """The daemon is there, and has ended the session: all leases are void. Another session with it may go on."""

    LOST = enum.auto()
    """The session has ended with its daemon, or the daemon refuses it: all leases are void."""

    CLOSED = enum.auto()
    """This client has left the session."""

    @property
    def is_over(self) -> bool:
        """Whether no call of the session can succeed any more."""
        return self in (SessionState.ENDED, SessionState.LOST, SessionState.CLOSED)


class SessionVerb(enum.Enum):
    """The events that lead a session from one state to another; see [Note: the transitions]."""

    ATTACH = enum.auto()
    DETACH = enum.auto()
    END = enum.auto()
    LOSE = enum.auto()
    CLOSE = enum.auto()


_TRANSITIONS = Transitions(
    {
        (SessionVerb.ATTACH, SessionState.OPENING): SessionState.ATTACHED,
        (SessionVerb.ATTACH, SessionState.BROKEN): SessionState.ATTACHED,
        (SessionVerb.DETACH, SessionState.ATTACHED): SessionState.BROKEN,
        (SessionVerb.END, SessionState.OPENING): SessionState.LOST,
        (SessionVerb.END, SessionState.ATTACHED): SessionState.ENDED,
        (SessionVerb.END, SessionState.BROKEN): SessionState.ENDED,
        (SessionVerb.LOSE, SessionState.OPENING): SessionState.LOST,
        (SessionVerb.LOSE, SessionState.ATTACHED): SessionState.LOST,
        (SessionVerb.LOSE, SessionState.BROKEN): SessionState.LOST,
        (SessionVerb.CLOSE, SessionState.OPENING): SessionState.CLOSED,
        (SessionVerb.CLOSE, SessionState.ATTACHED): SessionState.CLOSED,
        (SessionVerb.CLOSE, SessionState.BROKEN): SessionState.CLOSED,
        (SessionVerb.CLOSE, SessionState.ENDED): SessionState.ENDED,
        (SessionVerb.CLOSE, SessionState.LOST): SessionState.LOST,
        **{(verb, SessionState.CLOSED): SessionState.CLOSED for verb in SessionVerb},
    },
    lambda state, verb: RuntimeError(f"a session that is {state.name} cannot {verb.name}"),
)


def following(state: SessionState, verb: SessionVerb) -> SessionState:
    """Return the state that follows `state` by `verb`. Raise RuntimeError if the verb is refused in this state."""
    return _TRANSITIONS.following(state, verb)
