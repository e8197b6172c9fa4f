"""The rehearsal counts what a pass computes and holds, and the heap keeps what malloc would."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.heap import Heap
from trainer_client.plan.probe import seconds_of
from trainer_client.plan.rehearsal import GradientRule, Rehearsal, rehearse

WIDTH, SAMPLES = 256, 8
ROWS = 512
BOUNDARY = ROWS * WIDTH * 4
MIB = 1 << 20
NO_GRADIENTS = GradientRule(group_of={}, full_bytes={}, partition_bytes={}, kept_bytes={}, is_reduced_at_once=True)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class Block(nn.Module):
    """A block whose inner result is four times as large as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.relu(self.wide(hidden)))


class Checkpointed(nn.Module):
    """A first layer, and blocks that are computed again in the backward pass."""

    def __init__(self, blocks: int, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden.square().mean()


def checkpointed(blocks: int, *, reentrant: bool, offload: OffloadRule | None = None) -> Rehearsal:
    return rehearse(
        partial(Checkpointed, blocks, reentrant=reentrant),
        lambda _: {"hidden": torch.zeros(ROWS, WIDTH)},
        None,
        offload,
    )


def rehearsal(dtype: torch.dtype | None = None) -> Rehearsal:
    return rehearse(Tower, lambda _: {"hidden": torch.zeros(SAMPLES, WIDTH, dtype=dtype)}, dtype)


def live_bytes(found: Rehearsal) -> int:
    """Return the most bytes of live tensors at once, if each gradient is dropped as soon as it is computed."""
    return found.peak_bytes(NO_GRADIENTS, in_heap=False)


def rule(*, full: int, partition: int, at_once: bool) -> GradientRule:
    names = [f"layers.{index}.weight" for index in range(3)]
    return GradientRule(
        group_of={name: name for name in names},
        full_bytes=dict.fromkeys(names, full),
        partition_bytes=dict.fromkeys(names, partition),
        kept_bytes={},
        is_reduced_at_once=at_once,
    )


def test_the_operations_are_those_of_forward_and_backward() -> None:
    found = rehearsal()

    # Each layer has one product forward, and two backward, but the first has no gradient of its input.
    assert found.flops == 8 * 2 * SAMPLES * WIDTH * WIDTH
    assert sum(count for one, count in found.operations.items() if one.name == "aten.mm.default") == 8
    assert all(seconds_of(operation, "cpu") > 0 for operation in found.operations)


def test_the_peak_follows_the_gradients_that_are_kept() -> None:
    found, weight = rehearsal(), WIDTH * WIDTH * 4
    bare = found.peak_bytes(rule(full=0, partition=0, at_once=True), in_heap=False)

    assert weight < bare < 1.2 * weight
    # The last gradient is there while the partitions of all three are.
    assert found.peak_bytes(rule(full=0, partition=MIB, at_once=True), in_heap=False) - bare in range(
        2 * MIB, 3 * MIB + 1
    )
    one_at_once = found.peak_bytes(rule(full=MIB, partition=0, at_once=True), in_heap=False)
    all_until_the_end = found.peak_bytes(rule(full=MIB, partition=0, at_once=False), in_heap=False)
    assert all_until_the_end - one_at_once == pytest.approx(2 * MIB, rel=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_adds_its_input_to_the_peak_and_nothing_else(reentrant: bool) -> None:
    few, many = (checkpointed(count, reentrant=reentrant) for count in (6, 10))

    assert live_bytes(many) - live_bytes(few) == 4 * BOUNDARY


@pytest.mark.parametrize("reentrant", [True, False])
def test_boundaries_that_move_to_the_store_are_not_in_the_peak(reentrant: bool) -> None:
    def found(blocks: int, kept: int = 0, smallest: int = 1) -> Rehearsal:
        return checkpointed(blocks, reentrant=reentrant, offload=OffloadRule(smallest_bytes=smallest, kept_bytes=kept))

    few, many = found(6), found(10)
    assert list(few.boundaries) == [BOUNDARY] * 5 and list(many.boundaries) == [BOUNDARY] * 9
    assert many.saved_boundary_bytes == 10 * BOUNDARY
    assert live_bytes(few) == live_bytes(many)
    # Three boundaries that stay because of a larger `kept` are one more than the two that stay anyway.
    kept = found(10, kept=3 * BOUNDARY)
    assert list(kept.boundaries) == [BOUNDARY] * 7
    assert live_bytes(kept) == live_bytes(many) + BOUNDARY
    assert found(10, smallest=BOUNDARY + 1).boundaries == ()
    assert found(10).flops == checkpointed(10, reentrant=reentrant).flops


class Shared(nn.Module):
    """One block that is computed three times, and again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for _ in range(3):
            hidden = checkpoint(self.block, hidden, use_reentrant=True)
        return hidden.square().mean()


@pytest.mark.parametrize("in_heap", [True, False])
def test_a_gradient_may_come_again_after_its_group_was_reduced(in_heap: bool) -> None:
    found = rehearse(Shared, lambda _: {"hidden": torch.zeros(ROWS, WIDTH)}, None)

    def peak(full: int) -> int:
        names = [name for name, _ in Shared().named_parameters()]
        return found.peak_bytes(
            GradientRule(
                group_of={name: name.partition(".")[0] for name in names},
                full_bytes={"first": 0, "block": full},
                partition_bytes={"first": 0, "block": 0},
                kept_bytes={},
                is_reduced_at_once=True,
            ),
            in_heap=in_heap,
        )

    assert peak(64 * MIB) - peak(0) == pytest.approx(64 * MIB, rel=0.1)


def test_parameters_of_another_dtype_halve_the_bytes() -> None:
    wide, narrow = (
        rehearsal(dtype).peak_bytes(rule(full=0, partition=0, at_once=True), in_heap=False)
        for dtype in (None, torch.bfloat16)
    )

    assert 0.45 * wide < narrow < 0.55 * wide


def test_a_hole_stays_until_a_block_fits_into_it() -> None:
    heap = Heap()
    for name in ("a", "b", "c"):
        heap.allocate(name, MIB)
    heap.free("a")
    heap.free("b")
    before = heap.peak
    heap.allocate("smaller", MIB // 2)
    heap.allocate("equal", MIB)
    assert heap.peak == before
    heap.allocate("larger", MIB)
    assert heap.peak > before


def test_large_blocks_and_the_top_of_the_heap_go_back_to_the_kernel() -> None:
    heap = Heap()
    heap.allocate("mapped", 40 * MIB)
    heap.free("mapped")
    heap.allocate("again", 40 * MIB)
    assert heap.peak < 41 * MIB
    heap.free("again")
    for index in range(4):
        heap.allocate(index, 30 * MIB)
    for index in range(4):
        heap.free(index)
    heap.allocate("after", 20 * MIB)
    assert heap.peak < 121 * MIB
