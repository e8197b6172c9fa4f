"""The weights of one committed step, leased from the store and used as tensors, without a copy if possible.

On the daemon's node, a tensor is a view of the daemon's shared memory, mapped so that a write would stay in this
process. All processes that lease the same tensors of one step share that memory. On another node, or for another device
than the CPU, the bytes are copied, and the leases end at once. Tensors that have another dtype in the model than in the
store are copied, too, and the copies are cast. This module owns the reader that holds the step. It must never write to
the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from paramserver.contract import kinds
from paramserver.contract.buffer_names import name_buffers
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.alignment import round_up
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.connection import Call, LeaseRequest, StoreSession, release
from trainer_client.client.store_client.reader import Batch, TensorPart, batches
from trainer_client.client.store_client.types import StoredTensor
from trainer_client.client.transport.arena import Generation
from trainer_client.client.transport.channel import LEASE_DEADLINE_SECONDS
from trainer_client.client.transport.mapping import show_file_again
from trainer_client.errors import StoreError, StoreNotFoundError
from trainer_client.training.run.stored_state import decode_for_all
from trainer_client.training.run.stored_step import large_buffers_in

log = logging.getLogger(__name__)

# The most bytes of a lease. Several tensors of a unit share a lease, because each lease costs the daemon as much time
# as the check of several MB. Leases are not larger than this, because each lease needs a free range of its size in the
# store's host memory.
_LEASE_BYTES = 64 << 20
# The most tensors of one lease.
_LEASE_TENSORS = 1024
_PAGE_BYTES = 4096
# The most seconds for which a request that is made ahead of use waits for a store that does not answer.
_AHEAD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedPlace:
    """Where a tensor's bytes are in the leases of its unit: in which lease, and from which byte on.

    Attributes:
        tensor: the tensor.
        dtype: the dtype that the tensor has in the model.
        lease: the index of the lease in the request.
        offset: the place of the tensor's first byte in that lease.
    """

    tensor: StoredTensor
    dtype: torch.dtype
    lease: int
    offset: int


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """The leases that are requested to bring the tensors of a unit into memory.

    Attributes:
        wants: the requested bytes, one entry for each lease.
        places: the places of the tensors in these leases.
        nbytes: the bytes of all leases, in whole pages. If tensors are cast, this is at least the size of all tensors
            in their dtypes of the model.
        casts: whether some of the tensors have another dtype in the model than in the store. If so, all tensors are
            copied, and the leases end at once.
    """

    wants: tuple[Batch, ...]
    places: tuple[LeasedPlace, ...]
    nbytes: int
    casts: bool

    @classmethod
    def of(cls, tensors: Sequence[StoredTensor], dtypes: Mapping[str, torch.dtype]) -> LeasePlan:
        """Return the plan of the leases that bring these tensors into memory. Each tensor must have elements.

        Args:
            tensors: the tensors as the store has them.
            dtypes: the dtype of each tensor in the model, by name.
        """
        # The order of the tensors is chosen so that the daemon can read most of them without a copy. A trainer has
        # stored the tensors of a unit one after another, so such tensors keep their order. Other clients have stored
        # each large tensor apart from the others. Of such tensors, those that fill whole pages come first, so that the
        # tensors after them begin at a page, too.
        ordered = sorted(tensors, key=lambda one: len(one.kinds) == 1 and _size(one) % _PAGE_BYTES != 0)
        parts = (TensorPart(fqn=t.fqn, kind=kinds.PARAM, dtype=t.dtype, offset=0, numel=t.numel) for t in ordered)
        wants = tuple(batches(parts, _LEASE_BYTES, _LEASE_TENSORS))
        offsets = [(lease, offset) for lease, batch in enumerate(wants) for offset in batch.places]
        places = tuple(
            LeasedPlace(tensor=tensor, dtype=dtypes[tensor.fqn], lease=lease, offset=offset)
            for tensor, (lease, offset) in zip(ordered, offsets, strict=True)
        )
        nbytes = sum(round_up(batch.nbytes, _PAGE_BYTES) for batch in wants)
        casts = any(place.dtype != place.tensor.dtype for place in places)
        if casts:
            nbytes = max(nbytes, sum(place.tensor.numel * place.dtype.itemsize for place in places))
        return cls(wants, places, nbytes, casts)


def _size(tensor: StoredTensor) -> int:
    return tensor.numel * tensor.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors:
    """Tensors of a unit in memory: views of leased memory, or copies.

    Attributes:
        tensors: the tensors, by name.
        session: the session that owns the leases of which the tensors are views; None: the tensors are copies.
        lease_ids: the ids of the leases.
        views: the mapped memory of each lease.
        generation: tells whether the session of the leases has ended; None: the tensors are copies. When the daemon
            dies during a forward, the forward goes on with these tensors while the next unit is fetched in a new
            session. So this object must be usable after the session.
    """

    tensors: Mapping[str, torch.Tensor]
    session: StoreSession | None = None
    lease_ids: Sequence[int] = ()
    views: Sequence[memoryview] = field(default=())
    generation: Generation | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the leases have ended, because their session has ended."""
        return self.session is not None and self.session.has_ended

    def check(self) -> None:
        """Raise SessionEndedError if the leases have ended, because the tensors may then have other bytes."""
        if self.generation is not None:
            self.generation.check()


