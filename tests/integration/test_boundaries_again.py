"""Boundaries of activation checkpoints that are computed again: the same bits, whatever the model does around them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import trainer_client
from tests.integration.support.boundary_training import (
    AGAIN,
    BLOCKS,
    SMALL,
    TOKENS,
    WIDTH,
    Block,
    Model,
    Training,
    assert_same,
    config,
    trained,
)
from tests.integration.support.daemon import Daemon
from tests.integration.support.parking import assert_nothing_left, small_and_plenty
from trainer_client.training.step.segments import Segment, Segments


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with too little memory for all boundaries, and one with plenty."""
    with small_and_plenty(tmp_path_factory.mktemp("again"), SMALL) as both:
        yield both


class Inside(Block):
    """A block that has the checkpoint within its forward, as those of transformers have."""

    def forward(self, *args: Any) -> Any:
        """Return what the block does."""
        return checkpoint(partial(Block.forward, self), *args, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "autocast", "accumulation"), [(Block, False, 3), (Block, True, 1), (Inside, False, 1)]
)
def test_boundaries_that_are_computed_again_give_the_same_bits(
    daemons: tuple[Daemon, Daemon], kind: type[Block], autocast: bool, accumulation: int
) -> None:
    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.__class__ = kind
        if kind is Inside:
            model.checkpoint = lambda block, *args, use_reentrant: block(*args)
        # A computation that calls one of these hooks twice, or not at all, has other values.
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 1.25, *args[2:]))
            block.register_forward_hook(lambda *given: given[-1] * 0.75)

    results = []
    for number, (offload, again) in enumerate(((False, False), (True, True))):
        job = f"again-{kind.__name__}-{autocast}"
        given = config(daemons[number], job, offload=offload, activations=AGAIN | {"recompute": again})
        if autocast:
            given["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        training = Training(given, reentrant=False, accumulation=accumulation, prepare=prepare)
        # These hooks are called before those of the engine.
        for block in training.model.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 0.9, *args[2:]), prepend=True)
        for step in range(2):
            training.step(step)
        report = training.engine.step_report()
        assert report is not None
        # The outputs of blocks 0, 2, 4, 6 and 8 are not kept, and that of block 10 stays because it is the newest.
        itemsize = 2 if autocast else 4
        assert report.boundaries["again"] == (accumulation * 5 * TOKENS * WIDTH * itemsize if again else 0)
        results.append(training.finish())
    assert_same(results[1], results[0])
    for daemon in daemons:
        assert_nothing_left(daemon)


class Borrowing(Block):
    """A block that computes with a weight of another unit, too."""

    lenders: Sequence[nn.Linear]

    def forward(self, *args: Any) -> Any:
        """Return what the block does, and add a column [WIDTH, 1] of the other unit's weight."""
        return super().forward(*args) + self.lenders[0].weight[:, :1]


@pytest.mark.parametrize("special", ["tiles", "a weight of another unit"])
def test_tiles_and_weights_of_other_units_have_the_same_bits_when_computed_again(
    daemons: tuple[Daemon, Daemon], special: str
) -> None:
    def prepare(model: Model) -> None:
        for block in cast(Iterable[Block], model.blocks if special != "tiles" else []):
            block.__class__ = Borrowing
            cast(Borrowing, block).lenders = [model.first]

    # The weight of a block has 16 KiB.
    section: dict[str, Any] = {"tiling": {"largest_tile": "4KiB"}} if special == "tiles" else {}
    results = []
    for number, again in enumerate((False, True)):
        job = f"{special} {again}"
        given = config(daemons[number], job, activations=AGAIN | {"recompute": again}, **section)
        training = Training(given, reentrant=False, accumulation=2, prepare=prepare)
        for step in range(2):
            training.step(step)
        report = training.engine.step_report()
        assert report is not None
        assert report.boundaries["again"] == (2 * 5 * TOKENS * WIDTH * 4 if again else 0)
        results.append(training.finish())
    assert_same(results[1], results[0])
    for daemon in daemons:
        assert_nothing_left(daemon)


def test_hooks_that_draw_random_numbers_before_a_block_have_them_again(daemons: tuple[Daemon, Daemon]) -> None:
    """The generators go on from the hook's numbers to those of the dropout."""

    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.register_forward_hook(lambda *given: nn.functional.dropout(given[-1], 0.5))

    def noisy(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0], args[1] + 0.1 * torch.randn_like(args[1]), *args[2:])

    results = []
    for number, again in enumerate((False, True)):
        given = config(daemons[number], f"drawing {again}", offload=again, activations=AGAIN | {"recompute": again})
        training = Training(given, reentrant=False, prepare=prepare)
        for block in training.model.blocks:
            block.register_forward_pre_hook(noisy, prepend=True)
        torch.manual_seed(3)
        training.step(0)
        report = training.engine.step_report()
        assert report is not None and bool(report.boundaries["again"]) is again
        results.append(training.finish())
    assert_same(results[1], results[0])


