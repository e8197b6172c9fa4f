"""Methods and attributes of a class that are those of one of its parts.

    class Engine:
        get_full = method_of("_parameter_states", ParameterStates.get_full)
        global_steps = AttributeOf[int]("_loop")

This module owns nothing. It must never change what a part's method takes, returns or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

T = TypeVar("T")
P = ParamSpec("P")


def method_of(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method with the arguments and the docstring of `method`, which it calls on a part of its object.

    Args:
        part: the name of the object's attribute that is the part.
        method: a method of the part's class.
    """

    @wraps(method)
    def call(whole: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(whole, part), *args, **kwargs)

    return call


class AttributeOf(Generic[T]):
    """An attribute of an object that is read and set in one of its parts, where it has the same name.

    It is no entry of the object's `__dict__`, and cannot be deleted.
    """

    def __init__(self, part: str) -> None:
        """Name the object's attribute that is the part."""
        self._part, self._name = part, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, whole: None, owner: type) -> Self: ...

    @overload
    def __get__(self, whole: object, owner: type) -> T: ...

    def __get__(self, whole: object | None, owner: type) -> Self | T:
        """Return the part's value."""
        if whole is None:
            return self
        value: T = getattr(getattr(whole, self._part), self._name)
        return value

    def __set__(self, whole: object, value: T) -> None:
        """Set the part's value. It raises AttributeError if the part computes it."""
        setattr(getattr(whole, self._part), self._name, value)
