"""The reader of a committed step that has another layout than this run's, and the search for the stores that have it.

The elements of the step are read by parameter name and range: from this rank's own store if that store has them, and if
not, from the job's other stores. This module owns the connections that it opens, and the readers, which keep the step
in those stores as long as it is read. It must never write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Self

import grpc
import torch

from paramserver.contract.buffer_names import name_buffers
from paramserver.contract.printable import printable
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.reader import StoreReaderSync
from trainer_client.client.store_client.types import Kind, StoredTensor
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import StoreNotFoundError, StoreUnavailableError, TrainerClientError
from trainer_client.training.model.large_buffers import unpacked
from trainer_client.training.model.slot_table import Slot

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The address of a store daemon.

    Attributes:
        address: `unix:/path` or `host:port`.
        epoch: the random name of the daemon's start. It identifies the daemon, because on another node another daemon
            may have the same address. "": the daemon may be any that answers at `address`.
        wait_seconds: how long a client waits until the daemon answers.
        held_as: the name under which the daemon has its part of the job, if that part is a replica of another daemon's
            part; "": the name of the job itself.
    """

    address: str
    epoch: str = ""
    wait_seconds: float = _CONNECT_SECONDS
    held_as: str = ""


def connect(store: StoreAddress, credentials: Credentials) -> StoreClientSync:
    """Return a client of the store. Raise StoreError if it cannot be reached or another daemon answers."""
    client = StoreClientSync.connect(store.address, credentials=credentials, timeout=store.wait_seconds)
    if store.epoch in ("", client.epoch):
        return client
    client.close()
    raise StoreUnavailableError(
        grpc.StatusCode.UNAVAILABLE,
        f"the store at {store.address!r} is on another node and cannot be reached under this address: let its daemon "
        "`listen`, and set paramserver.address of its ranks to HOST:PORT, or name that in paramserver.peers",
    )


def large_buffers_in(reader: StoreReaderSync, entry: str) -> dict[str, torch.Tensor]:
    """Return the large buffers in an entry of a step by name; none if the step has no such entry.

    It can raise StoreError.
    """
    with suppress(StoreNotFoundError):
        return unpacked(reader.get(entry))
    return {}


class StepPart:
    """One store's part of a step. The store keeps the step as long as `reader` is open.

    Attributes:
        reader: reads elements of the tensors.
        tensors: the tensors that the store has elements of, by FQN.
    """

    def __init__(self, client: StoreClientSync, job: str, layout: str, step: int, kept: str | None = None) -> None:
        """Open the reader of the kept step named `kept` or, if `kept` is None, of the layout's step.

        It can raise StoreError. The caller closes `client`, which also closes a reader that is still open.
        """
        self.reader: StoreReaderSync = (
            client.read_layout(job, layout, step) if kept is None else client.read_kept(job, kept)
        )
        self.tensors: Mapping[str, StoredTensor] = {tensor.fqn: tensor for tensor in self.reader.tensors()}


def tensors_of(parts: Iterable[StepPart]) -> dict[str, list[StoredTensor]]:
    """Return the entries that stores have of each tensor of a step, by the tensor's name."""
    found: dict[str, list[StoredTensor]] = {}
    for part in parts:
        for fqn, tensor in part.tensors.items():
            found.setdefault(fqn, []).append(tensor)
    return found


def find_parts(
    candidates: Iterable[StoreAddress],
    credentials: Credentials,
    open_part: Callable[[StoreClientSync, StoreAddress], StepPart],
    why_not: Callable[[StoreAddress, StepPart], str | None],
) -> tuple[list[StoreAddress], dict[str, list[StoredTensor]], list[str]]:
    """Ask stores for their parts of a step, and close their readers again.

    Args:
        candidates: the stores.
        credentials: token and TLS files to connect with.
        open_part: opens the part of a store, through a client that this function has connected.
        why_not: returns a text that says why a part does not count; None if it counts.

    Returns:
        The stores whose parts count, each once; the parts of each tensor that these stores have, by the tensor's name;
        and a text about each other store, which says why its part does not count.
    """
    stores: dict[tuple[str, str], StoreAddress] = {}
    parts: list[StepPart] = []
    problems: dict[tuple[str, str], str] = {}
    with ExitStack() as clients:
        for store in dict.fromkeys(candidates):
            place = store.address, store.held_as
            try:
                client = clients.enter_context(connect(store, credentials))
                if (client.epoch, store.held_as) in stores:
                    continue
                part = open_part(client, store)
                problem = why_not(store, part)
            except TrainerClientError as error:
                problems.setdefault(place, f"{store.address}: {error}")
                continue
            if problem is not None:
                problems[place] = problem
                continue
            problems.pop(place, None)
            stores[client.epoch, store.held_as] = replace(store, epoch=client.epoch)
            parts.append(part)
        return list(stores.values()), tensors_of(parts), list(problems.values())


