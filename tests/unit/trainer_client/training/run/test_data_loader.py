"""The order of the training data: a step has the same samples on any number of ranks, also after an interruption."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.paramserver import DataSection
from trainer_client.errors import ConfigError
from trainer_client.training.run.data_loader import GlobalOrder, TrainingLoader, make_loader
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.step.gradients import ReductionSchedule

SIZE, TRAIN = 50, 12


class Squares(Dataset[int]):
    """A dataset in the module's namespace, so that a worker process can unpickle it."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index**2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def batch_of(world_size: int, accumulation: int = 1) -> BatchSizes:
    return BatchSizes(train=TRAIN, micro=TRAIN // world_size // accumulation, accumulation=accumulation)


def loader_of(
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    section: DataSection | None = None,
    *,
    is_managed: bool = True,
) -> TrainingLoader:
    loader = make_loader(
        Squares(),
        batch_of(world_size, accumulation),
        section or DataSection(),
        is_managed=is_managed,
        rank=rank,
        world_size=world_size,
        collate_fn=None,
    )
    assert isinstance(loader, TrainingLoader)
    return loader


def steps_of(world_size: int, accumulation: int, epochs: int = 2) -> list[list[int]]:
    """Return the samples of each global step, sorted."""
    batch = batch_of(world_size, accumulation)
    orders = [GlobalOrder(SIZE, batch, rank, world_size, seed=7, shuffle=True) for rank in range(world_size)]
    steps = []
    for _ in range(epochs):
        micro_batches = [list(order) for order in orders]
        for first in range(0, len(micro_batches[0]), accumulation):
            of_step = [m for rank in micro_batches for m in rank[first : first + accumulation]]
            steps.append(sorted(itertools.chain(*of_step)))
            for order in orders:
                order.advance(accumulation)
    return steps


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 3), (2, 1), (3, 2), (4, 3), (12, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(world_size: int, accumulation: int) -> None:
    assert steps_of(world_size, accumulation) == steps_of(1, 1)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 3)])
def test_each_rank_has_the_samples_of_torchs_distributed_sampler(world_size: int, accumulation: int) -> None:
    """DeepSpeed's loader uses it, so a script that moves here sees the same batches, as far as they are full."""
    for rank in range(world_size):
        loader = loader_of(rank, world_size, accumulation)
        sampler: DistributedSampler[int] = DistributedSampler(Squares(), num_replicas=world_size, rank=rank)
        expected = DataLoader(Squares(), batch_size=TRAIN // world_size // accumulation, sampler=sampler)
        for epoch in (0, 1, 4):
            loader.data_sampler.set_epoch(epoch)
            sampler.set_epoch(epoch)
            full = SIZE // TRAIN * accumulation
            ours, torchs = ([batch.tolist() for batch in itertools.islice(of, full)] for of in (loader, expected))
            assert ours == torchs


def test_setting_the_epoch_that_a_resumed_run_is_in_stays_in_its_middle() -> None:
    order = GlobalOrder(SIZE, batch_of(1), 0, 1, seed=7, shuffle=True)
    whole = list(order)
    order.advance(1)
    order.set_epoch(0)
    assert list(order) == whole[1:]
    order.set_epoch(1)
    assert (order.epoch, order.samples) == (1, 0)


def test_an_epoch_has_every_sample_and_fills_its_last_step_up_with_its_first() -> None:
    order = GlobalOrder(SIZE, batch_of(1), 0, 1, seed=7, shuffle=True)
    first = list(itertools.chain(*order))
    assert len(order) == len(first) // TRAIN == 5
    assert sorted(first[:SIZE]) == list(range(SIZE))
    assert first[SIZE:] == first[: len(first) - SIZE]
    order.epoch = 1
    second = list(itertools.chain(*order))
    assert second != first and sorted(second[:SIZE]) == list(range(SIZE))


def test_the_last_step_of_an_epoch_can_be_left_out() -> None:
    order = GlobalOrder(SIZE, batch_of(1), 0, 1, seed=7, shuffle=True, drop_last=True)
    whole = GlobalOrder(SIZE, batch_of(1), 0, 1, seed=7, shuffle=True)
    taken = list(order)
    assert taken == list(whole)[:4] and len(order) == len(taken)
    for _ in taken:
        order.advance(1)
    assert (order.epoch, order.samples) == (1, 0)
    with pytest.raises(ConfigError, match="training_data has 3 samples, and a step 12"):
        GlobalOrder(3, batch_of(1), 0, 1, seed=7, shuffle=True, drop_last=True)


def test_order_follows_from_the_seed_and_can_be_the_datasets() -> None:
    first, same, other, plain = (
        list(GlobalOrder(SIZE, batch_of(1), 0, 1, seed=seed, shuffle=shuffle))
        for seed, shuffle in ((1, True), (1, True), (2, True), (2, False))
    )
    assert first == same != other
    assert list(itertools.chain(*plain))[:SIZE] == list(range(SIZE))


def test_the_cursor_counts_what_steps_consumed_not_what_was_taken() -> None:
    loader = loader_of()
    batches = iter(loader)
    taken = [next(batches).tolist() for _ in range(3)]
    loader.finish_micro_batch()
    loader.finish_step()
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, TRAIN)
    # The loop took these micro-batches and did not train on them, so the loader yields them again.
    assert next(iter(loader)).tolist() == taken[1]
    # A step that took no batch of this loader does not move its cursor.
    other = loader_of()
    other.finish_micro_batch()
    other.finish_step()
    assert other.state_dict()["samples"] == 0


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("batches_of_a_step", [1, 2, 3, 13, 20])
def test_a_step_of_any_number_of_micro_batches_moves_the_cursor_past_all_of_them(
    batches_of_a_step: int, sets_epoch: bool, passes: int
) -> None:
    """The loop makes its steps itself, also with micro-batches of two epochs, and 13 of them are an epoch."""
    loader = loader_of(accumulation=3, is_managed=False)
    micro_batches = MicroBatches(batch_of(1, 3), ReductionSchedule.MICRO_BATCH, loader, is_managed=False)
    taken: list[list[int]] = []
    for epoch in range(3):
        if sets_epoch:
            loader.data_sampler.set_epoch(epoch)
        for batch in loader:
            taken.append(batch.tolist())
            for _ in range(passes):
                micro_batches.end_backward()
            if len(taken) % batches_of_a_step == 0:
                micro_batches.end()
                micro_batches.end_step()
                place = divmod(len(taken), len(loader))
                assert (loader.epoch, loader.state_dict()["samples"]) == (place[0], place[1] * 4)
    orders = [loader_of(accumulation=3, is_managed=False) for _ in range(3)]
    for epoch, order in enumerate(orders):
        order.data_sampler.set_epoch(epoch)
    assert len(loader) == 13
    assert taken == [batch.tolist() for order in orders for batch in order]


