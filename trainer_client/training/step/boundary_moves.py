"""The moves of boundaries between the device and the store that may be unfinished, and the waits for their ends.

A request for room in the store may have to wait for these moves, whether it is made to send a boundary or to bring one
back. This module owns the lists of copies that may be unfinished, and of leases that the store may still be parking or
releasing. It must never begin a copy, nor keep a boundary alive that torch has dropped.
"""

from __future__ import annotations

import weakref
from collections import deque

from trainer_client.base.lanes.lanes import CopyAhead
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes, check
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.training.step.boundary import Boundary
from trainer_client.training.step.recall_depth import MOST_LEAVING


class BoundaryMoves:
    """The unfinished moves of one rank's boundaries.

    Args:
        store: parks and releases the leases.
    """

    def __init__(self, store: RankStore) -> None:
        self._store = store
        # `_leaving`: the boundaries whose copies from the device into the store may be unfinished. `_parking`: the
        # leases that this rank has parked, while the store may not have answered yet.
        self._leaving: deque[weakref.ref[Boundary]] = deque()
        self._parking: deque[LeasedBytes] = deque()
        # `_landing`: copies to the device that may be unfinished, each with the lease that it reads. `_released`: the
        # last call to the store that has released such leases.
        self._landing: list[tuple[CopyAhead, LeasedBytes]] = []
        self._released: Pending[None] | None = None

    def note_leaving(self, boundary: Boundary) -> None:
        """Note a boundary whose copy into its lease begins."""
        self._leaving.append(weakref.ref(boundary))

    def note_landing(self, ahead: CopyAhead, lease: LeasedBytes) -> None:
        """Note a copy to the device that may be unfinished. Its lease is released when the copy is done."""
        self._landing.append((ahead, lease))

    def park(self, boundary: Boundary, leased: LeasedBytes) -> None:
        """Park a lease that has the bytes of a boundary, and give the boundary the parked lease. It does not wait."""
        boundary.lease = self._store.activations.park(leased)
        self._parking.append(boundary.lease)

    def make_way(self) -> None:
        """Wait until fewer than MOST_LEAVING copies to the store are unfinished, as each one holds device memory."""
        while len(self._leaving) >= MOST_LEAVING:
            boundary = self._leaving.popleft()()
            if boundary is not None and boundary.leaving is not None:
                boundary.leaving.wait()

    def finish_parking(self) -> bool:
        """Wait until the store has parked all boundaries that were sent. Return False if all were parked before."""
        waited = False
        for reference in self._leaving:
            if (boundary := reference()) is not None and boundary.leaving is not None:
                waited = waited or boundary.is_leaving
                boundary.leaving.wait()
        self._leaving.clear()
        while self._parking:
            waited = True
            parked = self._parking.popleft().parked
            assert parked is not None, "it was parked"
            parked.sent.wait()
        return waited

    def finish_landing(self) -> bool:
        """Wait until the leases that the device copies from are released. Return False if there was none."""
        waited = bool(self._landing) or (self._released is not None and not self._released.is_answered)
        for ahead, _ in self._landing:
            ahead.wait()
        self.release_landed()
        if self._released is not None:
            self._released.wait()
        return waited

    def collect(self) -> None:
        """Forget copies and parkings that are done, and release the leases whose copies to the device are done."""
        while self._leaving and (_has_left(self._leaving[0])):
            self._leaving.popleft()
        while self._parking and (parked := self._parking[0].parked) is not None and parked.sent.is_answered:
            self._parking.popleft()
        self.release_landed()

    def release_landed(self) -> None:
        """Release the leases whose copies to the device are done, unless they are of a former session.

        It can raise SessionEndedError.
        """
        landing, self._landing = self._landing, []
        for ahead, lease in landing:
            if not ahead.is_done:
                self._landing.append((ahead, lease))
                continue
            check([lease])
            if self._store.leases.is_current(lease):
                self._released = self._store.leases.release([lease])

    def close(self) -> None:
        """Forget the leases, which end with the session. Idempotent."""
        self._landing.clear()
        self._parking.clear()
        self._released = None


def _has_left(reference: weakref.ref[Boundary]) -> bool:
    boundary = reference()
    return boundary is None or not boundary.is_leaving


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an error: gRPC keeps the error, and its frames would keep boundaries alive."""
    error.__traceback__ = None
    if error.__context__ is not None:
        error.__context__.__traceback__ = None
