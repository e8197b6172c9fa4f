"""The need of jobs: how many versions of a slab, and which activations stay in host memory and which leave it."""

from __future__ import annotations

import pytest

from storage.base.shard import Durability, JobSpec, TierName
from storage.state.need import HostNeed, spilled_bytes, versions_needed


def need(*, gradients: int, all_gradients: int) -> HostNeed:
    return HostNeed(home_bytes=10, gradient_bytes=gradients, all_gradient_bytes=all_gradients, units=1, units_bytes=20)


def test_the_oldest_ranges_leave_until_the_rest_fits() -> None:
    assert spilled_bytes([4, 4, 4, 4], 16) == 0
    assert spilled_bytes([4, 4, 4, 4], 15) == 4
    assert spilled_bytes([8, 1, 1, 1], 9) == 8
    # A range that is larger than the room leaves at once, and the ones before it have left for it.
    assert spilled_bytes([2, 2, 9, 2], 4) == 13
    assert spilled_bytes([3, 3], 0) == 6


def test_activations_stay_if_they_take_at_most_half_of_what_a_step_leaves() -> None:
    some = need(gradients=5, all_gradients=70)
    assert some.keeps_activations(50, 210, 10)
    assert not some.keeps_activations(51, 210, 10)


def test_what_is_parked_leaves_room_for_prefetches() -> None:
    some = need(gradients=5, all_gradients=70)
    assert some.room_for_parked(145, 10, 30) == 70
    assert some.room_for_parked(145, 10, 1000) == 50
    assert some.room_for_parked(30, 10, 1000) == 0


def test_parked_activations_are_not_spilled_while_they_may_stay() -> None:
    some = need(gradients=5, all_gradients=5)
    for nbytes in range(200):
        if some.keeps_activations(nbytes, 200, 10):
            assert nbytes <= some.room_for_parked(200, 10, 1000)


@pytest.mark.parametrize(
    ("every_steps", "world_size", "at_home", "in_memory"),
    [(1, 2, 2, 0), (1, 4, 3, 0), (0, 4, 3, 0), (5, 2, 4, 2), (5, 4, 6, 3)],
)
def test_ranks_on_other_nodes_need_one_more_version_and_one_more_snapshot(
    every_steps: int, world_size: int, at_home: int, in_memory: int
) -> None:
    durability = Durability(every_steps=every_steps)
    job = JobSpec(name="job", world_size=world_size, local_ranks=2, parameters=(), durability=durability)
    assert versions_needed(job, TierName.NVME, TierName.NVME, is_durable=True) == at_home
    assert versions_needed(job, None, TierName.NVME, is_durable=True) == in_memory
