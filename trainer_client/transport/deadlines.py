"""How long calls may take: the one place that knows what the daemon may make them wait.

A daemon makes a call wait for a quota, for room or for a device, as long as it was configured to, and says so in its
welcome. A deadline that is shorter than that gives up on what might be granted, and hides why it was not.
"""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.transport.channel import COMMIT_DEADLINE_SECONDS, CONTROL_DEADLINE_SECONDS, LEASE_DEADLINE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that calls may take.

    Attributes:
        control: calls that the daemon answers from memory, but for what it may wait for by itself.
        lease: calls that wait for bytes and updates, too.
        commit: calls that wait for the slowest rank.
    """

    control: float
    lease: float
    commit: float

    @classmethod
    def of(cls, welcome: pb.SessionResponse.Welcome) -> Deadlines:
        """Return those of a session: each is longer than what its daemon may make a call wait."""
        patience = patience_seconds(welcome)
        return cls(
            control=CONTROL_DEADLINE_SECONDS + patience,
            lease=LEASE_DEADLINE_SECONDS + patience,
            commit=COMMIT_DEADLINE_SECONDS + patience,
        )


def patience_seconds(welcome: pb.SessionResponse.Welcome) -> float:
    """Return how long the daemon may make one call wait; 0 for a daemon that does not say."""
    return welcome.patience_millis / 1000
