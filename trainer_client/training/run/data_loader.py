"""Training data in an order that depends neither on the number of ranks nor on interruptions.

This module owns the order of the samples and the cursor, which is a place in this order. The cursor counts the samples
that training steps of all ranks have consumed. It does not count samples that workers have fetched ahead, or that the
loop has taken and not trained on. This module must never use the random generators of the training loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.paramserver import DataSection
from trainer_client.errors import ConfigError


class GlobalOrder(Sampler[list[int]]):
    """A sampler of one rank's micro-batches, as lists of indexes, from the cursor to the end of its epoch.

    The order of an epoch follows from seed and epoch alone. Each step takes the next `batch.train` samples; the last
    step of an epoch is filled up with the epoch's first samples, or left out (`drop_last`). The ranks take turns at the
    samples: sample number i of an epoch goes to rank `i % world_size`. So a step has the same samples on any number of
    ranks, and each rank has those that torch's DistributedSampler would give it, which DeepSpeed's loader uses.

    Attributes:
        size: number of samples of the dataset.
        seed: seed of the order.
        shuffle: whether the order is random; False: the samples come in the order of the dataset.
        epoch: epoch of the next step, counted from 0.
        samples: the cursor: the number of samples of the epoch that steps have consumed.
        end: number of samples of an epoch that steps consume.
    """

    def __init__(
        self,
        size: int,
        batch: BatchSizes,
        rank: int,
        world_size: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool = False,
    ) -> None:
        """Set the cursor to the beginning of epoch 0.

        Raises:
            ConfigError: the dataset has no samples, or fewer than a step if the last step is left out.
        """
        if size == 0:
            raise ConfigError("training_data has no samples")
        if drop_last and size < batch.train:
            raise ConfigError(
                f"training_data has {size} samples, and a step {batch.train}: set dataloader_drop_last to false, or "
                "train_batch_size lower"
            )
        self.size = size
        self.end = size - size % batch.train if drop_last else size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.samples = 0
        self._batch = batch
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        """Return the number of micro-batches in a whole epoch."""
        return -(-self.end // self._batch.train) * self._batch.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        micro = self._batch.micro
        for start in range(self.samples, self.end, self._batch.train):
            for index in range(self._batch.accumulation):
                first = start + index * micro * self._world_size + self._rank
                yield [int(order[(first + turn * self._world_size) % self.size]) for turn in range(micro)]

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, as DistributedSampler's `set_epoch`.

        If the cursor is in the middle of that epoch already, the cursor stays where it is.

        A training loop calls this at the beginning of each epoch. A resumed run may be in the middle of the epoch, and
        goes on from there because of this rule.
        """
        if epoch != self.epoch:
            self.epoch, self.samples = epoch, 0

    def ends_after(self, micro_batches: int) -> bool:
        """Return whether the epoch has no samples left after each rank has taken `micro_batches` more micro-batches."""
        return self.samples + micro_batches * self._batch.micro * self._world_size >= self.end

    def advance(self, micro_batches: int) -> None:
        """Move the cursor past a step that has consumed `micro_batches` micro-batches on each rank."""
        if self.ends_after(micro_batches):
            self.epoch, self.samples = self.epoch + 1, 0
        else:
            self.samples += micro_batches * self._batch.micro * self._world_size

    def seed_here(self) -> int:
        """Return a seed that follows from the place of the cursor and differs from that of any other place."""
        place = f"{self.seed} {self.epoch} {self.samples}".encode()
        return int.from_bytes(hashlib.sha256(place).digest()[:8], "little") >> 1

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        # The order of the samples is the one that torch's DistributedSampler makes from the same seed and epoch. So a
        # script that moves from DeepSpeed to this library keeps its losses.
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator)


