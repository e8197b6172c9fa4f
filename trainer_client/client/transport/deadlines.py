"""The deadlines of calls to the store daemon.

The daemon lets a call wait for a quota, for room or for a device. Its config says how long at most, and its Welcome
message tells the client. A client's deadline must be longer than this wait: otherwise the client gives up on a call
that might still succeed, and does not see the daemon's own error, which names the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.channel import (
    COMMIT_DEADLINE_SECONDS,
    CONTROL_DEADLINE_SECONDS,
    LEASE_DEADLINE_SECONDS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Deadlines in seconds, one for each class of calls.

    Attributes:
        control: calls that the daemon answers from memory, after the wait for quota, room or device.
        lease: calls that also wait for bytes or for an optimizer update.
        commit: calls that wait for the slowest rank.
    """

    control: float
    lease: float
    commit: float

    @classmethod
    def of(cls, welcome: pb.SessionResponse.Welcome) -> Deadlines:
        """Return the deadlines of the session that `welcome` opened; each exceeds the daemon's longest own wait."""
        patience = patience_seconds(welcome)
        return cls(
            control=CONTROL_DEADLINE_SECONDS + patience,
            lease=LEASE_DEADLINE_SECONDS + patience,
            commit=COMMIT_DEADLINE_SECONDS + patience,
        )


def patience_seconds(welcome: pb.SessionResponse.Welcome) -> float:
    """Return how many seconds the daemon may let one call wait; 0 if its Welcome message does not say."""
    return welcome.patience_millis / 1000
