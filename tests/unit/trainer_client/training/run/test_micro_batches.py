"""The micro-batches of a step: which one is the last, and which backward passes communicate."""

from __future__ import annotations

import pytest

from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.step.gradients import ReductionSchedule


def make(reduction: ReductionSchedule = ReductionSchedule.BOUNDARY) -> MicroBatches:
    return MicroBatches(BatchSizes(train=4, micro=2, accumulation=2), reduction, None)


def test_the_config_says_which_is_the_last_unless_the_user_does() -> None:
    micro_batches = make()
    found = []
    for _ in range(4):
        found.append(micro_batches.is_last)
        micro_batches.end()
    assert found == [False, True, False, True]

    micro_batches.set_last(True)
    assert micro_batches.is_last
    micro_batches.set_last(None)
    assert not micro_batches.is_last


@pytest.mark.parametrize(
    ("reduction", "reduces"), [(ReductionSchedule.BOUNDARY, False), (ReductionSchedule.MICRO_BATCH, True)]
)
def test_the_first_backward_of_two_reduces_as_scheduled(reduction: ReductionSchedule, reduces: bool) -> None:
    assert make(reduction).reduces == reduces


def test_no_backward_reduces_within_no_sync_which_may_be_nested() -> None:
    micro_batches = make(ReductionSchedule.MICRO_BATCH)
    with micro_batches.no_sync():
        with micro_batches.no_sync():
            pass
        assert not micro_batches.reduces
    assert micro_batches.reduces


def test_a_step_ends_the_count_of_backward_passes_and_not_that_of_micro_batches() -> None:
    micro_batches = make()
    micro_batches.end_backward()
    micro_batches.end()
    micro_batches.end_step()
    assert (micro_batches.backwards, micro_batches.micro_steps) == (0, 1)