class TrainingLoader(DataLoader[Any]):
    """A DataLoader of one rank, each of whose iterations goes from the cursor to the end of the cursor's epoch.

    After a resume, the first iteration begins in the middle of the epoch. If the loop leaves an iteration early, the
    next one continues from the last training step.
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
        # The number of micro-batches that the script's loop has taken from the loader and that are not part of a
        # finished step.
        self._taken = 0
        # The number of micro-batches in `_taken` that the step under way has used.
        self._used = 0
        # The epoch in which the last iteration over the loader began.
        self._epoch = order.epoch
        super().__init__(
            dataset,
            batch_sampler=order,
            collate_fn=collate_fn,
            num_workers=workers,
            persistent_workers=workers > 0,
            # The workers of the loader are spawned and not forked, because a fork would copy locks that threads of gRPC
            # hold.
            multiprocessing_context="spawn" if workers else None,
            # The loader has a random generator of its own. Without it, each iteration would draw from torch's default
            # generator, and so change the random numbers of dropout.
            generator=torch.Generator(),
        )

    @property
    def epoch(self) -> int:
        """The epoch that the next step's samples are from, counted from 0."""
        return self._order.epoch

    @property
    def data_sampler(self) -> GlobalOrder:
        """The order of the samples, under DeepSpeed's name, for `loader.data_sampler.set_epoch(epoch)`."""
        return self._order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises a class of its own
        if self._epoch == self._order.epoch and self._order.ends_after(self._used):
            # The step under way has taken the last samples of this epoch, and goes on with those of the next epoch. So
            # the cursor moves to the next epoch now, and not when the step is made.
            self.finish_step()
        self._taken, self._used, self._epoch = 0, 0, self._order.epoch
        self.generator.manual_seed(self._order.seed_here())
        for micro_batch in super().__iter__():
            self._taken += 1
            yield micro_batch

    def finish_micro_batch(self) -> None:
        """Count a micro-batch of this loader as part of the step under way.

        Each of several backward passes of one micro-batch may call this, and so may a pass without data of this loader,
        because no more micro-batches are counted than the loop has taken from the loader.
        """
        self._used = min(self._used + 1, self._taken)

    def finish_step(self) -> None:
        """Move the cursor past the micro-batches of the step under way, which was made or skipped."""
        self._order.advance(self._used)
        self._taken, self._used = self._taken - self._used, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the values that the order depends on, for a commit."""
        order = self._order
        return {
            "epoch": order.epoch,
            "samples": order.samples,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the cursor to the one that a commit carried, so that the run goes on with the next samples.

        Only the cursor is restored. If the dataset, the seed or `shuffle` differ from the stored ones, this run's are
        used.
        """
        order = self._order
        order.epoch, order.samples = int(state["epoch"]), int(state["samples"])
        self._used = 0
        if order.samples >= order.end:
            order.epoch, order.samples = order.epoch + 1, 0


def make_loader(
    dataset: Dataset[Any] | None,
    batch: BatchSizes,
    section: DataSection,
    *,
    drop_last: bool = False,
    is_managed: bool = True,
    rank: int,
    world_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    """Return the loader for the dataset that the user passes to `initialize`; None without a dataset.

    A dataset with a length gets a TrainingLoader. A dataset without a length (an IterableDataset) is loaded in its own
    order, in micro-batches, and its loader has no cursor.

    Args:
        drop_last: whether the samples that do not fill a last step (without a length: a last micro-batch) are left out.
        is_managed: whether each step has `batch.train` samples. If not, a step has any number of micro-batches, so an
            epoch is filled up to a whole number of micro-batches.

    Raises:
        ConfigError: the dataset has no samples, or too few for a step.
    """
    if dataset is None:
        return None
    if not isinstance(dataset, Sized):
        return DataLoader(dataset, batch_size=batch.micro, collate_fn=collate_fn, drop_last=drop_last)
    if not is_managed:
        batch = BatchSizes(train=batch.micro * world_size, micro=batch.micro, accumulation=1)
    order = GlobalOrder(
        len(dataset), batch, rank, world_size, seed=section.seed, shuffle=section.shuffle, drop_last=drop_last
    )
    return TrainingLoader(dataset, order, workers=section.workers, collate_fn=collate_fn)
