"""What the journal has of the commit under way, and which verb may follow: the only place that changes the state.

[Note: the states of the journal]

| verb \\ state | IDLE    | KEEPING | LACKING       | VOTED | VOTED_LACKING |
|--------------|---------|---------|---------------|-------|---------------|
| note         | KEEPING | KEEPING | LACKING       |       |               |
| drop         | LACKING | LACKING | LACKING       |       |               |
| vote         | VOTED   | VOTED   | VOTED_LACKING |       |               |
| acknowledge  |         | IDLE    | IDLE          | IDLE  | IDLE          |

An empty field is refused: after its vote a rank hands nothing more over for the commit, and it waits for the commit
before it hands over anything for the next one. An acknowledgement without a vote comes from another rank's commit of
the same step, which the daemon shows after a restart. A journal that is not open keeps no entries, so only votes and
acknowledgements change its state.
"""

from __future__ import annotations

import enum

from paramserver.contract.transitions import Transitions


class JournalState(enum.Enum):
    """What a journal has of the commit under way; see [Note: the states of the journal]."""

    IDLE = enum.auto()
    """This rank has handed nothing over since the last acknowledged commit."""

    KEEPING = enum.auto()
    """The journal has all that this rank has handed over, so the next daemon can be given it."""

    LACKING = enum.auto()
    """Some bytes were handed over without a copy, so the run ends if the daemon is lost now."""

    VOTED = enum.auto()
    """As KEEPING, and this rank has voted for the commit."""

    VOTED_LACKING = enum.auto()
    """As LACKING, and this rank has voted for the commit."""

    @property
    def lacks_bytes(self) -> bool:
        """Whether bytes of the commit under way were handed over without a copy."""
        return self in (JournalState.LACKING, JournalState.VOTED_LACKING)


class JournalVerb(enum.Enum):
    """The events that change the state of a journal; see [Note: the states of the journal]."""

    NOTE = enum.auto()
    DROP = enum.auto()
    VOTE = enum.auto()
    ACKNOWLEDGE = enum.auto()


_TRANSITIONS = Transitions(
    {
        (JournalVerb.NOTE, JournalState.IDLE): JournalState.KEEPING,
        (JournalVerb.NOTE, JournalState.KEEPING): JournalState.KEEPING,
        (JournalVerb.NOTE, JournalState.LACKING): JournalState.LACKING,
        (JournalVerb.DROP, JournalState.IDLE): JournalState.LACKING,
        (JournalVerb.DROP, JournalState.KEEPING): JournalState.LACKING,
        (JournalVerb.DROP, JournalState.LACKING): JournalState.LACKING,
        (JournalVerb.VOTE, JournalState.IDLE): JournalState.VOTED,
        (JournalVerb.VOTE, JournalState.KEEPING): JournalState.VOTED,
        (JournalVerb.VOTE, JournalState.LACKING): JournalState.VOTED_LACKING,
        (JournalVerb.ACKNOWLEDGE, JournalState.KEEPING): JournalState.IDLE,
        (JournalVerb.ACKNOWLEDGE, JournalState.LACKING): JournalState.IDLE,
        (JournalVerb.ACKNOWLEDGE, JournalState.VOTED): JournalState.IDLE,
        (JournalVerb.ACKNOWLEDGE, JournalState.VOTED_LACKING): JournalState.IDLE,
    },
    lambda state, verb: RuntimeError(f"a journal that is {state.name} cannot {verb.name}"),
)


def following(state: JournalState, verb: JournalVerb) -> JournalState:
    """Return the state that follows `state` by `verb`. Raise RuntimeError if the verb is refused in this state."""
    return _TRANSITIONS.following(state, verb)