class CutModel(nn.Module):
    """A model that cuts its sequence after the first block, as one does that learns the length of its batch there."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss for `tokens` [TOKENS, WIDTH]."""
        hidden = self.first(tokens)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
            if block is self.blocks[0]:
                hidden = hidden[: self.longest]
        return hidden.square().mean()


def test_the_same_blocks_are_computed_again_whatever_the_length_of_the_batch(daemons: tuple[Daemon, Daemon]) -> None:
    """Ranks of different lengths would wait for each other's blocks otherwise, if they gather them together."""
    numbers = []
    for longest in (TOKENS, TOKENS // 2):
        engine, *_ = trainer_client.initialize(
            model=CutModel(longest), config=config(daemons[1], f"cut {longest}", activations=AGAIN)
        )
        with engine:
            engine.backward(engine(torch.randn(TOKENS, WIDTH)))
            engine.step()
            report = engine.step_report()
            assert report is not None
            numbers.append(report.boundaries["again"] / (longest * WIDTH * 4))
    # The outputs of the blocks 1, 3, 5 and 7. That of block 9 stays because it is the newest.
    assert numbers == [4, 4]


class ExitingModel(Model):
    """A model with a second loss, of the output of its fifth block, which is computed again."""

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return both losses."""
        losses = [hidden.square().mean() for hidden in self.outputs(tokens)]
        return losses[4], losses[-1]


def test_a_block_that_runs_again_after_its_own_backward_leaves_nothing(
    daemons: tuple[Daemon, Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks on the graph of that forward, which has no backward, once kept its inputs for good."""
    inputs = []
    run_again = Segments._run

    def watched(self: Segments, segment: Segment, *args: Any) -> torch.Tensor:
        def note(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            inputs.append(StorageWeakRef(given[0].untyped_storage()))

        handle = segment.module.register_forward_pre_hook(note)
        try:
            return run_again(self, segment, *args)
        finally:
            handle.remove()

    monkeypatch.setattr(Segments, "_run", watched)
    torch.manual_seed(1)
    model = ExitingModel(reentrant=False)
    engine, *_ = trainer_client.initialize(model=model, config=config(daemons[1], "exits", activations=AGAIN))
    with engine:
        for _ in range(2):
            early, late = engine(torch.randn(TOKENS, WIDTH))
            engine.backward(early, retain_graph=True)
            engine.backward(late)
            engine.step()
            del early, late
        gc.collect()
        # In each step five blocks run again, one of them in the pass after its own.
        assert len(inputs) == 10
        assert all(reference.expired() for reference in inputs)
    assert_nothing_left(daemons[1])


def enclosing(block: Block, *args: Any, use_reentrant: bool) -> Any:
    """Checkpoint a function that calls the block, and may do more."""
    return checkpoint(lambda *given: block(*given) * 1.5, *args, use_reentrant=use_reentrant)


class Scaled(Block):
    """A block that has a factor."""

    factor = 1.0

    def forward(self, *args: Any) -> torch.Tensor:
        """Return what the block does, times the factor."""
        return super().forward(*args) * self.factor


def halved(block: Block, *args: Any) -> Any:
    """Call a block, which is a Scaled, with another factor."""
    cast(Scaled, block).factor = 0.5
    try:
        return block(*args)
    finally:
        cast(Scaled, block).factor = 1.0


def partly_enclosing(block: Block, *args: Any, use_reentrant: bool) -> Any:
    """Checkpoint a partial of a function that does more than to call the block."""
    return checkpoint(partial(halved, block), *args, use_reentrant=use_reentrant)


@pytest.mark.parametrize(
    ("reentrant", "checkpoints"), [(True, checkpoint), (False, enclosing), (False, partly_enclosing)]
)
def test_checkpoints_that_are_reentrant_or_enclose_more_than_a_block_compute_no_boundary_again(
    daemons: tuple[Daemon, Daemon], reentrant: bool, checkpoints: Callable[..., Any]
) -> None:
    def enclose(model: Model) -> None:
        model.checkpoint = checkpoints
        for block in model.blocks:
            block.__class__ = Scaled

    how: dict[str, Any] = {"reentrant": reentrant, "prepare": enclose}
    name = checkpoints.__name__
    expected = trained(1, config(daemons[1], f"not-again-device-{name}", offload=False), **how)
    training = Training(config(daemons[0], f"not-again-{name}", activations=AGAIN), **how)
    training.step(0)
    report = training.engine.step_report()
    assert report is not None and report.boundaries["again"] == 0
    assert_same(training.finish(), expected)


def test_a_run_whose_boundaries_find_no_room_computes_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Daemon(tmp_path / "full", {"host_budget": SMALL, "nvme_budget": "4MiB"}) as daemon:
        training = Training(config(daemon, "full"), reentrant=False)
        again = []
        with caplog.at_level(logging.INFO, "trainer_client.training.step.recompute_choice"), training.engine:
            for step in range(13):
                training.step(step)
                report = training.engine.step_report()
                assert report is not None
                again.append(report.boundaries["again"])
        assert again == [0] * 6 + [5 * TOKENS * WIDTH * 4] * 7
        assert "is computed again from now on" in caplog.text
        assert_nothing_left(daemon)
