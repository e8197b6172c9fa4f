"""A committed step of a job as a model: its tensors by name, read from the store piece by piece.

This module owns the readers that hold the step, so that all values that it reads belong to one step, even if the
trainer commits further steps meanwhile. It must never hold more of a tensor than the piece that the caller asked for,
and never write to the store.
"""

from __future__ import annotations

import logging
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from paramserver.contract.optimizers.registry import OPTIMIZERS
from paramserver.contract.printable import printable
from trainer_client.base.index_ranges import from_ranges
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.types import Kind, StoredLayout, StoredTensor, kind_from_proto
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import ClientStateError, StoreNotFoundError
from trainer_client.training.model.slot_table import Slot
from trainer_client.training.run.stored_state import counts_of, decode_for_all, groups_of
from trainer_client.training.run.stored_step import StepPart, StoreAddress, StoredStep, connect, first_gap, tensors_of

log = logging.getLogger(__name__)

# The most bytes of a tensor that are read at once. The reader divides a read into parts, so that the store fetches one
# part while this process copies the part before it.
PIECE_BYTES = 32 << 20
# Tensors of at most this size are read together, up to _BATCH_BYTES at once, because a request takes some milliseconds,
# however small the tensor is.
_SMALL_BYTES = 64 << 10
_BATCH_BYTES = 4 << 20
# The most seconds for which an export without a step number looks for a step that all stores have, while a trainer
# commits further ones.
_CHOICE_SECONDS = 30.0
_WEIGHTS: tuple[Kind, ...] = ("param", "master")
# If a parameter has one of these states, torch's state dict also has the count of its updates, "step".
_COUNTED_STATES: frozenset[Kind] = frozenset(
    kind_from_proto(kind)
    for kind in {kind for each in OPTIMIZERS.values() if each.is_counted for kind in each.states}
    - {kind for each in OPTIMIZERS.values() if not each.is_counted for kind in each.states}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A tensor of the model, or an optimizer state of a parameter, as an export writes it to files.

    Attributes:
        name: the name under which it is written.
        shape: the tensor's shape.
        dtype: the dtype in which it is written.
        kind: the stored kind from which the elements are read; None: the tensor is a buffer, and `value` has the
            elements.
        aliases: the further names of a tied tensor.
        value: the elements of a buffer; None for all other tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind | None
    aliases: tuple[str, ...] = ()
    value: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """The optimizer of a step, in the form of a state dict of torch.

    Attributes:
        states: the states of each trained parameter, by the parameter's name and torch's name of the state.
        counts: for each trained parameter, the number of its updates, if its optimizer counts them.
        groups: the parameter groups with their settings; "params" has the names of their parameters.
    """

    states: Mapping[str, Mapping[Kind, ModelTensor]]
    counts: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]


