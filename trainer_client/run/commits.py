"""The commits of a run: which one is newest, the one under way, and which steps make one.

Owns their numbers. A training step makes one commit, and so does a change of the states between two steps; the numbers
therefore count commits, and equal those of the steps until somebody changes states by hand.

[Note: states on the device] A commit is a whole step. As soon as one flat group has a kind in the store that updates
change, each step is committed, and carries what the groups that live on the device have newer. Where no group has, the
store needs to see a step only as often as the durability class promises: each, every N-th, or none after the first.
Numbers are then multiples of N, so that the store makes each of these commits durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.contract.durability import durable_every_steps, parse_durability
from trainer_client.errors import StoreError
from trainer_client.model.states import PlacedStates
from trainer_client.transport.channel import Pending
from trainer_client.transport.rank_store import RankStore


class Commits:
    """Args:
    states: of all groups.
    durability: the config's: `step`, `snapshot:N` or `none`.
    newest: the number of the newest commit; None for a new job.
    staged: the number that the first commit must have, where states are staged for it.
    """

    def __init__(
        self,
        store: RankStore,
        states: Sequence[PlacedStates],
        durability: str,
        *,
        newest: int | None,
        staged: int | None,
    ) -> None:
        self.newest = newest
        self._staged = staged
        self._store = store
        self._states = states
        self._pending: Pending[None] | None = None
        # Steps from one commit to the next; 0: steps make none.
        self._interval = 1
        if not any(state.is_in_store for state in states):
            self._interval = durable_every_steps(parse_durability(durability))
        # While the first commit is being filled there is nothing that it could be told from.
        store.as_of_step = newest if staged is None else None
        self._kept: bytes | None = None  # the client state of the last step, while no commit carries it

    @property
    def next(self) -> int:
        """The number of the commit that is being prepared."""
        if self._staged is not None:
            return self._staged
        if self.newest is None:
            return 0
        stride = max(self._interval, 1)
        return (self.newest // stride + 1) * stride

    def end_step(self, step: int, client_state: Callable[[], bytes]) -> None:
        """The job's `step`-th training step is made: begins its commit, or keeps for `settle` what it would carry."""
        if self._interval == 0:
            return
        self._kept = client_state()
        if step % self._interval == 0:
            self.begin(self._kept)

    def settle(self) -> None:
        """Before the run ends well: commits the last step, if it is not, and its durability class wants any."""
        if self._kept is not None:
            self.begin(self._kept)

    def begin(self, client_state: bytes) -> None:
        """This rank's vote for the next commit, in which all takes part that was handed over since the last one, or is
        newer on the device.

        Every rank has committed the one before: all meet between two commits.
        """
        self.wait()
        settled = 0 if self.newest is None else self.newest
        for state in self._states:
            state.flush(self.next)
        self._pending = self._store.commit(self.next, client_state, settled)
        self.newest, self._staged = self.next, None
        self._store.as_of_step = self.newest
        self._kept = None

    def abandon(self) -> None:
        """Wait for no commit any more, because the session with the store is about to end."""
        self._pending = None

    def wait(self) -> None:
        """Returns when the newest commit is there as the job's durability class says. Raises StoreError."""
        if self._pending is not None:
            try:
                self._pending.wait()
            except StoreError:
                self._pending = None
                raise
            # Not before: where the wait was interrupted, the next one has to wait for the same commit.
            self._pending = None
