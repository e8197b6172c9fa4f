"""The commits of a run: the newest one, the one under way, and the rule that says which steps are committed.

This module owns the numbers of the commits. A training step makes one commit, and so does a change of the states
between two steps. The number of a commit therefore equals that of its step only until the user changes states between
steps.

[Note: states on the device] A commit always has the states of one whole step. If an update changes any bytes in the
store, each step is committed, and the commit includes the states that are newer on the device. If all changing states
live on the device, only as many steps are committed as the durability class requires: each (`step`), every N-th
(`snapshot:N`), or none after the first commit (`none`). With `snapshot:N` the numbers are then multiples of N, because
the store makes those commits durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from paramserver.contract.durability import durable_every_steps, parse_durability
from trainer_client.base.lanes.lanes import Lanes
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import StoreError
from trainer_client.training.model.large_buffers import LargeBuffers
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.run.settlement import Settlement


class Commits:
    """The commits of a run, as one rank makes them.

    Attributes:
        newest: number of the newest commit that was begun; None for a new job.
        is_behind: whether a step was made that the newest commit does not have.

    Args:
        store: this rank's store.
        states: the states of all groups.
        buffers: the large buffers of this rank's model.
        lanes: the copies between this rank's host memory and its device.
        durability: the config's value: `step`, `snapshot:N` or `none`.
        newest: number of the newest commit; None for a new job.
        handed_over: number of the first commit, if states are handed over for it already; None: they are not.
        settlement: finds out when all nodes have a commit.
    """

    def __init__(
        self,
        store: RankStore,
        states: Sequence[PlacedStates],
        buffers: LargeBuffers,
        lanes: Lanes,
        durability: str,
        *,
        newest: int | None,
        handed_over: int | None,
        settlement: Settlement,
    ) -> None:
        self.newest = newest
        self._settlement = settlement
        self._handed_over = handed_over
        self._store = store
        self._states = states
        self._buffers = buffers
        self._lanes = lanes
        # Whether the store is given gradients in a backward pass, with which it prepares the next step.
        self._prepares_steps = any(state.gives_gradients for state in states)
        self._pending: Pending[None] | None = None
        # Whether the vote for the newest commit is given while the trainer goes on.
        self._votes_later = False
        # The number of steps from one commit to the next; 0 if steps are not committed.
        self._interval = 1
        if not any(state.is_in_store for state in states):
            self._interval = durable_every_steps(parse_durability(durability))
        # Until the first commit there is one version only, so reads need no step filter.
        if newest is not None and handed_over is None:
            store.read_as_of(newest)
            # All stores were found to have this commit, although the former run may have ended before it was settled.
            settlement.begin(newest)
        # The client state of the last step, or of the last change of states after it; None if it was not encoded.
        self._of_last_step: bytes | None = None
        # Whether a step was made that the newest commit does not have.
        self.is_behind = False
        # The next commit begins after these calls. The futures are those of threads that wait for the newest commit.
        self._holds: list[Callable[[], None]] = []
        self._awaited: list[Future[None]] = []

    @property
    def next(self) -> int:
        """The number of the commit that is being prepared."""
        if self._handed_over is not None:
            return self._handed_over
        if self.newest is None:
            return 0
        stride = max(self._interval, 1)
        return (self.newest // stride + 1) * stride

    @property
    def state_of_last_step(self) -> bytes | None:
        """The client state at the end of the last step; None if steps are not committed: it is not encoded then."""
        return self._of_last_step

    @property
    def commits_steps(self) -> bool:
        """Whether steps are committed at all."""
        return self._interval > 0

    def note_state(self, client_state: bytes) -> None:
        """Store the client state with which the run resumes. A commit of an earlier run had it."""
        self._of_last_step = client_state

    def end_step(self, step: int, client_state: Callable[[], bytes]) -> None:
        """Begin the commit of the job's training step `step`, if one is due.

        Otherwise keep its client state for `commit_last_step`.
        """
        self.is_behind = True
        self._of_last_step = None
        if self._interval == 0:
            return
        self._of_last_step = client_state()
        if step % self._interval == 0:
            self.begin(self._of_last_step)

    def commit_last_step(self) -> None:
        """Commit the run's last step, if it was not yet due for a commit; do nothing if steps are never committed."""
        if self.is_behind and self._of_last_step is not None:
            self.begin(self._of_last_step)

    def begin(self, client_state: bytes) -> None:
        """Hand over the states that are newer on the device, and vote for the next commit.

        It does not wait for that commit. On an accelerator, the states are copied and the vote is given while the
        caller goes on; see states.py [Note: values that are copied later].

        The commit includes all states that this rank has handed over since the last commit. The vote reports the last
        commit as settled: all ranks have it, because they meet between two commits. If commits wait for replicas, all
        replicas have it, too: a store deletes the step before the settled one.
        """
        self.wait()
        self._settlement.wait_for_replicas()
        while self._holds:
            self._holds.pop(0)()
        settled = 0 if self.newest is None else self.newest
        self._buffers.flush(self.next)
        later = [values for state in self._states if (values := state.flush(self.next)) is not None]
        self._votes_later = bool(later)
        copying = self._lanes.beside().copying if later else None
        self._pending = self._store.commit(
            self.next, client_state, settled, later, copying, wait_for_copies=self._lanes.finish
        )
        self.newest, self._handed_over = self.next, None
        self._settlement.begin(self.newest)
        self._of_last_step = client_state
        self.is_behind = False

    def abandon(self) -> None:
        """Abandon the commit under way, because the session with the store is about to end."""
        self._pending = None
        self._settlement.abandon()
        while self._awaited:
            self._awaited.pop().cancel()

    def hold_next(self, hold: Callable[[], None]) -> None:
        """Have the next commit begin only after `hold` has returned.

        The store may delete the newest commit as soon as the next one is made. A reader that is about to be opened at
        the newest commit needs this.
        """
        self._holds.append(hold)

    def answered(self) -> Future[None]:
        """Return a future that is done when the newest commit is answered everywhere, and cancelled if it is abandoned.

        Another thread may wait for it while this rank goes on. It does not say whether the commit has succeeded.
        """
        if not self._settlement.is_at_once:
            return self._settlement.awaited()
        future = Future[None]()
        if self._pending is None:
            future.set_result(None)
        else:
            self._awaited = [waiting for waiting in self._awaited if not waiting.done()] + [future]
            self._pending.when_answered(lambda: _finish(future))
        return future

    def make_way(self, *, for_updates: bool) -> None:
        """Wait for the newest commit, if a backward pass of the next step must not begin before it is made.

        The store prepares one step at a time, so updates wait for it. Every pass asks for the memory of gradients, of
        which the store gives a rank one lease each, and the vote for a step ends those of that step. If the vote comes
        later, it might come after the pass has asked; otherwise it was given before the forward.

        Args:
            for_updates: whether the store may be given gradients for updates in the pass.

        Raises:
            StoreError: the commit has failed.
        """
        if self._prepares_steps and (for_updates or self._votes_later):
            self.wait()

    def wait(self) -> None:
        """Wait until this rank's store has made the newest commit, as durable as its durability class requires.

        It can raise StoreError.
        """
        if self._pending is not None:
            assert self.newest is not None, "a pending commit has a number"
            try:
                self._pending.wait()
                self._settlement.note_made(self.newest)
            except StoreError:
                self._pending = None
                raise
            # `_pending` is cleared only now, because after an interrupted wait the next call waits for the same commit.
            self._pending = None

    def record_settled(self) -> None:
        """Have this rank's store know after a crash, too, that all nodes have the newest commit.

        Call this at the end of a run, when all ranks have met after `wait`.
        """
        if self.newest is not None:
            self._settlement.record(self.newest)

    def wait_until_settled(self) -> None:
        """Wait until all nodes have the newest commit, and all replicas that commits wait for.

        The other ranks need not call this.

        Raises:
            StoreError: the commit has failed, or a replica does not have it in time.
            CollectiveError: another rank has gone, so it is not known whether it has the commit.
        """
        self.wait()
        self._settlement.wait()


def _finish(future: Future[None]) -> None:
    """Complete a future, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)