class StoredModel:
    """The model of one step, which the stores hold for reading; see `open_model`.

    Attributes:
        job: the name of the job.
        step: the number of the step.
        buffers: the model's buffers by name: those in the commit's client state, and the large buffers that rank 0 has
            stored beside it.
        left_out: names in the model's state dict of which the store has no values, so that the export lacks them.
        adapters: the configs of peft's adapters in JSON, by name.
    """

    def __init__(self, origin: StoredStep, on_read: Callable[[int], None]) -> None:
        """Read the list of the step's tensors, and the client state of the step's commit.

        `on_read` is called later, with the number of bytes of each piece of a tensor that was read.

        Raises:
            StoreNotFoundError: the stores do not have some elements.
            ClientStateError: the commit was made by another version, in another format.
        """
        self.job = origin.job
        self.step = origin.step
        self._origin = origin
        # An anonymous mapping takes memory only for the pages that were written, so a small model takes little memory.
        # A bytearray would be filled with zeros first, which takes 20 ms.
        self._buffer = mmap.mmap(-1, PIECE_BYTES)
        self._on_read = on_read
        encoded = origin.client_state(0)
        if encoded is None:
            raise _incomplete(origin, "rank 0's part of the commit")
        self._state: Mapping[str, Any] = decode_for_all(origin.client_state, origin.ranks()) if encoded else {}
        model = self._state.get("model")
        self._tensors = _whole_tensors(
            origin, len(self._state.get("update_counts", ())), (model or {}).get("empty", {})
        )
        if self._state and model is None:
            log.warning(
                "step %d of job %r was committed by a version that did not record the further names of tied "
                "parameters and the buffers: the export has only what the store has",
                *(self.step, self.job),
            )
        self._aliases: dict[str, list[str]] = {}
        for alias, fqn in (model or {}).get("aliases", {}).items():
            self._aliases.setdefault(fqn, []).append(alias)
        self.buffers: Mapping[str, torch.Tensor] = {**(model or {}).get("buffers", {}), **origin.buffers(0)}
        self.left_out: tuple[str, ...] = tuple((model or {}).get("left_out", ()))
        self.adapters: Mapping[str, str] = (model or {}).get("adapters", {})
        # `_small` has the sizes of small tensors that were passed to `plan` and were not read yet, by kind and name.
        # `_read_ahead` has small tensors that one request has read together with another tensor. They stay there until
        # the caller asks for them.
        self._small: dict[Kind, dict[str, int]] = {}
        self._read_ahead: dict[tuple[str, Kind], torch.Tensor] = {}

    def weights(self, dtype: torch.dtype | None) -> list[ModelTensor]:
        """Return the parameters in the model's order, then the buffers.

        Args:
            dtype: the dtype of the parameters, which are converted from the fp32 weights if the store has fp32 weights.
                None: the dtype in which the model computed. Buffers keep their dtype in either case.
        """
        found = []
        for tensor in self._tensors:
            kind: Kind = "master" if dtype is not None and "master" in tensor.kinds else "param"
            found.append(
                ModelTensor(
                    name=tensor.fqn,
                    shape=tensor.shape,
                    dtype=dtype or tensor.dtype,
                    kind=kind,
                    aliases=tuple(self._aliases.get(tensor.fqn, ())),
                )
            )
        for name, buffer in self.buffers.items():
            found.append(ModelTensor(name=name, shape=tuple(buffer.shape), dtype=buffer.dtype, kind=None, value=buffer))
        return found

    def optimizer(self) -> OptimizerStates:
        """Return the optimizer's states and parameter groups.

        Raises:
            ClientStateError: no trainer has committed the step, so it has no optimizer.
        """
        if not self._state:
            raise ClientStateError(
                f"step {self.step} of job {self.job!r} was not committed by a trainer, so it has no optimizer"
            )
        states = {
            tensor.fqn: {
                kind: ModelTensor(name=tensor.fqn, shape=tensor.shape, dtype=dtype, kind=kind)
                for kind, dtype in tensor.kinds.items()
                if kind not in _WEIGHTS
            }
            for tensor in self._tensors
            if tensor.trainable
        }
        names = [tensor.fqn for tensor in self._tensors]
        counts = counts_of(self._state, names)
        return OptimizerStates(
            states=states,
            counts={
                tensor.fqn: counts[tensor.index]
                for tensor in self._tensors
                if _COUNTED_STATES & states.get(tensor.fqn, {}).keys()
            },
            groups=[_with_names(settings, names) for settings in groups_of(self._state, names) or ()],
        )

    def read(self, tensor: ModelTensor, offset: int, numel: int) -> torch.Tensor:
        """Return elements [offset, offset + numel) of the flattened tensor as a tensor [numel].

        The next read overwrites the returned elements, because all pieces are read into one buffer. When memory was
        allocated and freed for each piece, the process was seen to grow to the size of the model, because the heap kept
        the freed memory.

        Args:
            tensor: the tensor.
            offset: the first element.
            numel: the number of elements, at most `piece_numel(tensor)`.

        Raises:
            StoreError: a store failed.
        """
        if numel == 0:
            return torch.empty(0, dtype=tensor.dtype)
        piece = torch.frombuffer(self._buffer, dtype=tensor.dtype, count=numel)
        if tensor.kind is None:
            assert tensor.value is not None
            return piece.copy_(tensor.value.reshape(-1)[offset : offset + numel])
        values = self._take_small(tensor, tensor.kind)
        if values is None:
            self._origin.read(piece, tensor.name, tensor.kind, offset)
        else:
            piece.copy_(values[offset : offset + numel])
        self._on_read(piece.nbytes)
        return piece

    def plan(self, tensors: Iterable[ModelTensor]) -> None:
        """Note which tensors the caller will read, each once, so that `read` can fetch small ones with one request."""
        for tensor in tensors:
            if tensor.kind is not None and tensor.nbytes <= _SMALL_BYTES:
                self._small.setdefault(tensor.kind, {})[tensor.name] = tensor.nbytes

    def _take_small(self, tensor: ModelTensor, kind: Kind) -> torch.Tensor | None:
        """Return a small tensor, flattened, if it can be fetched together with other small tensors; else None.

        It can be fetched so if it was passed to `plan`, and one store has all of it. If the tensor was not fetched yet,
        other small tensors of its kind are fetched with it, and kept until the caller reads them.
        """
        if (tensor.name, kind) in self._read_ahead:
            return self._read_ahead.pop((tensor.name, kind))
        waiting = self._small.get(kind, {})
        holder = next((holder for holder in self._origin.parts() if _is_whole(holder, tensor.name)), None)
        if tensor.name not in waiting or holder is None:
            return None
        batch, room = [tensor.name], _BATCH_BYTES
        for name, nbytes in waiting.items():
            if name != tensor.name and _is_whole(holder, name):
                room -= nbytes
                if room < 0:
                    break
                batch.append(name)
        for name, values in holder.reader.get_many(batch, kind=kind).items():
            del waiting[name]
            self._read_ahead[name, kind] = values.reshape(-1)
        return self._read_ahead.pop((tensor.name, kind))

    def pieces(self, tensor: ModelTensor) -> Iterator[torch.Tensor]:
        """Yield the flattened tensor piece by piece; the next piece overwrites the one before it.

        It can raise StoreError.
        """
        step = piece_numel(tensor)
        for offset in range(0, tensor.numel, step):
            yield self.read(tensor, offset, min(step, tensor.numel - offset))


