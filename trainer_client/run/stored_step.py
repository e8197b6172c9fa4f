"""A committed step of a job in another layout than this run's, wherever its shards are: read by name and range,
whatever the partition was, from this rank's own store where that holds them, else from the job's other stores.

Owns the connections and readers, which keep the step in those stores while it is read. Must never write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import grpc
import torch

from trainer_client.errors import StoreNotFoundError, StoreUnavailableError
from trainer_client.store_client.client_sync import StoreClientSync
from trainer_client.store_client.reader import StoreReaderSync
from trainer_client.store_client.types import Kind, StoredTensor
from trainer_client.transport.credentials import Credentials

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """A store daemon as a rank can reach it. `epoch` tells it from another one at that address, on another node; "":
    whoever answers is meant."""

    address: str
    epoch: str = ""


def connect(store: StoreAddress, credentials: Credentials) -> StoreClientSync:
    """Raises StoreError where the store cannot be reached, or another one answers."""
    client = StoreClientSync.connect(store.address, credentials=credentials, timeout=_CONNECT_SECONDS)
    if store.epoch in ("", client.epoch):
        return client
    client.close()
    raise StoreUnavailableError(
        grpc.StatusCode.UNAVAILABLE,
        f"the store at {store.address!r} is on another node and cannot be reached under this address: let its daemon "
        "`listen`, and set paramserver.address of its ranks to HOST:PORT",
    )


class Holder:
    """One store's part of the step.

    Attributes:
        tensors: what it has elements of, by FQN.
    """

    def __init__(self, client: StoreClientSync, job: str, layout: str, step: int) -> None:
        """Takes the connection over. Raises StoreError."""
        self._client = client
        try:
            self.reader: StoreReaderSync = client.read_layout(job, layout, step)
            self.tensors: Mapping[str, StoredTensor] = {tensor.fqn: tensor for tensor in self.reader.tensors()}
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """Lets go of the step."""
        self.reader.close()
        self._client.close()


class Origin:
    """Connects to a store when something is first asked of it.

    Args:
        stores: all that hold a part of the step; earlier ones are preferred.
    """

    def __init__(
        self, *, job: str, layout: str, step: int, stores: Iterable[StoreAddress], credentials: Credentials
    ) -> None:
        self.job = job
        self.step = step
        self._layout = layout
        self._stores = list(stores)
        self._credentials = credentials
        self._holders: list[Holder] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for holder in self._holders:
            holder.close()

    def holders(self) -> Iterator[Holder]:
        """The stores' parts, in order. Raises StoreError for a store that cannot be reached."""
        for index, store in enumerate(self._stores):
            if index == len(self._holders):
                client = connect(store, self._credentials)
                self._holders.append(Holder(client, self.job, self._layout, self.step))
            yield self._holders[index]

    def kinds_of(self, fqn: str) -> Mapping[Kind, torch.dtype]:
        """What is stored of a tensor, with the types. Raises StoreNotFoundError."""
        for holder in self.holders():
            if fqn in holder.tensors:
                return holder.tensors[fqn].kinds
        raise self._missing(f"parameter {fqn!r}")

    def read(self, target: torch.Tensor, fqn: str, kind: Kind, offset: int) -> None:
        """Fills `target` [n], contiguous, on the CPU, with elements from `offset` on, converted to its type.

        Raises:
            StoreNotFoundError: no store has some of them.
            StoreError: a store failed.
        """
        done = 0
        while done < target.numel():
            holder, count = self._find(fqn, offset + done, target.numel() - done)
            part = target[done : done + count]
            if holder.tensors[fqn].kinds[kind] == target.dtype:
                holder.reader.get(fqn, kind=kind, offset=offset + done, numel=count, out=part)
            else:
                part.copy_(holder.reader.get(fqn, kind=kind, offset=offset + done, numel=count))
            done += count

    def client_state(self, rank: int) -> bytes | None:
        """What a rank of the run that made the step gave to the commit; None: there was no such rank."""
        for holder in self.holders():
            try:
                return holder.reader.client_state(rank)
            except StoreNotFoundError:
                continue
        return None

    def _find(self, fqn: str, offset: int, numel: int) -> tuple[Holder, int]:
        """A store that has the element, and how many of those that follow."""
        for holder in self.holders():
            for first, count in holder.tensors[fqn].held if fqn in holder.tensors else ():
                if first <= offset < first + count:
                    return holder, min(numel, first + count - offset)
        raise self._missing(f"elements [{offset}, {offset + numel}) of parameter {fqn!r}")

    def _missing(self, what: str) -> StoreNotFoundError:
        stores = ", ".join(store.address for store in self._stores)
        return StoreNotFoundError(
            grpc.StatusCode.NOT_FOUND, f"step {self.step} of job {self.job!r}: {what} is on none of the stores {stores}"
        )
