"""All ranks derive the same order of reductions from the units that each of them ran; a single rank needs no order."""

from __future__ import annotations

import torch

from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.reduction_order import ReductionOrder, reverse_of_first_uses


def test_what_all_ranks_used_is_reduced_in_the_reverse_of_rank_0s_first_uses() -> None:
    #       unit 0  1  2  3  4
    rows = [[0, 3, 1, 2, 4], [1, 1, 4, 2, 0], [0, 2, 1, 3, 5]]

    assert reverse_of_first_uses(rows) == [1, 3, 2]


def test_without_a_common_unit_nothing_is_reduced_early() -> None:
    assert reverse_of_first_uses([[1, 0], [0, 1]]) == []


def test_a_single_rank_reduces_each_unit_when_it_is_over() -> None:
    order = ReductionOrder(3, Collectives(torch.device("cpu")))
    order.begin([1, 2])

    assert [order.unit_is_over(2), order.unit_is_over(1), order.finish()] == [[2], [1], []]