def piece_numel(tensor: ModelTensor) -> int:
    """Return the most elements of a tensor that are read at once: at most PIECE_BYTES, even if read as fp32."""
    return PIECE_BYTES // max(tensor.dtype.itemsize, torch.float32.itemsize)


@contextmanager
def open_model(
    stores: Sequence[str],
    job: str,
    step: int | None,
    credentials: Credentials,
    on_read: Callable[[int], None] = lambda nbytes: None,
    *,
    kept: str | None = None,
) -> Iterator[StoredModel]:
    """Have the stores hold a step of a job, and yield its model for reading within the context.

    Args:
        stores: the addresses of the stores that have parts of the job, one for each node on which the job has ranks.
        job: the job's name.
        step: the step's number; None: the newest step that all of the stores have.
        credentials: token and TLS files to connect with.
        on_read: called with the number of bytes of each piece that was read.
        kept: the name under which the stores keep the step, instead of its number.

    Raises:
        StoreNotFoundError: there is no such job or step, or the stores do not have all of it; the message lists the
            jobs or steps that exist.
        StoreError: a store cannot be reached, or refuses.
    """
    deadline = time.monotonic() + _CHOICE_SECONDS
    while True:
        with ExitStack() as held:
            addresses = [StoreAddress(address=address) for address in stores]
            clients = [held.enter_context(connect(address, credentials)) for address in addresses]
            layout, chosen = _choose(clients, stores, job, step) if kept is None else ("", 0)
            origin = held.enter_context(
                StoredStep(
                    job=job,
                    layout=layout,
                    step=chosen,
                    stores=addresses,
                    credentials=credentials,
                    kept=kept,
                    clients=clients,
                )
            )
            try:
                steps = [part.reader.step for part in origin.parts()]
            except StoreNotFoundError:
                # The trainer has committed further steps since this export chose a step, and a store no longer has the
                # chosen step. So the export chooses again, unless the caller has named a step.
                if step is not None or kept is not None or time.monotonic() > deadline:
                    raise
                continue
            if len(set(steps)) > 1:
                kept_there = ", ".join(f"{number} at {address}" for address, number in zip(stores, steps, strict=True))
                raise StoreNotFoundError(
                    grpc.StatusCode.NOT_FOUND,
                    f"the stores keep different steps of job {printable(job)!r} under the name {kept!r} "
                    f"({kept_there}): keep one step under this name in all of them",
                )
            origin.step = steps[0]
            yield StoredModel(origin, on_read)
            return