def test_backward_passes_that_are_reduced_together_each_have_a_micro_batch() -> None:
    loader = loader_of()
    micro_batches = MicroBatches(batch_of(1), ReductionSchedule.MICRO_BATCH, loader)
    batches = iter(loader)
    samples = []
    for coalesced in (3, 0):
        with micro_batches.coalesced() if coalesced else nullcontext():
            for _ in range(coalesced or 1):
                next(batches)
                micro_batches.end_backward()
        micro_batches.end()
        micro_batches.end_step()
        samples.append(loader.state_dict()["samples"])
    assert samples == [3 * TRAIN, 4 * TRAIN]


def test_passes_that_were_dropped_do_not_move_a_cursor_that_is_loaded() -> None:
    loader = loader_of(is_managed=False)
    state = loader.state_dict()
    for _ in loader:
        loader.finish_micro_batch()
    loader.load_state_dict(state)
    assert (len(list(loader)), loader.epoch) == (5, 0)


@pytest.mark.parametrize("world_sizes", [(2, 2), (2, 3), (3, 1)])
def test_a_cursor_goes_on_in_the_middle_of_an_epoch_and_beyond_its_end(world_sizes: tuple[int, int]) -> None:
    def train(loaders: list[TrainingLoader], steps: int) -> list[list[int]]:
        made: list[list[int]] = []
        while len(made) < steps:
            for micro_batches in zip(*loaders, strict=True):
                made.append(sorted(int(value) for micro_batch in micro_batches for value in micro_batch))
                for loader in loaders:
                    loader.finish_micro_batch()
                    loader.finish_step()
                if len(made) == steps:
                    break
        return made

    before, after = ([loader_of(rank, size) for rank in range(size)] for size in world_sizes)
    expected = train([loader_of()], 8)

    made = train(before, 3)
    state = json.loads(json.dumps(before[0].state_dict()))
    for loader in after:
        loader.load_state_dict(state)
    made += train(after, 5)

    assert made == expected
    assert {loader.epoch for loader in after} == {1}


def test_loading_uses_no_random_number_of_the_training_loop() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(loader_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_fetch_ahead_without_moving_the_cursor() -> None:
    loader = loader_of(section=DataSection(workers=1))
    batches = iter(loader)
    taken = next(batches).tolist()
    assert loader.state_dict()["samples"] == 0
    loader.finish_micro_batch()
    loader.finish_step()
    assert taken == next(iter(loader_of())).tolist()
    assert loader.state_dict()["samples"] == TRAIN


def test_a_cursor_beyond_the_end_of_other_data_is_the_next_epoch() -> None:
    loader = loader_of()
    loader.load_state_dict(loader.state_dict() | {"seed": 9, "size": 80, "samples": 72})
    assert (loader.epoch, loader.state_dict()["samples"]) == (1, 0)


def test_a_stream_is_loaded_as_it_comes_and_nothing_is_refused() -> None:
    def make(dataset: Dataset[int], *, drop_last: bool = False) -> object:
        return make_loader(
            dataset, batch_of(3), DataSection(), drop_last=drop_last, rank=0, world_size=3, collate_fn=None
        )

    loader = make(Stream())
    assert isinstance(loader, DataLoader) and not isinstance(loader, TrainingLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]
    shorter = make(Stream(), drop_last=True)
    assert isinstance(shorter, DataLoader)
    assert [batch.tolist() for batch in shorter] == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError, match="training_data has no samples"):
        GlobalOrder(0, batch_of(1), 0, 1, seed=0, shuffle=True)
