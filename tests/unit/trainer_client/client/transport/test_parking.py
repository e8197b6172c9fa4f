"""The gradients that are not parked: never more than the store has room for, the last used ones."""

from __future__ import annotations

from paramserver.contract.limits import GRADIENTS_AT_ONCE
from trainer_client.client.transport.parking import Parking


class Gradient:
    """A gradient that notes whether it is in use."""

    is_settled = True

    def __init__(self, parking: Parking) -> None:
        self.parking = parking
        self.is_in_use = False
        self.parked = 0

    def use(self) -> None:
        self.parking.use(self)
        self.is_in_use = True

    def park(self) -> None:
        self.parking.remove(self)
        self.is_in_use = False
        self.parked += 1


def test_the_one_that_was_not_used_for_longest_is_parked() -> None:
    parking = Parking()
    root, *others = [Gradient(parking) for _ in range(GRADIENTS_AT_ONCE + 6)]
    for other in others:
        root.use()
        other.use()
        assert sum(each.is_in_use for each in (root, *others)) <= GRADIENTS_AT_ONCE
        assert root.is_in_use and other.is_in_use
    assert [other for other in others if other.is_in_use] == others[1 - GRADIENTS_AT_ONCE :]


def test_what_was_parked_makes_room() -> None:
    parking = Parking()
    first, *others = [Gradient(parking) for _ in range(GRADIENTS_AT_ONCE + 1)]
    first.use()
    for other in others[:-1]:
        other.use()
    others[0].park()
    others[-1].use()
    assert first.is_in_use and not others[0].is_in_use


def test_when_a_lease_waits_for_room_all_are_parked_but_those_in_use_and_those_that_are_asked_for() -> None:
    parking = Parking()
    gradients = [Gradient(parking) for _ in range(GRADIENTS_AT_ONCE + 3)]
    for gradient in gradients:
        gradient.use()
    parked_before = [gradient.parked for gradient in gradients]
    gradients[0].is_settled = False
    parking.begin_for_all()
    more = [gradient.parked - before for gradient, before in zip(gradients, parked_before, strict=True)]
    assert parking.is_wanted and more == [0, 1, 1] + [0] * GRADIENTS_AT_ONCE
