"""Counts how many units are gathered at once, in tests that train in their own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainer_client.training.model.units import Unit, UnitState


@contextmanager
def counting_gathered(monkeypatch: pytest.MonkeyPatch, counts: Callable[[Unit], bool]) -> Iterator[list[int]]:
    """Yield a list that gets, at each gather of a unit that `counts`, the number of such units that are gathered."""
    seen: list[int] = []
    units: list[Unit] = []
    init, wait = Unit.__init__, Unit.wait_gather

    def note(unit: Unit, **arguments: Any) -> None:
        init(unit, **arguments)
        if counts(unit):
            units.append(unit)

    def count(unit: Unit, *arguments: Any, **more: Any) -> Any:
        cost = wait(unit, *arguments, **more)
        if counts(unit):
            seen.append(sum(each.state is UnitState.GATHERED for each in units))
        return cost

    with monkeypatch.context() as patched:
        patched.setattr(Unit, "__init__", note)
        patched.setattr(Unit, "wait_gather", count)
        yield seen
