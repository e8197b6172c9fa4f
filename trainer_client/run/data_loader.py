"""Training data in an order that neither the number of ranks nor an interruption changes.

Owns the order of the samples and the cursor in it, which counts what training steps have consumed, in samples of all
ranks together: not what workers fetched ahead, nor what the loop took and did not train on. Must never use the random
generators of the training loop.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_client.config.training_config import BatchSizes, DataSection
from trainer_client.errors import ConfigError

log = logging.getLogger(__name__)


class GlobalOrder(Sampler[list[int]]):
    """The micro-batches of one rank, as indices, from the cursor to the end of its epoch.

    The order of an epoch follows from seed and epoch alone. Steps take `batch.train` samples after each other from it,
    the last one fills up with the epoch's first ones; micro-batch j of a step on rank r has the samples from
    `(j * world_size + r) * batch.micro` of the step's on. So a step's samples are the same on any number of ranks.

    Attributes:
        epoch: of the next step, from 0.
        samples: how many of the epoch were consumed by steps.
    """

    def __init__(self, size: int, batch: BatchSizes, rank: int, world_size: int, *, seed: int, shuffle: bool) -> None:
        """Raises ConfigError for a dataset without samples."""
        if size == 0:
            raise ConfigError("training_data has no samples")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.samples = 0
        self._batch = batch
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        """Micro-batches of a whole epoch."""
        return -(-self.size // self._batch.train) * self._batch.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        micro = self._batch.micro
        for start in range(self.samples, self.size, self._batch.train):
            for index in range(self._batch.accumulation):
                first = start + (index * self._world_size + self._rank) * micro
                yield [int(order[sample % self.size]) for sample in range(first, first + micro)]

    def advance(self, micro_batches: int) -> None:
        """A step has consumed so many micro-batches on each rank."""
        self.samples += micro_batches * self._batch.micro * self._world_size
        if self.samples >= self.size:
            self.epoch, self.samples = self.epoch + 1, 0

    def seed_here(self) -> int:
        """A seed that no other place in the data has."""
        place = f"{self.seed} {self.epoch} {self.samples}".encode()
        return int.from_bytes(hashlib.sha256(place).digest()[:8], "little") >> 1

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(self.seed)
        # Neighbouring seeds are no neighbours in the order: each epoch has one of its own, drawn from the first.
        generator.manual_seed(int(torch.randint(1 << 62, (self.epoch + 1,), generator=generator)[-1]))
        return torch.randperm(self.size, generator=generator)


class TrainingLoader(DataLoader[Any]):
    """A loader whose every iteration goes from where the training steps are to the end of that epoch.

    After a resume the first iteration goes on in the middle of the epoch; one that the loop has left early is gone on
    with by the next. `epoch` says which epoch comes next.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: GlobalOrder,
        *,
        workers: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._order = order
        self._taken = 0  # micro-batches, by the loop, that are not part of a step yet
        self._used = 0  # of these, in the step under way
        super().__init__(
            dataset,
            batch_sampler=order,
            collate_fn=collate_fn,
            num_workers=workers,
            persistent_workers=workers > 0,
            # A fork would copy gRPC's threads' locks.
            multiprocessing_context="spawn" if workers else None,
            # Otherwise each iteration draws from torch's own, which dropout uses.
            generator=torch.Generator(),
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._order.epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises a class of its own
        self._taken = self._used = 0
        self.generator.manual_seed(self._order.seed_here())
        for micro_batch in super().__iter__():
            self._taken += 1
            yield micro_batch

    def finish_micro_batch(self) -> None:
        """One more is in the step under way. One of other data than the loader's does not count."""
        self._used = min(self._used + 1, self._taken)

    def finish_step(self) -> None:
        """The step under way was made, or skipped."""
        self._order.advance(self._used)
        self._taken, self._used = self._taken - self._used, 0

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what the order depends on."""
        order = self._order
        return {
            "epoch": order.epoch,
            "samples": order.samples,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a cursor; warns where the samples that come next are not those that would have come."""
        order = self._order
        order.epoch, order.samples = int(state["epoch"]), int(state["samples"])
        now = self.state_dict()
        if changed := [f"{key} was {state[key]!r} and is {now[key]!r}" for key in now if state[key] != now[key]]:
            log.warning("the training data have another order than before: %s", "; ".join(changed))
        if order.samples >= order.size:
            order.epoch, order.samples = order.epoch + 1, 0


def make_loader(
    dataset: Dataset[Any] | None,
    batch: BatchSizes,
    section: DataSection,
    *,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    """The loader of `initialize`: a TrainingLoader for a dataset that has a length and takes indices. A stream
    (IterableDataset) is loaded as it comes, in micro-batches: its order and its cursor are its own business.

    Raises:
        ConfigError: the dataset has no samples.
    """
    if dataset is None:
        return None
    if not isinstance(dataset, Sized):
        return DataLoader(dataset, batch_size=batch.micro, collate_fn=collate_fn)
    order = GlobalOrder(len(dataset), batch, rank, world_size, seed=section.seed, shuffle=section.shuffle)
    return TrainingLoader(dataset, order, workers=section.workers, collate_fn=collate_fn)
