"""Methods and attributes that an object passes on to its parts are as those of the part, for callers and for tools."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest

from trainer_client import Engine
from trainer_client.engine.passed_on import AttributeOf, method_of
from trainer_client.engine.saved_steps import SavedSteps


class Part:
    """A part with a count."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def doubled(self) -> int:
        return 2 * self.count

    def add(self, number: int = 1, *, times: int = 1) -> int:
        """Add `number` to the count, and return the count."""
        self.count += number * times
        return self.count


class Whole:
    """An object that passes on what concerns its part."""

    def __init__(self) -> None:
        self._part = Part()

    add = method_of("_part", Part.add)
    count = AttributeOf[int]("_part")
    doubled = AttributeOf[int]("_part")


def test_a_method_is_called_on_the_part_of_its_own_object() -> None:
    one, other = Whole(), Whole()
    assert one.add(2, times=3) == 6 and other.add() == 1
    assert (one.count, other.count) == (6, 1)


def test_a_method_has_the_arguments_and_the_docstring_of_the_part() -> None:
    assert str(inspect.signature(Whole().add)) == "(number: 'int' = 1, *, times: 'int' = 1) -> 'int'"
    assert inspect.getdoc(Whole().add) == "Add `number` to the count, and return the count."
    with pytest.raises(TypeError, match=r"add\(\) got an unexpected keyword argument 'by'"):
        Whole().add(by=1)  # type: ignore[call-arg]


def test_a_subclass_may_extend_a_method_and_a_test_may_replace_it() -> None:
    class Other(Whole):
        def add(self, number: int = 1, *, times: int = 1) -> int:
            return super().add(number + 1, times=times)

    assert Other().add() == 2
    with mock.patch.object(Whole, "add", autospec=True, return_value=7) as replaced:
        whole = Whole()
        assert whole.add(3) == 7
        replaced.assert_called_once_with(whole, 3)


def test_an_attribute_is_read_and_set_in_the_part_unless_the_part_computes_it() -> None:
    whole = Whole()
    whole.count = 4
    assert (whole.count, whole.doubled) == (4, 8)
    with pytest.raises(AttributeError):
        whole.doubled = 1


def test_the_engine_shows_the_arguments_of_what_it_passes_on() -> None:
    shown, own = inspect.signature(Engine.save_checkpoint), inspect.signature(SavedSteps.save_checkpoint)
    assert shown == own and Engine.save_checkpoint.__doc__ == SavedSteps.save_checkpoint.__doc__
