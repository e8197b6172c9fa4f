"""The settlement, which finds out when a commit is on all nodes of a job.

Each store commits a step when its own ranks have voted. So the store of one node may commit a step that the store of
another node never commits, because a rank of that node was killed before its vote. A step is settled when the stores of
all ranks have committed it: from then on, the next run goes on from this step or a later one, no matter which ranks
die. This module owns the thread that finds out when a step is settled. The training must never wait for the thread,
unless commits wait for replicas.

[Note: settled steps] For each commit, in turn, the thread of each rank

1. waits until the rank's own store has the commit;
2. meets the threads of all other ranks, in a process group of their own. Then the step is settled;
3. tells the rank's store that the step is settled, if the rank speaks for the store. From then on readers get the
   step, and followers copy it;
4. if commits wait for replicas: waits for its store's replicas, and meets the other threads again.

The training goes on meanwhile. The training thread does not wait for other ranks to settle a commit, so
`engine.wait_for_commit()` may be called by one rank alone. If a rank dies, its connections break, and the threads of
all others fail with a CollectiveError. If a store misses the call of point 3, the next vote tells it the same
(`settled_step`), or the next run does, when it finds that all stores have the step. A store writes the settled step
into its catalog only with the next commit. After the last commit there is none, so the training thread has the store
write it at the end of the run. See tests/integration/test_settled_steps.py.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial

import grpc

from paramserver.contract.capabilities import SETTLED_STEPS
from trainer_client.base.log_context import carried
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import CollectiveError, StoreError, StoreUnavailableError
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.replicas import Followers

log = logging.getLogger(__name__)


class Settlement:
    """Settles the commits of one rank in a thread of its own, and lets other threads wait for that.

    Args:
        store: this rank's store.
        collectives: the collectives of this rank.
        replicas: the replicas of the store's part of the job, which only the rank that leads the store has.
        leads_store: whether this rank speaks for all ranks that use its store, so that it alone sends the store the
            settled steps.
        spans_nodes: whether the ranks of the job use several stores.

    If the ranks use one store and commits wait for no replicas, a commit is settled when the store has made it, and
    there is no thread. All ranks must make this object at the same time.

    Raises:
        StoreUnavailableError: the ranks use several stores, and a daemon of an earlier release cannot settle steps.
    """

    def __init__(
        self,
        store: RankStore,
        collectives: Collectives,
        replicas: Followers,
        *,
        leads_store: bool,
        spans_nodes: bool,
    ) -> None:
        self._store = store
        self._collectives = collectives
        self._replicas = replicas
        self._tells_store = leads_store and spans_nodes
        self._changed = threading.Condition()
        # The steps whose commits have begun and are not settled yet, oldest first.
        self._begun: deque[int] = deque()
        # Futures that are done when all commits that have begun are settled. They are cancelled if settling fails.
        self._awaited: list[Future[None]] = []
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not (spans_nodes or replicas.are_waited_for):
            return
        if spans_nodes:
            self._require_capability()
        collectives.process_groups.open_beside()
        self._thread = threading.Thread(target=carried(self._run), name="paramserver-settle", daemon=True)
        self._thread.start()

    def _require_capability(self) -> None:
        is_missing = SETTLED_STEPS not in self._store.capabilities
        (is_missing_somewhere,) = self._collectives.any_rank([is_missing], "the look at the daemons' releases")
        if is_missing_somewhere:
            whose = f"the store daemon at {self._store.address}" if is_missing else "the store daemon of another rank"
            raise StoreUnavailableError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{whose} is of an earlier release, which does not know when a step is on all nodes ({SETTLED_STEPS}): "
                "start this release of the daemon on all nodes of the job",
            )

    def begin(self, step: int) -> None:
        """Begin to settle a commit that this rank has voted for, or that all stores have at the start of the run.

        All ranks must call this for the same commits in the same order. It does not wait.
        """
        if self._thread is not None:
            with self._changed:
                self._begun.append(step)
                self._changed.notify_all()

    def note_made(self, step: int) -> None:
        """Record that this rank's store has made a commit. If all ranks use this store, the commit is settled now."""
        if self._thread is None:
            self._replicas.note_commit(step)

    def wait_for_replicas(self) -> None:
        """Wait until the replicas of all parts have the newest commit, if the job's durability asks for that.

        Raises:
            CollectiveError, StoreError: in the same cases as `wait`.
        """
        if self._replicas.are_waited_for:
            self.wait()

    def wait(self) -> None:
        """Wait until the newest commit is settled, and all replicas have it if commits wait for replicas.

        Call this after the rank's own store has made the commit. The other ranks need not call it.

        Raises:
            CollectiveError: another rank has gone, so it is not known whether that rank's store has the commit.
            StoreError: a store refused, or a replica does not have the commit in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._begun or self._failure is not None)
            if self._begun and self._failure is not None:
                raise self._failure

    def record(self, step: int) -> None:
        """Make this rank's store remember, even after a crash, that the run's last commit is settled.

        Call this when all ranks have met after their stores had made the commit. A failure of the call is only logged,
        because the next run settles the commit again.
        """
        if not self._tells_store:
            return
        try:
            self._store.steps.record_settled(step)
        except StoreError as error:
            log.warning(
                "the store at %s may show an earlier step than %d, the last one, until the job is started again: %s",
                self._store.address,
                step,
                error,
            )

    def awaited(self) -> Future[None]:
        """Return a future that is done when the newest commit is settled, and cancelled if it cannot be settled."""
        future = Future[None]()
        with self._changed:
            self._awaited.append(future)
            self._tell()
        return future

    @property
    def is_at_once(self) -> bool:
        """Whether a commit is settled as soon as this rank's store has made it, so that there is no thread."""
        return self._thread is None

    def abandon(self) -> None:
        """Settle nothing more, because this rank leaves the run. The next run finds out what all nodes have."""
        self._closing.set()
        self._replicas.stop_waiting()
        self._fail(
            CollectiveError(
                "it is not known whether all nodes have the newest commit, because this rank has left the run: restart "
                "the job, it resumes from the newest step that all of them have"
            )
        )

    def close(self) -> None:
        """End the thread that settles commits. Commits that are not settled yet stay so. Idempotent."""
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._settle(step)
                with self._changed:
                    self._begun.popleft()
                    self._tell()
        except Exception as error:
            # The settling threads of the other ranks must not wait for this thread, so it leaves their collectives.
            # Calls that wait for the commit must get the error, so it is recorded.
            self._collectives.process_groups.leave_beside()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Have present and later waits for commits that are not settled raise `error`, or the first such error."""
        with self._changed:
            self._failure = self._failure or error
            self._tell()

    def _tell(self) -> None:
        """Wake the threads that wait for the newest commit, and finish their futures. The caller must hold the lock."""
        self._changed.notify_all()
        while self._awaited and (not self._begun or self._failure is not None):
            future = self._awaited.pop()
            if self._begun:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                future.set_result(None)

    def _next(self) -> int | None:
        """Wait for a commit that is not settled yet, and return its number; None at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun or self._closing.is_set())
            return None if self._closing.is_set() else self._begun[0]

    def _settle(self, step: int) -> None:
        """Settle one commit: do the four points of [Note: settled steps] for it."""
        what = f"the settling of commit {step}"
        self._store.steps.wait_until_committed(step, self._check_open)
        self._collectives.process_groups.lowest_beside(step, what, self._check_open)
        if self._tells_store:
            self._store.steps.settle(step)
        self._replicas.note_commit(step)
        if self._replicas.are_waited_for:
            what += " at the replicas"
            # The holder of a replica may be the daemon of a node that is lost together with its rank. The loss of a
            # rank ends the run, so the wait for the replicas ends with an error when a rank is lost.
            self._replicas.wait(step, partial(self._collectives.process_groups.require_others, what, time.monotonic()))
            # When the run is being closed, the wait for the replicas returns early, although they may lack the step.
            # `_check_open` raises an error in that case, so the commit does not count as settled.
            self._check_open()
            self._collectives.process_groups.lowest_beside(step, what, self._check_open)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CollectiveError("the run has ended")
