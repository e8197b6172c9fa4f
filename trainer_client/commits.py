"""The commits of a run: which one is newest, and the one under way.

Owns their numbers. A training step makes one commit, and so does a change of the states between two steps; the numbers
therefore count commits, and equal those of the steps until somebody changes states by hand.
"""

from __future__ import annotations

from trainer_client.link.channel import Pending
from trainer_client.link.rank_store import RankStore


class Commits:
    """Args:
    newest: the number of the newest commit; None for a new job, whose first is `next`.
    """

    def __init__(self, store: RankStore, newest: int | None = None) -> None:
        self.newest = newest
        self._store = store
        self._pending: Pending[bool] | None = None

    @property
    def next(self) -> int:
        """The number of the commit that is being prepared."""
        return 0 if self.newest is None else self.newest + 1

    def begin(self, client_state: bytes) -> None:
        """This rank's vote for the next commit, in which all that was handed over since the last one takes part.

        Every rank has committed the one before: all meet between two commits.
        """
        self.wait()
        settled = 0 if self.newest is None else self.newest
        self._pending = self._store.commit(self.next, client_state, settled)
        self.newest = self.next

    def wait(self) -> None:
        """Returns when the newest commit is there as the job's durability class says. Raises StoreError."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