def _choose(clients: Sequence[StoreClientSync], stores: Sequence[str], job: str, step: int | None) -> tuple[str, int]:
    """Return the name of the layout and the number of the step that is to be read. It can raise StoreNotFoundError."""
    common: set[tuple[int, int, str]] | None = None
    known: set[int] = set()
    for client, address in zip(clients, stores, strict=True):
        layouts = _layouts_of(client, address, job)
        # If a job has a step in several layouts, the latest of these layouts is chosen, so the place of a layout
        # counts.
        steps = {(number, place, stored.name) for place, stored in enumerate(layouts) for number in stored.steps}
        known |= {number for number, _, _ in steps}
        common = steps if common is None else _common(common, steps)
    fitting = [found for found in common or () if step is None or found[0] == step]
    if not fitting:
        where = "the store has" if len(stores) == 1 else "the stores have"
        what = f"step {step}" if step is not None else "a step in common"
        steps_there = ", ".join(map(str, sorted(known))) or "none"
        raise StoreNotFoundError(
            grpc.StatusCode.NOT_FOUND, f"job {printable(job)!r} does not have {what}; {where} the steps: {steps_there}"
        )
    chosen, _, layout = max(fitting)
    return layout, chosen


def _common(some: set[tuple[int, int, str]], others: set[tuple[int, int, str]]) -> set[tuple[int, int, str]]:
    """Return the items of `some` whose step and layout another store has, too.

    Args:
        some: for each step that the stores asked so far have: its number, the index of its layout in a store's list,
            and the layout's name.
        others: the same of another store, in whose list the layouts may have other indexes.
    """
    there = {(number, name) for number, _, name in others}
    return {found for found in some if (found[0], found[2]) in there}


def _layouts_of(client: StoreClientSync, address: str, job: str) -> tuple[StoredLayout, ...]:
    """Return the layouts of a job at one store. Raise StoreNotFoundError if the store has no such job."""
    jobs = client.list_jobs()
    for stored in jobs:
        if stored.name == job:
            return stored.layouts
    names = ", ".join(repr(printable(stored.name)) for stored in jobs) or "none"
    raise StoreNotFoundError(
        grpc.StatusCode.NOT_FOUND, f"the store at {address} has no job {printable(job)!r}; its jobs: {names}"
    )


def _is_whole(holder: StepPart, fqn: str) -> bool:
    """Return whether the store that `holder` reads from has all elements of the tensor with this name."""
    tensor = holder.tensors.get(fqn)
    return tensor is not None and tensor.held == ((0, tensor.numel),)


def _whole_tensors(origin: StoredStep, known: int, empty: Mapping[str, torch.Tensor]) -> list[StoredTensor]:
    """Return the tensors of the step in the model's order.

    Args:
        origin: the step.
        known: the number of parameters that the client state knows of. A store lists only parameters of which it has
            elements, so the model may have more than the stores list.
        empty: the parameters without elements, by name, in the model's order.

    Raises:
        StoreNotFoundError: the stores lack some elements.
    """
    there = tensors_of(origin.parts())
    tensors = [found for found, *_ in there.values()]
    gap = first_gap(there, (Slot(fqn=tensor.fqn, offset=0, numel=tensor.numel) for tensor in tensors))
    if gap is not None:
        raise _incomplete(origin, f"the {gap}")
    places = {tensor.index for tensor in tensors}
    total = max([known, *(place + 1 for place in places)])
    unlisted = sorted(set(range(total)) - places)
    if len(unlisted) > len(empty):
        raise _incomplete(origin, f"{len(unlisted) - len(empty)} of the {total} parameters")
    for place, (fqn, value) in zip(unlisted, empty.items(), strict=True):
        shape = tuple(value.shape)
        kinds: Mapping[Kind, torch.dtype] = {"param": value.dtype}
        tensors.append(StoredTensor(fqn=fqn, shape=shape, trainable=False, kinds=kinds, held=(), index=place))
    return sorted(tensors, key=lambda tensor: tensor.index)


def _incomplete(origin: StoredStep, what: str) -> StoreNotFoundError:
    return StoreNotFoundError(
        grpc.StatusCode.NOT_FOUND,
        f"step {origin.step} of job {printable(origin.job)!r}: none of the stores has {what}: give the address of each "
        "store of the job",
    )


def _with_names(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a parameter group with the names of its parameters in place of ranges of indexes."""
    values = dict(settings)
    return {"params": [names[index] for index in from_ranges(values.pop("params"))], **values}