class StepWeights:
    """The parameters of one committed step of a job, held for reading.

    Attributes:
        job: the job's name.
        step: the number of the step.
        tensors: the step's parameters by name.
        aliases: for each further name of a tied parameter, the parameter's name in `tensors`.
        buffers: the buffers that the trainer has committed with the step, by name.
        extra_states: the encoded extra states of the trainer's modules, by name.
        left_out: the names of the buffers, and of other entries of the state dict, that the commit does not have.
    """

    def __init__(self, client: StoreClientSync, job: str, step: int | None, device: torch.device) -> None:
        """Open a reader of a step, or of the newest one if `step` is None. `close` closes the client, too.

        Raises:
            StoreNotFoundError: there is no such job or step, or this store does not have all of it.
            StoreError: the store cannot be reached, or refuses.
        """
        self._client = client
        self._device = device
        self._reader = client.read(job, step=step)
        self._mapped: tuple[StoreSession, memoryview | None] | None = None
        self.job = job
        self.step = self._reader.step
        self.tensors: dict[str, StoredTensor] = {tensor.fqn: tensor for tensor in self._reader.tensors()}
        for tensor in self.tensors.values():
            if tensor.held != ((0, tensor.numel),):
                raise StoreNotFoundError(
                    grpc.StatusCode.NOT_FOUND,
                    f"step {self.step} of job {job!r}: this store has only a part of {tensor.fqn!r}, because the ranks "
                    "of the job are attached to several stores; export the step, and import it into this store",
                )
        state = self._committed_state()
        model: Mapping[str, Any] = state.get("model") or {}
        self.aliases: Mapping[str, str] = model.get("aliases", {})
        large = large_buffers_in(self._reader, name_buffers(0))
        self.buffers: Mapping[str, torch.Tensor] = {**model.get("buffers", {}), **large}
        self.extra_states: Mapping[str, Mapping[str, str]] = state.get("extra_states") or {}
        self.left_out: tuple[str, ...] = tuple(model.get("left_out", ()))

    def _committed_state(self) -> Mapping[str, Any]:
        """Return rank 0's client state of the commit, decoded; empty if no trainer has committed the step."""
        try:
            encoded = self._reader.client_state(0)
        except StoreNotFoundError:
            return {}
        return decode_for_all(self._reader.client_state, self._reader.ranks) if encoded else {}

    @property
    def arena_bytes(self) -> int:
        """The store's host budget in bytes."""
        call = Call(None, LEASE_DEADLINE_SECONDS)
        return self._reader.on_session(call, lambda session, _: session.arena_bytes)

    def close(self) -> None:
        """Release all leases and the reader, so that the store may delete the step. A repeated call has no effect."""
        self._reader.close()
        self._client.close()
        self._mapped = None

    def begin(self, plan: LeasePlan) -> LeaseRequest | None:
        """Request the leases of a plan without waiting.

        Return None if the store does not answer; `finish` then asks again.
        """
        try:
            return self._reader.on_session(
                Call(_AHEAD_SECONDS, _AHEAD_SECONDS),
                lambda session, reader: _request(session, reader, plan, Call(None, LEASE_DEADLINE_SECONDS)),
            )
        except StoreError as error:
            log.debug("the weights cannot be requested ahead: %s", error)
            return None

    def finish(
        self, plan: LeasePlan, asked: LeaseRequest | None, seconds: float = LEASE_DEADLINE_SECONDS
    ) -> HeldTensors:
        """Wait for the leases of a plan and return its tensors.

        If the daemon was restarted, the leases are requested again from the new daemon.

        Raises:
            StoreBudgetError: the store's host memory had no room for the leases until the deadline.
            StoreNotFoundError: the daemon was restarted, and the step is gone.
            StoreError: the store failed, or did not come back in time.
        """
        call = Call(seconds, LEASE_DEADLINE_SECONDS)

        def attempt(session: StoreSession, reader: int) -> HeldTensors:
            nonlocal asked
            mine, asked = asked, None
            # A request that was made ahead of use may have failed because the store had no free memory. The memory may
            # be free by now, so the leases are requested again.
            if mine is None or mine.session is not session or mine.has_failed:
                mine = _request(session, reader, plan, call)
            try:
                leases = mine.granted()
            except BaseException:
                # After, for example, a KeyboardInterrupt the store may still grant the leases, so they are given back.
                mine.give_back()
                raise
            return self._show(session, call, plan, leases)

        return self._reader.on_session(call, attempt)

    def read(self, tensor: StoredTensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Return a copy of a tensor of the step in `dtype`. The tensor may be larger than the store's host memory."""
        return self._reader.get(tensor.fqn).to(device or self._device, dtype)

    def release(self, held: HeldTensors) -> None:
        """Release the leases of tensors. The caller has made sure that no module uses the tensors any more.

        Raises:
            SessionEndedError: the leases had ended before this call, so the tensors may have had bytes of another
                session.
        """
        if held.session is None:
            return
        held.check()
        for view in held.views:
            show_file_again(view)
        release(held.session, list(held.lease_ids))

    def _show(self, session: StoreSession, call: Call, plan: LeasePlan, leases: Sequence[pb.Lease]) -> HeldTensors:
        """Return the tensors of a plan whose leases are granted: views if this process maps the arena, else copies."""
        mapped = self._memory(session) if self._device.type == "cpu" else None
        ids = [lease.lease_id for lease in leases]
        # Inference mode is off while the tensors of the leases are made, because a tensor that is made in inference
        # mode cannot be assigned to a parameter outside of inference mode.
        with torch.inference_mode(False):
            if mapped is not None:
                views = [
                    mapped[lease.arena_offset : lease.arena_offset + round_up(lease.size_bytes, _PAGE_BYTES)]
                    for lease in leases
                ]
                if not plan.casts:
                    tensors = zip((place.tensor.fqn for place in plan.places), _tensors(plan, views), strict=True)
                    generation = None if session.arena is None else session.arena.generation()
                    return HeldTensors(dict(tensors), session, ids, views, generation)
                try:
                    cast = {
                        place.tensor.fqn: tensor.to(place.dtype, copy=True)
                        for place, tensor in zip(plan.places, _tensors(plan, views), strict=True)
                    }
                    session.check_leases()
                    return HeldTensors(cast)
                finally:
                    release(session, ids)
            try:
                copies = []
                for lease in leases:
                    copy = torch.empty(lease.size_bytes, dtype=torch.uint8)
                    session.copy_out(call, lease, copy)
                    copies.append(copy.numpy().data)
                return HeldTensors(
                    {
                        place.tensor.fqn: tensor.to(self._device, place.dtype)
                        for place, tensor in zip(plan.places, _tensors(plan, copies), strict=True)
                    }
                )
            finally:
                release(session, ids)

    def _memory(self, session: StoreSession) -> memoryview | None:
        """Return this process's mapping of the arena; None if tensors must be copied, because it cannot be mapped."""
        if self._mapped is None or self._mapped[0] is not session:
            self._mapped = session, None if session.arena is None else session.arena.map_privately()
        return self._mapped[1]


def _request(session: StoreSession, reader: int, plan: LeasePlan, call: Call) -> LeaseRequest:
    return LeaseRequest(session, [want.to_want(reader) for want in plan.wants], call)


def _tensors(plan: LeasePlan, views: Sequence[memoryview]) -> Iterator[torch.Tensor]:
    """Yield the plan's tensors as views of the leased memory `views`, each with a storage of the tensor's own size."""
    for place in plan.places:
        tensor = place.tensor
        flat = torch.frombuffer(views[place.lease], dtype=tensor.dtype, count=tensor.numel, offset=place.offset)
        yield flat.view(tensor.shape)
