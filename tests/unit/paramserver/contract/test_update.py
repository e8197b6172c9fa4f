"""An update of several shards at once gives each shard the bits of an update of its own, in as few calls as can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserver.contract import update as module
from paramserver.contract.optimizers.optimizer import count
from paramserver.contract.optimizers.registry import apply, state_kinds
from paramserver.contract.update import update_shards
from tests.optimizer_cases import CASES

# The shards' first elements and sizes, and which of two rows of hyper-parameters each has; None if it is not updated.
SHARDS = ((0, 37, 0), (48, 100, 1), (160, 16, 0), (176, 80, None), (256, 33, 1), (304, 5, 0))
# The tile has a part of the second shard only, and all that follow.
START, END = 64, 320


@pytest.mark.parametrize("name", CASES)
def test_shards_with_equal_hyper_parameters_are_updated_in_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [CASES[name].row(1), CASES[name].row(2)]
    weight, gradient = (torch.randn(END - START, generator=generator) for _ in range(2))
    states = {kind: torch.rand(END - START, generator=generator) for kind in state_kinds(rows[0])}
    expected = weight.clone(), {kind: state.clone() for kind, state in states.items()}
    for offset, numel, row in SHARDS:
        first, last = max(offset, START) - START, min(offset + numel, END) - START
        if row is not None and first < last:
            part = slice(first, last)
            own = {kind: [state[part]] for kind, state in expected[1].items()}
            apply(rows[row], [expected[0][part]], [gradient[part].clone().mul_(0.5)], own)
    calls: list[int] = []

    def counted(row: Any, weights: Any, gradients: Any, parts: Any) -> None:
        calls.append(len(weights))
        apply(row, weights, gradients, parts)

    monkeypatch.setattr(module, "apply", counted)
    shards = [(offset, numel, None if row is None else rows[row]) for offset, numel, row in SHARDS]
    update_shards(shards, weight, gradient, states, grad_scale=0.5, clip_value=None, start=START)

    assert torch.equal(weight, expected[0])
    for kind, state in states.items():
        assert torch.equal(state, expected[1][kind]), kind
    assert sorted(calls) == [2, 2]


@pytest.mark.parametrize("name", CASES)
def test_a_trainers_default_dtype_changes_no_update(name: str) -> None:
    """A script may have bf16 as torch's default dtype, which cannot represent the number of this update."""
    row, generator = CASES[name].row(1_001), torch.Generator().manual_seed(5)
    weight, gradient = (torch.randn(48, generator=generator) for _ in range(2))
    states = {kind: [torch.rand(48, generator=generator)] for kind in state_kinds(row)}
    # The copies are updated under the default dtype fp32, which a daemon has.
    kept = weight.clone(), {kind: [state.clone()] for kind, (state,) in states.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        count.cache_clear()
        apply(row, [weight], [gradient.clone()], states)
    finally:
        torch.set_default_dtype(before)
        count.cache_clear()
    apply(row, [kept[0]], [gradient.clone()], kept[1])

    assert torch.equal(weight, kept[0])
    assert all(torch.equal(states[kind][0], kept[1][kind][0]) for kind in states)
