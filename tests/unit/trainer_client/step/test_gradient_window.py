"""The window of gradients that are not parked: never more than the store has room for, the last used ones."""

from __future__ import annotations

from paramserver.contract.limits import GRADIENTS_AT_ONCE
from trainer_client.step.gradient_window import GradientWindow


class Gradient:
    """A gradient that notes whether it is in use."""

    def __init__(self, window: GradientWindow) -> None:
        self.window = window
        self.is_in_use = False

    def use(self) -> None:
        self.window.use(self)
        self.is_in_use = True

    def park(self) -> None:
        self.window.remove(self)
        self.is_in_use = False


def test_the_one_that_was_not_used_for_longest_is_parked() -> None:
    window = GradientWindow()
    root, *others = [Gradient(window) for _ in range(GRADIENTS_AT_ONCE + 6)]
    for other in others:
        root.use()
        other.use()
        assert sum(each.is_in_use for each in (root, *others)) <= GRADIENTS_AT_ONCE
        assert root.is_in_use and other.is_in_use
    assert [other for other in others if other.is_in_use] == others[1 - GRADIENTS_AT_ONCE :]


def test_what_was_parked_makes_room() -> None:
    window = GradientWindow()
    first, *others = [Gradient(window) for _ in range(GRADIENTS_AT_ONCE + 1)]
    first.use()
    for other in others[:-1]:
        other.use()
    others[0].park()
    others[-1].use()
    assert first.is_in_use and not others[0].is_in_use
