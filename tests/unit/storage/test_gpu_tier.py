"""The directory of the copies on sessions' devices: what is found, what gives way, and what becomes of each byte."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass

import pytest

from storage.state.slab import NEVER
from storage.tiers.gpu import ALIGN_BYTES, DeviceMemory, DeviceRange, GpuTier

SIZE = 4 * ALIGN_BYTES


@dataclass(eq=False)
class Bytes:
    """A stand-in for a slab, of which the directory knows no more."""

    name: str = ""
    stamp: int = 1
    deleted: bool = False


def memory_of(budget_bytes: int) -> tuple[GpuTier, DeviceMemory]:
    tier = GpuTier()
    memory = tier.open("lag:0 of a test")
    memory.resize(budget_bytes)
    return tier, memory


def keep(memory: DeviceMemory, source: Bytes, next_use: float, nbytes: int = SIZE) -> DeviceRange | None:
    """Do what a client does that reads a slab from the store and copies it to its device."""
    range_ = memory.place(source, nbytes, next_use)
    if range_ is not None:
        memory.release(source, range_)
    return range_


def use(memory: DeviceMemory, source: Bytes, next_use: float, nbytes: int = SIZE) -> bool:
    """Do what a client does that uses a slab. Return whether it was on the device."""
    range_ = memory.find(source, next_use)
    if range_ is None:
        keep(memory, source, next_use, nbytes)
        return False
    memory.release(source, range_)
    return True


def test_a_copy_is_found_until_the_bytes_change() -> None:
    _, memory = memory_of(SIZE)
    slab = Bytes()
    assert memory.find(slab, 5) is None
    kept = keep(memory, slab, 5)
    assert memory.find(slab, 9) == kept
    assert memory.has(slab)
    assert kept is not None
    memory.release(slab, kept)
    slab.stamp += 1
    assert not memory.has(slab)
    assert memory.find(slab, 12) is None
    assert memory.used_bytes == 0


def test_a_range_that_is_being_filled_is_nobody_elses_and_no_copy_yet() -> None:
    _, memory = memory_of(SIZE)
    slab, other = Bytes("slab"), Bytes("other")
    range_ = memory.place(slab, SIZE, 5)
    assert range_ is not None
    assert memory.find(slab, 7) is None
    assert memory.place(slab, SIZE, 7) is None
    assert memory.place(other, SIZE, 1) is None
    memory.release(slab, range_, is_kept=False)
    assert memory.used_bytes == 0
    assert keep(memory, other, 1) is not None


def test_the_copy_whose_next_use_is_farthest_gives_way_to_one_that_is_used_sooner() -> None:
    tier, memory = memory_of(3 * SIZE)
    near, middle, far = Bytes("near"), Bytes("middle"), Bytes("far")
    for slab, next_use in ((near, 10), (far, NEVER), (middle, 20)):
        assert keep(memory, slab, next_use)
    assert keep(memory, Bytes("later than all"), NEVER) is None
    assert keep(memory, Bytes("sooner"), 15) is not None
    assert [memory.has(slab) for slab in (near, middle, far)] == [True, True, False]
    assert tier.counters.demotions == 1


def test_a_leased_copy_stays_where_it_is() -> None:
    _, memory = memory_of(SIZE)
    slab = Bytes()
    kept = keep(memory, slab, NEVER)
    assert kept is not None
    assert memory.find(slab, NEVER) == kept
    assert memory.place(Bytes("sooner"), SIZE, 1) is None
    # Also if its bytes are not the newest ones any more.
    slab.stamp += 1
    assert memory.find(slab, 3) is None
    assert memory.place(Bytes("sooner"), SIZE, 1) is None
    memory.release(slab, kept)
    again = memory.place(Bytes("sooner"), SIZE, 1)
    assert again is not None
    assert again.offset == kept.offset
    assert again.generation > kept.generation


def test_copies_give_way_only_where_that_makes_room() -> None:
    """Two small copies that are not neighbours make no room for a large one, so both stay."""
    _, memory = memory_of(3 * SIZE)
    first, leased, last = Bytes("first"), Bytes("leased"), Bytes("last")
    for slab in (first, leased, last):
        assert keep(memory, slab, NEVER)
    held = memory.find(leased, NEVER)
    assert held is not None
    assert memory.place(Bytes("large"), 2 * SIZE, 1) is None
    assert memory.has(first)
    assert memory.has(last)
    memory.release(leased, held)
    assert keep(memory, Bytes("large"), 1, 2 * SIZE) is not None
    # One of the three did not have to go.
    assert sum(memory.has(slab) for slab in (first, leased, last)) == 1


def test_what_lies_beyond_a_smaller_budget_goes_when_its_lease_ends() -> None:
    _, memory = memory_of(3 * SIZE)
    slabs = [Bytes(str(number)) for number in range(3)]
    ranges = [keep(memory, slab, 10) for slab in slabs]
    leased = memory.find(slabs[2], 10)
    assert leased == ranges[2]
    assert leased is not None
    memory.resize(SIZE)
    assert not memory.is_within_budget
    assert [memory.has(slab) for slab in slabs] == [True, False, False]
    memory.release(slabs[2], leased)
    assert memory.is_within_budget
    assert memory.used_bytes == SIZE
    assert keep(memory, slabs[1], 1) is not None
    assert memory.has(slabs[1])
    assert not memory.has(slabs[0])
    memory.resize(2 * SIZE)
    assert keep(memory, slabs[0], 1) is not None
    assert memory.used_bytes == 2 * SIZE


def hits_of_a_step(budget: int, units: int, micro_batches: int, *, trained: bool, steps: int = 4) -> float:
    """Return the share of the uses in the last step that find their slab on the device.

    The slabs are used forwards and backwards, once in each micro-batch.
    """
    tier, memory = memory_of(budget * SIZE)
    slabs = [Bytes(str(number)) for number in range(units)]
    order = [*range(units), *reversed(range(units))] * micro_batches
    found = 0
    for step in range(steps):
        found = 0
        for place, index in enumerate(order):
            following = [later for later in range(place + 1, len(order)) if order[later] == index]
            next_use: float = NEVER
            if following:
                next_use = step * len(order) + following[0]
            elif not trained:
                next_use = (step + 1) * len(order) + order.index(index)
            found += use(memory, slabs[index], next_use)
        if trained:
            for slab in slabs:
                slab.stamp += 1
    assert tier.used_bytes <= budget * SIZE
    return found / len(order)


def test_frozen_slabs_that_fit_are_always_there_and_others_as_often_as_they_can_be() -> None:
    assert hits_of_a_step(8, 8, 1, trained=False) == 1.0
    # Forwards and backwards with room for half of them: what was used last is used first.
    assert hits_of_a_step(4, 8, 1, trained=False) >= 0.5
    assert hits_of_a_step(4, 8, 1, trained=True) == 4 / 16
    # Each of the eight is fetched once, and then found in each of the other 31 passes.
    assert hits_of_a_step(8, 8, 16, trained=True) == 31 / 32
    assert hits_of_a_step(0, 8, 16, trained=True) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_no_two_ranges_overlap_and_each_byte_is_accounted_for(seed: int) -> None:
    tier, memory = memory_of(16 * SIZE)
    chance = random.Random(seed)
    slabs = [Bytes(str(number)) for number in range(24)]
    sizes = {slab: chance.choice([100, SIZE, 3 * SIZE, 5 * SIZE]) for slab in slabs}
    leased: list[tuple[Bytes, DeviceRange]] = []
    for turn in range(3000):
        slab = chance.choice(slabs)
        match chance.randrange(8):
            case 0:
                slab.stamp += 1
            case 1:
                memory.resize(chance.randrange(24) * SIZE)
            case 2 | 3 if leased:
                held, range_ = leased.pop(chance.randrange(len(leased)))
                memory.release(held, range_, is_kept=chance.random() < 0.9)
            case _:
                next_use = chance.choice([NEVER, turn + chance.randrange(50)])
                granted = memory.find(slab, next_use) or memory.place(slab, sizes[slab], next_use)
                if granted is not None:
                    assert granted.end <= memory.budget_bytes
                    leased.append((slab, granted))
        spans = sorted({(range_.offset, range_.end) for _, range_ in leased})
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert 0 <= memory.leased_bytes <= memory.used_bytes
    for held, range_ in leased:
        memory.release(held, range_, is_kept=False)
    memory.resize(0)
    assert (memory.used_bytes, memory.leased_bytes, memory.is_within_budget) == (0, 0, True)
    tier.close_memory(memory)
    assert (tier.used_bytes, tier.budget_bytes) == (0, 0)


def test_the_tier_has_the_sums_of_its_sessions_and_forgets_the_memory_of_one_that_ends() -> None:
    tier = GpuTier()
    assert not tier.is_in_use
    memories = [tier.open(f"lag:{index} of rank {index}") for index in range(2)]
    for memory in memories:
        memory.resize(2 * SIZE + 17)
        assert keep(memory, Bytes(), 3) is not None
    assert (tier.used_bytes, tier.budget_bytes) == (2 * SIZE, 4 * SIZE)
    assert "lag:1 of rank 1: 2.0 KiB of 4.0 KiB" in tier.detail
    tier.close_memory(memories[0])
    assert (tier.used_bytes, tier.budget_bytes) == (SIZE, 2 * SIZE)
    assert tier.is_in_use
    assert tier.counters.promotions == 2
    asyncio.run(tier.close())
