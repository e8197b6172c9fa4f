"""The boundaries of activation checkpoints, which wait in the store between forward and backward.

torch's activation checkpointing keeps the inputs of each checkpointed part, its boundary, and computes all else again.
This module moves boundaries off the device: into the store's host memory, from where the store may write them to NVMe,
and back ahead of the backward pass. It owns them from the moment at which torch saves them until torch drops them. It
must never change what the model computes, nor touch other tensors that torch saves.

[Note: which tensors are boundaries] Within `Activations.saving`, torch asks `pack` what to keep for each tensor that
autograd saves. A tensor is a boundary if the code of torch.utils.checkpoint saves it, directly or through an
autograd.Function. All other tensors stay what they are; `pack` only notes their version, because torch does not compare
versions itself where hooks are set. Within a checkpointed part torch's own hooks are in place, or nothing is saved.

[Note: the life of a boundary] A boundary stays on the device until `_Depth.staying` newer ones were saved, because
backward needs the newest first: those have no time to go and come. Then memory of the store is leased, the out-lane
copies the bytes, and the lease is parked. When backward takes a boundary, the ones before it are recalled, as many as
hide the time of a recall behind the backward of the parts between; the nearest of them begins its copy to the device.
What comes back stays on the device until torch drops it. If the store has no room, a boundary stays where it is.

[Note: one storage, one boundary] What is moved is a range of bytes of a storage: all of it, or the part that a tensor
spans if this is less than half. So a tensor keeps its strides, and tensors that several checkpoints save, or that are
views of one another, are moved once, as long as their version is the same.

[Note: who drops a boundary] torch drops what `pack` returned when the backward of that part is over, or the graph is
gone. This may happen on any thread and within any call, so `_Boundary.__del__` only puts the lease into a queue, which
the next call of `Activations` empties.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trainer_client.device import CPU
from trainer_client.errors import StoreBudgetError, StoreUnavailableError
from trainer_client.lanes.lanes import Copy, CopyAhead, Lanes
from trainer_client.recorder import Cause, Link, Recorder
from trainer_client.step.window import Window
from trainer_client.transport.channel import Pending
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)

_CHECKPOINT = torch.utils.checkpoint.__file__
_FUNCTION = torch.autograd.function.__file__

# The newest boundaries that stay on the device are at most so many, and so many are recalled ahead.
_MOST_STAYING = 2
_MOST_AHEAD = 8

_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor that "
    "the model saved for backward, or that it passed to torch.utils.checkpoint, was changed after that"
)

# The identity of the bytes of a boundary: the storage, the version of the tensor, and the range of bytes.
_Key = tuple[StorageWeakRef, int, int, int]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that stays where it is, with its version when it was saved."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        _check_version(self.tensor, self.version)
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor as a view of the bytes of a boundary."""

    boundary: _Boundary
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the bytes of the boundary."""
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(
            data.untyped_storage(), data.storage_offset() // self.dtype.itemsize + self.offset, self.size, self.stride
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Boundary:
    """A boundary, wherever it is.

    Attributes:
        index: its number in the order in which boundaries were saved.
        key: identifies its bytes when it was saved.
        nbytes: its size.
        dropped: where the lease goes when torch drops the boundary.
        data: its bytes on the device; None: they have left it, or are about to.
        tensor: a tensor of its storage with the version to compare; None when `data` is.
        leaving: the copy into the store's memory; None: it is done, or was not begun.
        lease: the lease, parked or not; None: it has none.
        coming: the recall of a parked lease that was requested.
        ahead: the copy from the lease to the device.
        is_changed: whether the tensor was changed in place before it was copied.
    """

    index: int
    key: _Key
    nbytes: int
    dropped: deque[_Dropped]
    data: torch.Tensor | None
    tensor: torch.Tensor | None
    leaving: Copy | None = None
    lease: LeasedBytes | None = None
    coming: Pending[LeasedBytes] | None = None
    ahead: CopyAhead | None = None
    is_changed: bool = False

    def __del__(self) -> None:
        """Hand over what is to be given back; see [Note: who drops a boundary]."""
        self.dropped.append(self.give_up())

    def give_up(self) -> _Dropped:
        """Return what is to be given back, after which the boundary has no bytes. Idempotent."""
        given_back = _Dropped(self.index, self.key, self.lease, self.ahead)
        self.data = self.tensor = self.lease = self.ahead = self.coming = None
        return given_back


@dataclass(frozen=True, slots=True)
class _Dropped:
    """What is left of a boundary that torch has dropped."""

    index: int
    key: _Key
    lease: LeasedBytes | None
    ahead: CopyAhead | None


class Activations:
    """The boundaries of one rank.

    Args:
        store: keeps them.
        lanes: copies them.
        recorder: takes note of bytes and waits.
        device: the device of the rank; tensors of other devices are left alone.
        kept_bytes: the bytes of the newest boundaries that stay on the device.
        smallest_bytes: boundaries with fewer bytes stay there, too.
        synchronizes: whether to wait for the device at each boundary.
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
        synchronizes: bool = False,
        profiles: bool = False,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._recorder = recorder
        self._device = device
        self._kept_bytes = kept_bytes
        self._smallest_bytes = smallest_bytes
        self._synchronizes = synchronizes and device.type != CPU
        self._profiles = profiles
        self._next_index = 0
        # The boundaries that torch has not dropped, by their bytes and by their number.
        self._known: dict[_Key, weakref.ref[_Boundary]] = {}
        self._order: dict[int, weakref.ref[_Boundary]] = {}
        self._dropped: deque[_Dropped] = deque()
        # The newest boundaries, which have not left the device yet.
        self._staying: deque[weakref.ref[_Boundary]] = deque()
        # The boundaries whose copies into the store may not be done, and the leases whose parking may not be.
        self._leaving: deque[weakref.ref[_Boundary]] = deque()
        self._parking: deque[LeasedBytes] = deque()
        # A lease that was requested before a boundary needs it, with its size.
        self._next_lease: tuple[int, Pending[LeasedBytes]] | None = None
        # The leases that the device may still copy from, and the last call that has released some of them.
        self._landing: list[tuple[CopyAhead, LeasedBytes]] = []
        self._released: Pending[None] | None = None
        self._depth = _Depth()
        # The numbers of boundaries that have left the device in this forward, and in the last one.
        self._sent = self._sent_before = 0
        # The size from which on the store has refused boundaries in this step; None if it has refused none.
        self._refused_bytes: int | None = None
        self._has_warned = False
        self._sums = _Sums()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enclose a forward, whose boundaries may leave the device."""
        self._collect()
        self._depth.pause()
        self._sent = 0
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            if self._next_lease is not None:
                self._next_lease[1].release_when_granted()
                self._next_lease = None
            self._sent_before = self._sent
            self._collect()

    def close(self) -> None:
        """Forget all boundaries, whose leases end with the session, so that nothing views its memory. Idempotent."""
        boundaries = [each for reference in self._order.values() if (each := reference()) is not None]
        for boundary in boundaries:
            if boundary.leaving is None or boundary.leaving.is_done:
                boundary.give_up()
        self._dropped.clear()
        self._landing.clear()
        self._parking.clear()
        self._released = self._next_lease = None

    def end_step(self, step: int) -> None:
        """Give back all boundaries, because the step is over and no backward of its forwards follows. It does not wait.

        torch may keep the graph of a forward that has failed, or had no backward, for as long as the process lives.
        """
        self._collect()
        for boundary in [each for reference in self._order.values() if (each := reference()) is not None]:
            # The device may still write to the lease of one that is leaving; the next step gives that back.
            if boundary.leaving is None or boundary.leaving.is_done:
                self._dropped.append(boundary.give_up())
        self._staying.clear()
        self._collect()
        self._refused_bytes = None
        sums, self._sums = self._sums, _Sums()
        if self._profiles and sums.saved_bytes:
            log.info(
                "boundaries of step %d: %d bytes, %d of them moved to the store; waited %.3f s for room in the store, "
                "and %.3f s for bytes from it",
                *(step, sums.saved_bytes, sums.moved_bytes, sums.out_seconds, sums.in_seconds),
            )

    # These methods are called by torch.

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Saved:
        """Return what torch keeps for a tensor that it saves."""
        if not self._may_leave(tensor) or not _is_saved_by_checkpoint():
            # A tensor that is no leaf refers to the node that saves it, and would keep that alive.
            return _Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        self._collect()
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)
        begin, end = _range_of(tensor)
        key = (StorageWeakRef(tensor.untyped_storage()), tensor._version, begin, end)
        known = self._known.get(key)
        boundary = None if known is None else known()
        if boundary is None:
            boundary = self._save(tensor, key)
        offset = int(tensor.storage_offset()) - begin // tensor.itemsize
        return _Saved(boundary, tensor.dtype, offset, tuple(tensor.shape), tensor.stride())

    def _unpack(self, packed: _Kept | _Saved) -> torch.Tensor:
        """Return the tensor for which `_pack` returned `packed`."""
        if isinstance(packed, _Kept):
            return packed.unpack()
        boundary = packed.boundary
        self._collect()
        if self._synchronizes:
            torch.accelerator.synchronize(self._device)
        if boundary.data is None:
            self._bring_back(boundary)
        elif boundary.tensor is not None:
            _check_version(boundary.tensor, boundary.key[1])
        assert boundary.data is not None, "it was there, or has come back"
        self._fetch_before(boundary)
        self._depth.resume()
        return packed.view(boundary.data)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor could leave the device, if it is a boundary."""
        if type(tensor) is not torch.Tensor or tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg() or (tensor.is_leaf and tensor.requires_grad) or not tensor.numel():
            return False
        if isinstance(tensor._base, nn.Parameter):
            return False
        begin, end = _range_of(tensor)
        return end - begin >= self._smallest_bytes

    # These methods move boundaries to the store.

    def _save(self, tensor: torch.Tensor, key: _Key) -> _Boundary:
        """Return a new boundary, which stays where it is for now, and send older ones to the store."""
        nbytes = key[3] - key[2]
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        data.set_(tensor.untyped_storage(), key[2], (nbytes,), (1,))
        boundary = _Boundary(
            index=self._next_index, key=key, nbytes=nbytes, dropped=self._dropped, data=data, tensor=tensor.detach()
        )
        self._next_index += 1
        self._sums.saved_bytes += nbytes
        self._recorder.boundary(saved=nbytes)
        reference = weakref.ref(boundary)
        self._known[key] = self._order[boundary.index] = reference
        self._staying = deque(each for each in self._staying if each() is not None)
        self._staying.append(reference)
        staying = sum(each.nbytes for reference in self._staying if (each := reference()) is not None)
        while len(self._staying) > self._depth.staying and staying > self._kept_bytes:
            oldest = self._staying.popleft()()
            if oldest is not None:
                staying -= oldest.nbytes
                self._send(oldest)
        return boundary

    def _send(self, boundary: _Boundary) -> None:
        """Begin to copy a boundary into memory of the store, if that has room."""
        data, tensor = boundary.data, boundary.tensor
        assert data is not None and tensor is not None, "it was never sent"
        if tensor._version != boundary.key[1]:
            # It stays, and `_unpack` raises torch's error for a tensor that was changed.
            return
        leased = self._lease(boundary.nbytes)
        if leased is None:
            return
        began = time.monotonic()
        boundary.data = boundary.tensor = None
        boundary.lease = leased
        self._leaving.append(weakref.ref(boundary))
        copies = [(leased.data[piece], data[piece]) for piece in leased.pieces()]
        boundary.leaving = self._lanes.copy_out(copies, partial(self._park, boundary, tensor, began))
        self._sent += 1
        self._sums.moved_bytes += boundary.nbytes
        self._recorder.boundary(moved=boundary.nbytes)
        if self._sent < self._sent_before:
            self._next_lease = boundary.nbytes, self._store.activations.acquire(boundary.nbytes)

    def _park(self, boundary: _Boundary, tensor: torch.Tensor, began: float) -> None:
        """Park the lease of a boundary, whose bytes are in it."""
        assert boundary.lease is not None, "it was sent"
        self._recorder.moved(Link.TO_STORE, "", boundary.nbytes, began)
        if tensor._version != boundary.key[1]:
            # The device may have copied bytes of both versions.
            boundary.is_changed = True
            return
        boundary.lease = self._store.activations.park(boundary.lease)
        self._parking.append(boundary.lease)

    def _lease(self, nbytes: int) -> LeasedBytes | None:
        """Return memory of the store; None if it has none."""
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
            while True:
                try:
                    return (pending or self._store.activations.acquire(nbytes)).wait()
                except StoreBudgetError as error:
                    # The store counts a lease until it is parked.
                    if not self._finish_parking() and pending is None:
                        self._refuse(nbytes, error)
                        return None
                    pending = None
        except StoreUnavailableError:
            # The daemon was lost. What it had of this step is gone, and what stays here is not.
            return None
        finally:
            ended = time.monotonic()
            self._sums.out_seconds += ended - began
            self._recorder.stalled(Cause.ACTIVATION, "", began, ended)

    def _finish_parking(self) -> bool:
        """Wait until all that was sent is parked; return whether there was anything to wait for."""
        waited = False
        for reference in self._leaving:
            if (boundary := reference()) is not None and boundary.leaving is not None:
                waited = waited or not boundary.leaving.is_done
                boundary.leaving.wait()
        self._leaving.clear()
        while self._parking:
            waited = True
            parked = self._parking.popleft().parked
            assert parked is not None, "it was parked"
            parked.sent.wait()
        return waited

    def _refuse(self, nbytes: int, error: StoreBudgetError) -> None:
        self._refused_bytes = nbytes
        if not self._has_warned:
            self._has_warned = True
            log.warning("boundaries of %d bytes stay on the device, because the store refuses them: %s", nbytes, error)

    # These methods bring boundaries back.

    def _bring_back(self, boundary: _Boundary) -> None:
        """Have the bytes of a boundary on the device, behind a copy that the current stream waits for."""
        if boundary.leaving is not None:
            boundary.leaving.wait()
            boundary.leaving = None
        if boundary.is_changed:
            raise RuntimeError(_CHANGED)
        if boundary.lease is None:
            raise RuntimeError("backward of a forward that was made before the last step: its boundaries are gone")
        has_come = boundary.coming is not None and boundary.coming.is_answered
        self._depth.begin(stalled=boundary.ahead is None and not has_come)
        if boundary.ahead is None:
            self._begin_ahead(boundary, self._arrive(boundary))
        ahead, lease = boundary.ahead, boundary.lease
        assert ahead is not None and lease is not None
        began = time.monotonic()
        data = torch.empty(boundary.nbytes, dtype=torch.uint8, device=self._device)
        ahead.land(data)
        boundary.ahead = boundary.lease = None
        boundary.data = data
        self._landing.append((ahead, lease))
        self._recorder.moved(Link.FROM_STORE, "", boundary.nbytes, began)
        self._release_landed()

    def _arrive(self, boundary: _Boundary) -> LeasedBytes:
        """Wait until the bytes of a boundary are in host memory, and return its lease."""
        assert boundary.lease is not None, "it is in the store"
        began = time.monotonic()
        try:
            pending, boundary.coming = boundary.coming, None
            try:
                return (pending or self._recall(boundary)).wait()
            except StoreBudgetError as error:
                _forget_frames(error)
                # Others that were recalled have its room, or those that have landed still had it.
                self._depth.limit()
                self._park_others()
                self._finish_parking()
                if self._released is not None:
                    self._released.wait()
                return self._recall(boundary).wait()
        except StoreUnavailableError as error:
            if not self._store.is_current(boundary.lease) or type(error) is StoreUnavailableError:
                raise self._store.activations.lost() from error
            raise
        finally:
            ended = time.monotonic()
            self._sums.in_seconds += ended - began
            self._recorder.stalled(Cause.ACTIVATION, "", began, ended)

    def _recall(self, boundary: _Boundary) -> Pending[LeasedBytes]:
        assert boundary.lease is not None, "it is in the store"
        pending = self._store.activations.recall(boundary.lease)
        began, nbytes, depth = time.monotonic(), boundary.nbytes, self._depth
        pending.on_response(lambda _: depth.note_recall(nbytes, time.monotonic() - began))
        return pending

    def _begin_ahead(self, boundary: _Boundary, leased: LeasedBytes) -> None:
        boundary.lease = leased
        boundary.ahead = self._lanes.copy_ahead(leased.data, leased.pieces())

    def _fetch_before(self, boundary: _Boundary) -> None:
        """Begin to bring back the boundaries that were saved before one, because backward needs them next."""
        count = self._depth.resize(boundary.nbytes)
        older = sorted((index for index in self._order if index < boundary.index), reverse=True)
        away = (each for index in older if (each := self._order[index]()) is not None and each.lease is not None)
        for number, each in zip(range(count), away, strict=False):
            if each.ahead is not None or (each.leaving is not None and not each.leaving.is_done) or each.is_changed:
                continue
            try:
                is_refused = each.coming is not None and each.coming.has_failed
                if each.coming is None or is_refused:
                    each.coming = self._recall(each)
                    if is_refused:
                        # Those that are needed later must not have the room before this one.
                        self._depth.limit()
                        return
                elif number == 0 and each.coming.is_answered and self._device.type != CPU:
                    pending, each.coming = each.coming, None
                    self._begin_ahead(each, pending.wait())
            except StoreBudgetError as error:
                _forget_frames(error)
                self._depth.limit()
                return
            except StoreUnavailableError:
                # `_arrive` raises this error, when the boundary is needed.
                return

    def _park_others(self) -> None:
        """Park what was recalled and is not needed yet."""
        for reference in self._order.values():
            boundary = reference()
            if boundary is None or boundary.coming is None:
                continue
            pending, boundary.coming = boundary.coming, None
            try:
                boundary.lease = self._store.activations.park(pending.wait())
                self._parking.append(boundary.lease)
            except StoreBudgetError as error:
                _forget_frames(error)

    # These methods give back what is not needed any more.

    def _collect(self) -> None:
        """Give back what torch has dropped, and take note of copies that are done."""
        self._lanes.poll()
        over = []
        while self._dropped:
            dropped = self._dropped.popleft()
            self._order.pop(dropped.index, None)
            known = self._known.get(dropped.key)
            if known is not None and ((boundary := known()) is None or boundary.index == dropped.index):
                del self._known[dropped.key]
            if dropped.ahead is not None and dropped.lease is not None:
                dropped.ahead.drop()
                self._landing.append((dropped.ahead, dropped.lease))
            elif dropped.lease is not None:
                over.append(dropped.lease)
        # Their parking, or their recall, may be under way, and the store may refuse one of them after this.
        self._store.release_quietly(over)
        while self._leaving and (_has_left(self._leaving[0])):
            self._leaving.popleft()
        while self._parking and (parked := self._parking[0].parked) is not None and parked.sent.is_answered:
            self._parking.popleft()
        self._release_landed()

    def _release_landed(self) -> None:
        landing, self._landing = self._landing, []
        for ahead, lease in landing:
            if not ahead.is_done:
                self._landing.append((ahead, lease))
            elif self._store.is_current(lease):
                self._released = self._store.release([lease])


