"""The way of boundaries of activation checkpoints from the store back to the device, ahead of the backward pass.

This module recalls a boundary that backward takes, and the boundaries that were saved before it, which backward takes
next. It gives their host memory back if the store has no room for the boundary that is needed now. It must never send a
boundary to the store whose bytes are only on the device, nor decide which tensors are boundaries. activations.py [Note:
the life of a boundary] says when a boundary comes back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping

import torch

from trainer_client.base.device import CPU
from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import StoreBudgetError, StoreUnavailableError
from trainer_client.training.step.boundary import CHANGED, Boundary
from trainer_client.training.step.boundary_moves import BoundaryMoves, forget_frames
from trainer_client.training.step.recall_depth import RecallDepth


class BoundaryRecalls:
    """The recalls of one rank's boundaries.

    Args:
        store: keeps the boundaries that have left the device.
        lanes: copies the boundaries from the store's memory to the device.
        recorder: counts the bytes that have come back, and the waits for them.
        device: the device of the rank.
        moves: the unfinished moves of the boundaries.
        depth: says how many boundaries are recalled ahead.
        order: maps the number of each boundary that torch has not dropped to a weak reference to the boundary. The
            caller adds and removes boundaries.
    """

    def __init__(
        self,
        store: RankStore,
        lanes: Lanes,
        recorder: Recorder,
        device: torch.device,
        moves: BoundaryMoves,
        depth: RecallDepth,
        order: Mapping[int, weakref.ref[Boundary]],
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._recorder = recorder
        self._device = device
        self._moves = moves
        self._depth = depth
        self._order = order
        self._waited_seconds = 0.0

    def take_waited_seconds(self) -> float:
        """Return for how many seconds this rank has waited for boundaries since the last call of this method."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def bring_back(self, boundary: Boundary) -> None:
        """Bring the bytes of a boundary to the device by a copy that the current stream waits for."""
        if boundary.leaving is not None:
            boundary.leaving.wait()
            boundary.leaving = None
        if boundary.is_changed:
            raise RuntimeError(CHANGED)
        if boundary.lease is None:
            raise RuntimeError("backward of a forward that was made before the last step: its boundaries are gone")
        has_come = boundary.coming is not None and boundary.coming.is_answered
        self._depth.begin(stalled=boundary.ahead is None and not has_come)
        if boundary.ahead is None:
            self._begin_ahead(boundary, self._arrive(boundary))
        self._land(boundary)
        self._moves.release_landed()

    def _land(self, boundary: Boundary) -> None:
        """Allocate device memory for a boundary whose copy to the device was begun, and put the bytes into it."""
        ahead, lease = boundary.ahead, boundary.lease
        assert ahead is not None and lease is not None
        began = time.monotonic()
        data = torch.empty(boundary.nbytes, dtype=torch.uint8, device=self._device)
        ahead.land(data)
        boundary.ahead = boundary.lease = None
        boundary.data = data
        self._moves.note_landing(ahead, lease)
        self._recorder.moved(Link.FROM_STORE, "", boundary.nbytes, began)

    def _arrive(self, boundary: Boundary) -> LeasedBytes:
        """Wait until the bytes of a boundary are in host memory, and return its lease."""
        assert boundary.lease is not None, "it is in the store"
        began = time.monotonic()
        try:
            pending, boundary.coming = boundary.coming, None
            try:
                return (pending or self._recall(boundary)).wait()
            except StoreBudgetError as error:
                forget_frames(error)
                # The store has no host memory for this boundary, because boundaries that were recalled ahead take it.
                # So give back the memory of those boundaries, and recall this boundary again.
                self._depth.limit()
                self._give_way()
                self._moves.finish_parking()
                self._moves.finish_landing()
                return self._recall(boundary).wait()
        except StoreUnavailableError as error:
            if not self._store.leases.is_current(boundary.lease) or type(error) is StoreUnavailableError:
                raise self._store.activations.lost() from None
            raise
        finally:
            ended = time.monotonic()
            self._waited_seconds += ended - began
            self._recorder.stalled(Cause.ACTIVATION, "", began, ended)

    def _recall(self, boundary: Boundary) -> Pending[LeasedBytes]:
        assert boundary.lease is not None, "it is in the store"
        pending = self._store.activations.recall(boundary.lease)
        began, nbytes, depth = time.monotonic(), boundary.nbytes, self._depth
        pending.on_response(lambda _: depth.note_recall(nbytes, time.monotonic() - began))
        return pending

    def _begin_ahead(self, boundary: Boundary, leased: LeasedBytes) -> None:
        boundary.lease = leased
        boundary.ahead = self._lanes.copy_ahead(leased.data, leased.pieces())

    def fetch_before(self, boundary: Boundary) -> None:
        """Begin to bring back the boundaries that were saved before this one, because backward needs them next."""
        count = self._depth.resize(boundary.nbytes)
        older = sorted((index for index in self._order if index < boundary.index), reverse=True)
        away = (each for index in older if (each := self._order[index]()) is not None and each.lease is not None)
        for number, each in zip(range(count), away, strict=False):
            if each.ahead is not None or each.is_leaving or each.is_changed:
                continue
            try:
                is_refused = each.coming is not None and each.coming.has_failed
                if each.coming is None or is_refused:
                    each.coming = self._recall(each)
                    if is_refused:
                        # The store has refused to recall this boundary ahead. So recall no older boundary: backward
                        # needs older ones later, and they must not take the memory that this boundary needs.
                        self._depth.limit()
                        return
                elif number == 0 and each.coming.is_answered and self._device.type != CPU:
                    pending, each.coming = each.coming, None
                    self._begin_ahead(each, pending.wait())
            except StoreBudgetError as error:
                forget_frames(error)
                self._depth.limit()
                return
            except StoreUnavailableError as error:
                forget_frames(error)
                # The daemon was lost. When backward needs the boundary, `_arrive` raises this error, so it is not
                # raised here.
                return

    def _give_way(self) -> None:
        """Free the host memory of boundaries that were recalled and are not needed yet.

        A boundary whose copy to the device was begun goes to the device. All others are parked again.
        """
        for reference in self._order.values():
            boundary = reference()
            if boundary is None:
                continue
            if boundary.ahead is not None:
                self._land(boundary)
            if boundary.coming is None:
                continue
            pending, boundary.coming = boundary.coming, None
            try:
                self._moves.park(boundary, pending.wait())
            except StoreBudgetError as error:
                forget_frames(error)
