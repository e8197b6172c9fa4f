"""The boundaries of activation checkpoints, which wait in the store between forward and backward.

torch's activation checkpointing keeps the inputs of each checkpointed part, its boundary, and computes all else again.
This module moves boundaries off the device: into the store's host memory, from where the store may write them to NVMe.
boundary_recalls.py brings them back ahead of the backward pass. This module owns them from the moment at which torch
saves them until torch drops them. It must never change what the model computes, nor touch other tensors that torch
saves.

[Note: which tensors are boundaries] Within `Activations.saving`, torch asks `pack` what to keep for each tensor that
autograd saves. A tensor is a boundary if the code of torch.utils.checkpoint saves it, directly or through an
autograd.Function. All other tensors stay what they are; `pack` only notes their version, because torch does not compare
versions itself where hooks are set. Within a checkpointed part torch's own hooks are in place, or nothing is saved, so
torch does not call `pack` for tensors inside of the part.

[Note: the life of a boundary] A boundary stays on the device until `RecallDepth.staying` newer ones were saved, because
backward needs the newest ones first, before they could go to the store and come back. Then memory of the store is
leased, the out-lane copies the bytes, and the lease is parked. When backward takes a boundary, boundaries that were
saved before it are recalled: as many as it takes to hide the time of a recall behind the backward of the parts between.
The nearest of them begins its copy to the device. A boundary that has come back stays on the device until torch drops
it. If the store has no room, a boundary stays where it is.

[Note: boundaries that are computed again] While `RecomputeChoice.is_on`, a boundary that is the output of a segment
(see segments.py) is not kept at all, if the inputs of that segment are kept. In a row of blocks, this is each second
boundary. The bytes of such a boundary are freed when the next such boundary is saved. When backward takes a boundary
whose bytes were freed, the segment runs again, before torch runs the block whose input it is.

[Note: who drops a boundary] torch drops what `pack` returned when the backward of that part is over, or the graph is
gone. This may happen on any thread and within any call, so `Boundary.__del__` only puts the lease into a queue, which
the next call of `Activations` empties.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from paramserver.contract.sizes import shown_size
from trainer_client.base.device import CPU
from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import StoreBudgetError, StoreUnavailableError
from trainer_client.training.step.boundary import (
    Again,
    Boundary,
    Dropped,
    Kept,
    Key,
    Newest,
    Saved,
    check_version,
)
from trainer_client.training.step.boundary_moves import BoundaryMoves, forget_frames
from trainer_client.training.step.boundary_notes import BoundaryNotes
from trainer_client.training.step.boundary_recalls import BoundaryRecalls
from trainer_client.training.step.recall_depth import RecallDepth
from trainer_client.training.step.recompute_choice import RecomputeChoice, StepWaits

log = logging.getLogger(__name__)


class Activations:
    """The boundaries of one rank: moves them to the store after they were saved, and back before backward needs them.

    The engine encloses each forward in `saving`, by which torch hands boundaries to this object and takes them back.

    Args:
        store: keeps the boundaries that have left the device.
        lanes: copies the boundaries between the device and the store's memory.
        recorder: counts the bytes of boundaries that were saved and moved, and the waits for them.
        device: the device of the rank; tensors of other devices are left alone.
        kept_bytes: the bytes of the newest boundaries that stay on the device.
        smallest_bytes: boundaries with fewer bytes stay on the device, too.
        choice: says whether boundaries that can be computed again are freed instead of moved to the store.
        synchronizes: whether the host waits until the device is idle at each boundary that is saved or taken.
        profiles: whether to log bytes and waits of each step.
    """

    def __init__(
        self,
        store: RankStore,
        lanes: Lanes,
        recorder: Recorder,
        device: torch.device,
        *,
        kept_bytes: int,
        smallest_bytes: int,
        choice: RecomputeChoice,
        synchronizes: bool = False,
        profiles: bool = False,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._recorder = recorder
        self._device = device
        self._choice = choice
        self._notes: BoundaryNotes[Boundary] = BoundaryNotes(
            self, StorageWeakRef, device=device, smallest_bytes=smallest_bytes
        )
        self._synchronizes = synchronizes and device.type != CPU
        self._profiles = profiles
        self._next_index = 0
        # Maps the number of each boundary that torch has not dropped to a weak reference to the boundary.
        self._order: dict[int, weakref.ref[Boundary]] = {}
        self._dropped: deque[Dropped] = deque()
        # The newest boundaries. Their bytes are still on the device, because backward needs these boundaries first.
        self._staying: Newest[Boundary] = Newest(kept_bytes)
        # A lease that this rank has requested before a boundary needs it, so that the next boundary need not wait. The
        # number is the size of the lease in bytes.
        self._next_lease: tuple[int, Pending[LeasedBytes]] | None = None
        self._moves = BoundaryMoves(store)
        self._depth = RecallDepth(lanes.stopwatch)
        self._recalls = BoundaryRecalls(store, lanes, recorder, device, self._moves, self._depth, self._order)
        # `_sent`: the number of boundaries that were sent to the store in this forward. `_sent_before`: the same number
        # of the last forward.
        self._sent = self._sent_before = 0
        # The size in bytes of the smallest boundary for which the store had no room in this step. Boundaries of this
        # size or above stay on the device until the step ends. None if the store had room for all of them.
        self._refused_bytes: int | None = None
        self._has_warned = False
        self._sums = _Sums()
        self._step_began = time.monotonic()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Let these modules run again to compute boundaries that were not kept, where checkpoints enclose them."""
        if self._choice.mode is not False:
            self._notes.segments.watch(modules)

    @property
    def is_running_again(self) -> bool:
        """Whether a module is being run again only to compute a boundary, in a forward whose graph has no backward."""
        return self._notes.segments.is_running_again

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a forward: boundaries that torch saves within this context may leave the device."""
        self._collect()
        self._depth.pause()
        self._sent = 0
        self._notes.segments.is_watching = self._choice.is_on
        try:
            with saved_tensors_hooks(self._notes.pack, self._unpack):
                yield
        finally:
            if self._next_lease is not None:
                self._next_lease[1].release_when_granted()
                self._next_lease = None
            self._sent_before = self._sent
            self._notes.segments.is_watching = False
            self._notes.segments.forget()
            self._collect()

    def close(self) -> None:
        """Drop the bytes of all boundaries, so that no tensor views memory of the store after the session. Idempotent.

        The leases of the boundaries end with the session, so they are not released here.
        """
        boundaries = [each for reference in self._order.values() if (each := reference()) is not None]
        for boundary in boundaries:
            if boundary.leaving is None or boundary.leaving.is_done:
                boundary.give_up()
        self._notes.segments.close()
        self._dropped.clear()
        self._moves.close()
        self._next_lease = None

    def end_step(self, step: int) -> None:
        """Release the store's memory of all boundaries, because no backward of the step's forwards follows.

        All ranks must call this. The call waits for the other ranks if the ranks choose at the end of this step whether
        boundaries are computed again.

        torch may keep the graph of a forward that has failed, or had no backward, for as long as the process lives. So
        their memory is released here, and not when torch drops the boundaries.
        """
        self._collect()
        for boundary in [each for reference in self._order.values() if (each := reference()) is not None]:
            # The device may still write to the lease of a boundary whose copy into the store is unfinished. So this
            # lease is not released now, but by the `end_step` of the next step.
            if boundary.leaving is None or boundary.leaving.is_done:
                self._dropped.append(boundary.give_up())
        self._staying.clear()
        self._notes.end_step()
        self._collect()
        refused, self._refused_bytes = self._refused_bytes, None
        sums, self._sums = self._sums, _Sums()
        in_seconds = self._recalls.take_waited_seconds()
        began, self._step_began = self._step_began, time.monotonic()
        waited = sums.out_seconds + in_seconds
        self._choice.end_step(
            StepWaits(
                seconds=self._step_began - began,
                waited_seconds=waited,
                again_bytes=sums.again_bytes,
                is_refused=refused is not None,
            )
        )
        if self._profiles and sums.saved_bytes:
            log.info(
                "boundaries of step %d: %s, %s of them moved to the store and %s computed again; waited %.3f s "
                "for room in the store, and %.3f s for bytes from it",
                step,
                *map(shown_size, (sums.saved_bytes, sums.moved_bytes, sums.again_bytes)),
                *(sums.out_seconds, in_seconds),
            )

    # The next method is the hook that torch calls to unpack a saved tensor.

    def _unpack(self, packed: Kept | Saved[Boundary]) -> torch.Tensor:
        """Return the tensor that torch saved as `packed`. torch calls this when backward needs the tensor."""
        if isinstance(packed, Kept):
            return packed.unpack()
        boundary = packed.boundary
        self._collect()
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)
        if boundary.data is None and boundary.again is not None:
            boundary.take(boundary.again(self._unpack))
            boundary.again = None
        elif boundary.data is None:
            self._recalls.bring_back(boundary)
        elif boundary.tensor is not None:
            check_version(boundary.tensor, boundary.key.version)
        assert boundary.data is not None, "it was there, or has come back"
        self._recalls.fetch_before(boundary)
        self._depth.resume()
        return packed.view(boundary.data)

    # The next methods are called by BoundaryNotes, of which this object is the owner.

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Return the object that torch keeps for a tensor that is no boundary: the tensor itself and its version."""
        return Kept.of(tensor)

    def save(self, tensor: torch.Tensor, key: Key, again: Again | None) -> Boundary:
        """Return a new boundary, which stays on the device for now, and send older ones to the store."""
        self._collect()
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)
        boundary = Boundary.of(tensor, key, self._next_index, self._dropped)
        boundary.again = again
        self._next_index += 1
        self._sums.saved_bytes += boundary.nbytes
        self._recorder.boundary(saved=boundary.nbytes)
        self._order[boundary.index] = weakref.ref(boundary)
        if again is None:
            for leaving in self._staying.add(boundary, self._depth.staying):
                self._send(leaving)
        return boundary

    def let_go(self, boundary: Boundary) -> None:
        """Free the device memory of a boundary that a segment can compute again, unless its tensor was changed."""
        if boundary.again is None or boundary.tensor is None:
            return
        if boundary.tensor._version != boundary.key.version:
            # The script has changed the tensor after torch saved it. So the boundary stays on the device, and `_unpack`
            # raises torch's error for saved tensors that were changed in place.
            boundary.again = None
            return
        boundary.data = boundary.tensor = None
        self._sums.again_bytes += boundary.nbytes
        self._recorder.boundary(again=boundary.nbytes)

    # The next methods move boundaries from the device to the store.

    def _send(self, boundary: Boundary) -> None:
        """Begin to copy a boundary into memory of the store, if the store has room."""
        data, tensor = boundary.data, boundary.tensor
        assert data is not None and tensor is not None, "it was never sent"
        if tensor._version != boundary.key.version:
            # The script has changed the tensor after torch saved it. So the boundary stays on the device, and `_unpack`
            # raises torch's error for saved tensors that were changed in place.
            return
        leased = self._lease(boundary.nbytes)
        if leased is None:
            return
        began = time.monotonic()
        boundary.data = boundary.tensor = None
        boundary.lease = leased
        self._moves.note_leaving(boundary)
        copies = [(leased.data[piece], data[piece]) for piece in leased.pieces()]
        boundary.leaving = self._lanes.copy_out(copies, partial(self._park, boundary, tensor, began))
        self._sent += 1
        self._sums.moved_bytes += boundary.nbytes
        self._recorder.boundary(moved=boundary.nbytes)
        if self._sent < self._sent_before:
            self._next_lease = boundary.nbytes, self._store.activations.acquire(boundary.nbytes)

    def _park(self, boundary: Boundary, tensor: torch.Tensor, began: float) -> None:
        """Park the lease of a boundary, because the boundary's bytes are in the leased memory now."""
        if boundary.lease is None:
            # The step has ended during the copy of the boundary, and the end of the step has given the lease back. So
            # there is no lease to park.
            return
        self._recorder.moved(Link.TO_STORE, "", boundary.nbytes, began)
        if tensor._version != boundary.key.version:
            # The script has changed the tensor during its copy into the leased memory, so that memory may have bytes
            # from before and from after the change. `BoundaryRecalls.bring_back` raises an error for this boundary.
            boundary.is_changed = True
            return
        self._moves.park(boundary, boundary.lease)

    def _lease(self, nbytes: int) -> LeasedBytes | None:
        """Return memory of the store for a boundary that may leave now; None if the store has none."""
        if self._refused_bytes is not None and nbytes >= self._refused_bytes:
            return None
        began = time.monotonic()
        requested, self._next_lease = self._next_lease, None
        pending = None
        if requested is not None:
            if requested[0] == nbytes:
                pending = requested[1]
            else:
                requested[1].release_when_granted()
        try:
            self._moves.make_way()
            while True:
                try:
                    return (pending or self._store.activations.acquire(nbytes)).wait()
                except StoreBudgetError as error:
                    forget_frames(error)
                    # The store has no room for this boundary. A lease takes a part of the store's budget until it is
                    # parked or released, so wait for the calls that park and release leases, and ask for room again.
                    waited = self._moves.finish_parking()
                    if not self._moves.finish_landing() and not waited and pending is None:
                        self._refuse(nbytes, error)
                        return None
                    pending = None
        except StoreUnavailableError as error:
            forget_frames(error)
            # The daemon was lost, and the boundaries in its memory with it. This boundary is still on the device, so it
            # stays there.
            return None
        finally:
            ended = time.monotonic()
            self._sums.out_seconds += ended - began
            self._recorder.stalled(Cause.ACTIVATION, "", began, ended)

    def _refuse(self, nbytes: int, error: StoreBudgetError) -> None:
        self._refused_bytes = nbytes
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "boundaries of %s stay on the device, because the store refuses them: %s", shown_size(nbytes), error
            )

    # The next method gives back the leases of boundaries that torch has dropped.

    def _collect(self) -> None:
        """Release the leases of boundaries that torch has dropped, and forget copies and parkings that are done."""
        self._lanes.poll()
        over = []
        while self._dropped:
            dropped = self._dropped.popleft()
            self._order.pop(dropped.index, None)
            self._notes.discard(dropped.key, partial(_is_number, dropped.index))
            if dropped.ahead is not None and dropped.lease is not None:
                dropped.ahead.drop()
                self._moves.note_landing(dropped.ahead, dropped.lease)
            elif dropped.lease is not None:
                over.append(dropped.lease)
        # The store may still be parking or recalling a lease that is released here. It may then refuse that earlier
        # call, so errors are ignored.
        self._store.leases.release_quietly(over)
        self._moves.collect()


@dataclass(slots=True)
class _Sums:
    """The bytes of one step's boundaries, and the seconds that this rank waited for room in the store for them."""

    saved_bytes: int = 0
    moved_bytes: int = 0
    again_bytes: int = 0
    out_seconds: float = 0.0


def _is_number(index: int, boundary: Boundary) -> bool:
    return boundary.index == index