class _Depth:
    """How many boundaries stay on the device, and how many are recalled ahead; see [Note: the life of a boundary].

    Both follow from the times that recalls take and that the parts of the model compute between two of them. On an
    accelerator the host measures only how long it gives work to the device, which is shorter, so both are bounded.
    """

    def __init__(self) -> None:
        self._window = Window()
        self._units = self._window.units
        self._most = _MOST_AHEAD
        self._recalled_bytes = 0
        self._recall_seconds = 0.0
        self._computes_since: float | None = None

    @property
    def staying(self) -> int:
        """The number of the newest boundaries that stay on the device."""
        return max(1, min(self._units - 1, _MOST_STAYING))

    def note_recall(self, nbytes: int, seconds: float) -> None:
        """Record how long the store took to bring bytes back. Any thread may call this, one at a time."""
        self._recalled_bytes += nbytes
        self._recall_seconds += seconds

    def begin(self, *, stalled: bool) -> None:
        """Record that a boundary is needed now, and whether it has to be waited for."""
        if self._computes_since is not None:
            self._window.note_compute(time.monotonic() - self._computes_since)
        self._window.note_gather(stalled=stalled)

    def resume(self) -> None:
        """Take note that a part of the model computes from now on."""
        self._computes_since = time.monotonic()

    def pause(self) -> None:
        """Take note that the computation from now on is not that of backward."""
        self._computes_since = None

    def resize(self, nbytes: int) -> int:
        """Return how many boundaries of about this size to recall ahead."""
        self._window.note_fetches(self._recalled_bytes, self._recall_seconds)
        self._units = self._window.resize(nbytes)
        return min(self._units, self._most)

    def limit(self) -> None:
        """Recall fewer boundaries ahead from now on, because the store has no room for so many."""
        self._most = max(1, min(self._units, self._most) - 1)


@dataclass(slots=True)
class _Sums:
    """Bytes and waits of one step."""

    saved_bytes: int = 0
    moved_bytes: int = 0
    out_seconds: float = 0.0
    in_seconds: float = 0.0


def _is_saved_by_checkpoint() -> bool:
    """Return whether torch.utils.checkpoint has the tensor saved for which torch calls the caller of this function."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes [begin, end) of its storage that are moved for a tensor; see the note on storages."""
    whole = tensor.untyped_storage().nbytes()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = int(span) * tensor.itemsize
    if 2 * nbytes >= whole:
        return 0, whole
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return begin, begin + nbytes


def _forget_frames(error: BaseException) -> None:
    """Drop the frames in which a call has failed: gRPC keeps its error, and its frames would keep boundaries."""
    error.__traceback__ = None
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None


def _has_left(reference: weakref.ref[_Boundary]) -> bool:
    boundary = reference()
    return boundary is None or boundary.leaving is None or boundary.leaving.is_done


def _check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise what torch raises for a tensor that was changed after it was saved."""
    if tensor._version != version:
        raise RuntimeError(_CHANGED)
