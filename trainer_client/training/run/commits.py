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
    """Makes the commits of a run on one rank: hands over states, votes, and waits for the store's answer.

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
        handed_over: number of the first commit, if states are handed over for this commit already; None: no states
            are.
        settlement: finds out when the stores of all nodes have a commit.
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
        # Whether this rank gives gradients to the store during backward passes. If so, the store prepares the next step
        # with them before that step's commit, so this rank may have to wait for the newest commit first.
        self._prepares_steps = any(state.gives_gradients for state in states)
        self._pending: Pending[None] | None = None
        # Whether the trainer goes on while this rank waits to vote for the newest commit.
        self._votes_later = False
        # The number of steps from one commit to the next; 0 if steps are never committed. If the store holds no state,
        # all states are on the device, and commits are made only as often as the durability asks for.
        self._interval = 1
        if not any(state.is_in_store for state in states):
            self._interval = durable_every_steps(parse_durability(durability))
        # A new job or a new layout has only one version of each slab until its first commit, so its reads need not name
        # a step. In all other cases the reads name the step from which the run resumes.
        if newest is not None and handed_over is None:
            store.leases.read_as_of(newest)
            # All stores have the commit from which this run resumes, but the former run may have ended before the
            # commit was settled. So this run settles it.
            settlement.begin(newest)
        # The encoded client state of the last step, or of a later change of states. None if it was not encoded.
        self._of_last_step: bytes | None = None
        # Whether the trainer has made a step that is not in the newest commit.
        self.is_behind = False
        # `_holds`: calls that must return before the next commit begins. `_awaited`: the futures that `answered` has
        # returned, which are done when the store has answered the newest commit.
        self._holds: list[Callable[[], None]] = []
        self._awaited: list[Future[None]] = []

    @property
    def next(self) -> int:
        """The number of the next commit, for which this rank hands over states now."""
        if self._handed_over is not None:
            return self._handed_over
        if self.newest is None:
            return 0
        stride = max(self._interval, 1)
        return (self.newest // stride + 1) * stride

    @property
    def state_of_last_step(self) -> bytes | None:
        """The client state at the end of the last step; None if steps are never committed, because none is encoded."""
        return self._of_last_step

    @property
    def commits_steps(self) -> bool:
        """Whether training steps are committed. False if durability is `none` and no update changes stored bytes."""
        return self._interval > 0

    def note_state(self, client_state: bytes) -> None:
        """Keep the client state of the commit from which the run resumes, as that of the last step."""
        self._of_last_step = client_state

    def end_step(self, step: int, client_state: Callable[[], bytes]) -> None:
        """Begin the commit of the job's training step `step`, if one is due.

        If no commit is due yet, keep the step's client state for `commit_last_step`.
        """
        self.is_behind = True
        self._of_last_step = None
        if self._interval == 0:
            return
        self._of_last_step = client_state()
        if step % self._interval == 0:
            self.begin(self._of_last_step)

    def commit_last_step(self) -> None:
        """Commit the run's last step, if no commit has it yet. Do nothing if steps are never committed."""
        if self.is_behind and self._of_last_step is not None:
            self.begin(self._of_last_step)

    def begin(self, client_state: bytes) -> None:
        """Hand over the states that are newer on the device, and vote for the next commit.

        It does not wait for that commit. On an accelerator, the states are copied and the vote is given while the
        caller goes on; see states.py [Note: values that are copied later].

        The commit includes all states that this rank has handed over since the last commit. The vote tells the store
        that the last commit is settled. That is true, because all ranks meet between two commits, and if commits wait
        for replicas, this call has waited until all replicas have it. The store may then delete the step before the
        settled one.
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
        self._pending = self._store.steps.commit(
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

        The store may delete the newest commit as soon as the next one is made. So a caller that is about to open a
        reader of the newest commit holds the next one back until the reader is open.
        """
        self._holds.append(hold)

    def answered(self) -> Future[None]:
        """Return a future that is done when all nodes have answered the newest commit, or cancelled if it is abandoned.

        Another thread may wait for the future while this rank goes on. The future does not say whether the commit has
        succeeded.
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
        """Wait for the newest commit if a backward pass of the next step must not begin before that commit is made.

        There are two reasons to wait. The store prepares one step at a time, so it takes no updates of the next step
        before the commit. And a rank has one lease for each gradient, which ends with the vote for the step. A vote
        that is given while the trainer goes on might come only after the pass has asked for these leases again. All
        other votes were given before the forward.

        Args:
            for_updates: whether the store may get gradients in the pass, so that it begins updates of the next step.

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
            # `_pending` is set to None only after the wait. If the wait is interrupted, for example by Ctrl-C, the next
            # call waits for the same commit.
            self._pending = None

    def record_settled(self) -> None:
        """Make this rank's store remember, even after a crash, that all nodes have the newest commit.

        Call this at the end of a run, when all ranks have met after `wait`.
        """
        if self.newest is not None:
            self._settlement.record(self.newest)

    def wait_until_settled(self) -> None:
        """Wait until all nodes have the newest commit, and so have all replicas if commits wait for replicas.

        The other ranks need not call this.

        Raises:
            StoreError: the commit has failed, or a replica does not have it in time.
            CollectiveError: another rank has gone, so it is not known whether that rank's store has the commit.
        """
        self.wait()
        self._settlement.wait()


def _finish(future: Future[None]) -> None:
    """Set the result of a future to None, unless the future was cancelled."""
    if future.set_running_or_notify_cancel():
        future.set_result(None)
