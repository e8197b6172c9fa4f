"""The settlement, which finds out when a commit is on all nodes of a job.

Each store commits a step when its own ranks have voted, so a commit of one node may never come to another one, whose
rank was killed before its vote. A step is settled when every rank, on every node, has the commit: whichever ranks die
then, the next run goes on from it or from a later one. This module owns the thread that finds that out, and must never
make the training wait for it, unless commits wait for replicas.

[Note: settled steps] For each commit, in turn, the thread of each rank

1. waits until the rank's own store has the commit;
2. meets the threads of all other ranks, in a process group of their own. Then the step is settled;
3. tells the rank's store so, if the rank speaks for the store. From then on readers get the step, and followers copy
   it;
4. if commits wait for replicas: waits for its store's replicas, and meets the other threads again.

The training goes on meanwhile. It waits for no other rank in this, so `engine.wait_for_commit()` may be called by one
rank alone. If a rank dies, its connections break, and the threads of all others fail with a CollectiveError. A store
that misses step 3 gets the same with the next vote (`settled_step`), or when the next run finds that all stores have
the step. A store writes what step 3 says into its catalog with the next commit, so the training thread has it write
that of the last commit at the end of a run. See tests/integration/test_settled_steps.py.
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
    """The commits of one rank that are being settled.

    Args:
        store: this rank's store.
        collectives: the collectives of this rank.
        replicas: the replicas of the store's part of the job, which only the rank that leads the store has.
        leads_store: whether this rank speaks for all ranks that use its store.
        spans_nodes: whether the ranks of the job use several stores.

    If the ranks use one store and commits wait for no replicas, a commit is settled when the store has made it, and
    there is no thread. All ranks must make this object at the same time.

    Raises:
        StoreUnavailableError: the ranks use several stores, and the daemon of one is of a release that does not settle.
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
        # The commits that are not settled yet, oldest first.
        self._begun: deque[int] = deque()
        # Futures that are done when all commits are settled, and cancelled if that fails.
        self._awaited: list[Future[None]] = []
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if not (spans_nodes or replicas.are_waited_for):
            return
        if spans_nodes:
            self._require_capability()
        collectives.open_beside()
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
        """Take note that this rank's store has made a commit, which is settled then if there is one store only."""
        if self._thread is None:
            self._replicas.note_commit(step)

    def wait_for_replicas(self) -> None:
        """Wait until the replicas of all parts have the newest commit, if the job's durability asks for that.

        Raises:
            CollectiveError, StoreError: what `wait` raises.
        """
        if self._replicas.are_waited_for:
            self.wait()

    def wait(self) -> None:
        """Wait until the newest commit is settled, and all replicas have it that commits wait for.

        Call this after the rank's own store has made the commit. The other ranks need not call it.

        Raises:
            CollectiveError: another rank has gone, so it is not known whether it has the commit.
            StoreError: a store refused, or a replica does not have the commit in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._begun or self._failure is not None)
            if self._begun and self._failure is not None:
                raise self._failure

    def record(self, step: int) -> None:
        """Have this rank's store know after a crash, too, that the run's last commit is settled.

        Call this when all ranks have met after their stores had made it. A failure of the call is only logged,
        because the next run settles the commit again.
        """
        if not self._tells_store:
            return
        try:
            self._store.record_settled(step)
        except StoreError as error:
            log.warning(
                "the store at %s may show an earlier step than %d, the last one, until the job is started again: %s",
                self._store.address,
                step,
                error,
            )

    def awaited(self) -> Future[None]:
        """Return a future that is done when the newest commit is settled, and cancelled if it is not."""
        future = Future[None]()
        with self._changed:
            self._awaited.append(future)
            self._tell()
        return future

    @property
    def is_at_once(self) -> bool:
        """Whether a commit is settled when this rank's store has made it."""
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
        """End the thread; idempotent."""
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
            # The threads of the other ranks must not wait for this one, and those that wait for the commit must hear.
            self._collectives.leave_beside()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Have all waits for commits that are not settled raise an error, which is the first one."""
        with self._changed:
            self._failure = self._failure or error
            self._tell()

    def _tell(self) -> None:
        """Let those that wait look whether the newest commit is settled. The caller holds the lock."""
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
        """Do for one commit what [Note: settled steps] says."""
        what = f"the settling of commit {step}"
        self._store.wait_until_committed(step, self._check_open)
        self._collectives.lowest_beside(step, what, self._check_open)
        if self._tells_store:
            self._store.settle_step(step)
        self._replicas.note_commit(step)
        if self._replicas.are_waited_for:
            what += " at the replicas"
            # A holder may be the daemon of a node that is lost with its rank. The run ends then, and so does this wait.
            self._replicas.wait(step, partial(self._collectives.require_others, what, time.monotonic()))
            # The wait for the replicas ends early at the end of the run.
            self._check_open()
            self._collectives.lowest_beside(step, what, self._check_open)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CollectiveError("the run has ended")