def first_gap(tensors: Mapping[str, Sequence[StoredTensor]], slots: Iterable[Slot]) -> str | None:
    """Return a text that names the first range of a parameter that no store has; None if the stores have all ranges.

    Args:
        tensors: the entries that the stores have of each tensor, by its name.
        slots: the wanted parameters, or tiles of them.
    """
    for slot in slots:
        held = [held for tensor in tensors.get(slot.fqn, ()) for held in tensor.held]
        if (lacking := slot.first_gap(held)) is not None:
            return f"elements of {printable(slot.fqn)!r} from {lacking} of {slot.first + slot.numel} on"
    return None


class StoredStep:
    """Reads the step that a new layout is filled from, in any number of stores. It connects to each when it needs it.

    Args:
        job: name of the job.
        layout: name of the layout that has the step.
        step: number of the step.
        stores: the stores that have parts of the step; earlier ones are preferred.
        credentials: token and TLS files to connect with.
        kept: the name under which the stores keep the step; None: the step is no kept step.
        clients: open connections to the first ones of `stores`, in the same order. The caller closes them.
    """

    def __init__(
        self,
        *,
        job: str,
        layout: str,
        step: int,
        stores: Iterable[StoreAddress],
        credentials: Credentials,
        kept: str | None = None,
        clients: Sequence[StoreClientSync] = (),
    ) -> None:
        self.job = job
        self.step = step
        self._layout = layout
        self._stores = list(stores)
        self._credentials = credentials
        self._kept = kept
        self._clients = clients
        self._parts: list[StepPart] = []
        # The connections and readers of stores that this object has opened. `__exit__` closes them.
        self._held = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._held.close()

    def parts(self) -> Iterator[StepPart]:
        """Yield each store's part of the step, in the order of `stores`. Raise StoreError if one cannot be reached."""
        for index, store in enumerate(self._stores):
            if index == len(self._parts):
                if index < len(self._clients):
                    client = self._clients[index]
                else:
                    client = self._held.enter_context(connect(store, self._credentials))
                part = StepPart(client, store.held_as or self.job, self._layout, self.step, self._kept)
                self._held.callback(part.reader.close)
                self._parts.append(part)
            yield self._parts[index]

    def kinds_of(self, fqn: str) -> Mapping[Kind, torch.dtype]:
        """Return the dtypes of the kinds that are stored of a tensor. It can raise StoreNotFoundError."""
        for part in self.parts():
            if fqn in part.tensors:
                return part.tensors[fqn].kinds
        raise self._missing(f"parameter {fqn!r}")

    def read(self, target: torch.Tensor, fqn: str, kind: Kind, offset: int) -> None:
        """Fill `target` [n], contiguous on the CPU, with elements [offset, offset + n), converted to its dtype.

        Raises:
            StoreNotFoundError: no store has some of the elements.
            StoreError: a store failed.
        """
        done = 0
        while done < target.numel():
            part, count = self._find(fqn, offset + done, target.numel() - done)
            values = target[done : done + count]
            if part.tensors[fqn].kinds[kind] == target.dtype:
                part.reader.get(fqn, kind=kind, offset=offset + done, numel=count, out=values)
            else:
                values.copy_(part.reader.get(fqn, kind=kind, offset=offset + done, numel=count))
            done += count

    def buffers(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the large buffers of a rank by name; those of rank 0 if the step has none of that rank.

        It can raise StoreError.
        """
        for name in (name_buffers(rank), name_buffers(0)):
            for part in self.parts():
                if found := large_buffers_in(part.reader, name):
                    return found
        return {}

    def client_state(self, rank: int) -> bytes | None:
        """Return the client state that a rank stored with the commit of the step; None if there was no such rank."""
        for part in self.parts():
            try:
                return part.reader.client_state(rank)
            except StoreNotFoundError:
                continue
        return None

    def ranks(self) -> list[int]:
        """Return the ranks that stored a client state with the commit of the step. It can raise StoreError."""
        return sorted({rank for part in self.parts() for rank in part.reader.ranks})

    def _find(self, fqn: str, offset: int, numel: int) -> tuple[StepPart, int]:
        """Return a store that has element `offset`, and how many of the `numel` elements from `offset` on it has."""
        for part in self.parts():
            for first, count in part.tensors[fqn].held if fqn in part.tensors else ():
                if first <= offset < first + count:
                    return part, min(numel, first + count - offset)
        raise self._missing(f"elements [{offset}, {offset + numel}) of parameter {fqn!r}")

    def _missing(self, what: str) -> StoreNotFoundError:
        stores = ", ".join(store.address for store in self._stores)
        return StoreNotFoundError(
            grpc.StatusCode.NOT_FOUND, f"step {self.step} of job {self.job!r}: {what} is on none of the stores {stores}"
        )
