"""The reader of pickles that calls nothing: it returns what a pickle says as plain values.

A pickle is a program: it calls functions and changes objects that it names, among them classes and modules. This module
carries out only the part of it that makes numbers, texts, tuples, lists and dicts. The name of a function stays a
`Name`, and a call stays a `Made`, so a file can neither make nor change an object of any module. The caller decides
what a `Made` stands for, once all of the pickle was read.

A value costs at most some 100 bytes of memory for each byte of the pickle. No value is nested deeply, and none is much
larger than the pickle when its shared parts are written out. So a caller may walk through values with recursive
functions, and may write them into the text of an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# The limit on how deeply tuples, lists, dicts and calls of a pickle may be nested.
MOST_LEVELS = 64
# The limit on the number of values in a pickle's result, divided by the number of the pickle's operations. A value that
# is shared counts once for each reference to it. A state dict of torch.save has 1 to 3 values for each operation,
# because a tensor refers to its name and to its shape once.
MOST_COPIES = 16
# The longest integer that a pickle may have. Integers of Python have no limit, and one of a million digits cannot be
# printed. 16 bytes are enough for a UUID.
MOST_INTEGER_BYTES = 16
# The limit on the number of dict keys in a pickle that are not strings. A file can choose integers that collide in a
# dict, so that filling the dict takes quadratic time. A file cannot choose such strings.
MOST_NUMBERED_KEYS = 1 << 14
_PROTOCOLS = range(2, 6)
# The names of modules in Python 2, which pickles of protocol 2 use, and their names in Python 3.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class PlainPickleError(ValueError):
    """The pickle is damaged, or describes something that is not a plain value."""


@dataclass(frozen=True, slots=True)
class Name:
    """A value that stands for a function, a class or a constant of a module, of which only the name is known."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """An object that the pickle would make by a call. The call is not made here.

    Attributes:
        callee: the function or the class that would be called.
        args: the arguments of the call.
        state: the value that would be given to the object's `__setstate__`; None if there is none.
        items: the values that would be added to the object, as to a list or a set.
        pairs: the keys with their values that would be set, as in a dict.
    """

    callee: Name
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """A value that the pickle only refers to: `key` is the persistent id, which tells the writing program its place."""

    key: Any


def read(data: bytes) -> tuple[Any, set[Name]]:
    """Return the value of a pickle, and all names in it.

    Raises:
        PlainPickleError: the pickle is damaged, of another protocol than 2 to 5, or says what no known program writes.
    """
    reader = _PickleReader()
    count = 0
    try:
        for operation, argument, place in pickletools.genops(data):
            count += 1
            if (carry_out := reader.operations.get(operation.name)) is None:
                raise PlainPickleError(f"byte {place} is the operation {operation.name}, which is not carried out")
            carry_out(argument)
    except PlainPickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise PlainPickleError(f"it is damaged: {str(error) or type(error).__name__}") from None
    if place is None or place + 1 != len(data):
        raise PlainPickleError("it is followed by other bytes")
    value = reader.result()
    _check_shape(value, MOST_COPIES * count)
    return value, reader.names


_SET = Name("builtins", "set")
_TOO_DEEP = f"it has more than {MOST_LEVELS} values within each other"


def calls(root: Any) -> Iterator[Made]:
    """Yield each Made (a call that the pickle would make) in a value that `read` has returned, once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _WITH_PARTS) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Made):
                yield value
            waiting += _parts(value)


class _PickleReader:
    """The interpreter of one pickle. It has the pickle's stack and memo, and a function for each opcode."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: list[Any] = []
        self._numbered_keys = 0
        self.names: set[Name] = set()
        push = self._push
        self.operations: Mapping[str, Callable[[Any], None]] = {
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT"), push),
            **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), push),
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), self._push_text),
            **dict.fromkeys(("LONG1", "LONG4"), self._push_integer),
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_TUPLE": lambda _: push(()),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_SET": lambda _: push(Made(_SET, ())),
            "TUPLE": lambda _: push(tuple(self._since_mark())),
            "TUPLE1": lambda _: push((self._stack.pop(),)),
            "TUPLE2": lambda _: self._push_tuple(2),
            "TUPLE3": lambda _: self._push_tuple(3),
            "MARK": self._mark,
            "APPEND": lambda _: self._add([self._stack.pop()]),
            "APPENDS": lambda _: self._add(self._since_mark()),
            "ADDITEMS": lambda _: self._add(self._since_mark()),
            "SETITEM": lambda _: self._set(reversed((self._stack.pop(), self._stack.pop()))),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            "MEMOIZE": lambda _: self._memo.append(self._stack[-1]),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda number: push(self._memo[number])),
            "GLOBAL": lambda argument: self._push_name(*argument.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._push_name(*reversed((self._stack.pop(), self._stack.pop()))),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), self._make),
            "BUILD": self._build,
            "BINPERSID": lambda _: push(Outside(self._stack.pop())),
            "PROTO": self._check_protocol,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
        }

    def result(self) -> Any:
        if len(self._stack) != 1 or self._outer:
            raise PlainPickleError("it does not end with one value")
        return self._stack[0]

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_text(self, text: str) -> None:
        if not text.isascii():
            # A pickle may have a string with a lone surrogate, which cannot be sent or printed. `encode` raises
            # ValueError for such a string, so the pickle is refused.
            text.encode()
        self._stack.append(text)

    def _push_integer(self, value: int) -> None:
        if value.bit_length() > 8 * MOST_INTEGER_BYTES:
            raise PlainPickleError(f"it has an integer of {value.bit_length()} bits")
        self._stack.append(value)

    def _push_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is no text")
        found = Name(_MODULES.get(module, module), name)
        self.names.add(found)
        self._stack.append(found)

    def _mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        since, self._stack = self._stack, self._outer.pop()
        return since

    def _remember(self, number: int) -> None:
        # Programs number the values in a pickle's memo in order. A larger number is refused, because a few bytes could
        # otherwise make the memo a list of any size.
        if number > len(self._memo):
            raise PlainPickleError(f"it remembers value {number} after {len(self._memo)} others")
        self._memo[number : number + 1] = [self._stack[-1]]

    def _add(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target.items = target.items or []
            target.items.extend(values)
        elif isinstance(target, list):
            target.extend(values)
        else:
            raise TypeError(f"values are added to a {type(target).__name__}")

    def _set(self, values: Iterable[Any]) -> None:
        target, parts = self._stack[-1], iter(values)
        pairs = list(zip(parts, parts, strict=True))
        if isinstance(target, Made):
            target.pairs = target.pairs or []
            target.pairs.extend(pairs)
        elif isinstance(target, dict):
            for key, _ in pairs:
                self._check_key(key)
            target.update(pairs)
        else:
            raise TypeError(f"keys are set in a {type(target).__name__}")

    def _check_key(self, key: Any) -> None:
        """Raise TypeError for a key of a type that a dict may take long to find, PlainPickleError for too many keys."""
        if isinstance(key, str | Made):
            return
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, str | int | float | None) for part in parts):
            raise TypeError(f"a key is a {type(key).__name__}")
        self._numbered_keys += 1
        if self._numbered_keys > MOST_NUMBERED_KEYS:
            raise PlainPickleError(f"it has more than {MOST_NUMBERED_KEYS} keys that are no texts")

    def _make(self, _: Any) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        if not isinstance(callee, Name) or not isinstance(args, tuple):
            raise PlainPickleError(f"it calls a {type(callee).__name__}, and not a function that it names")
        self._stack.append(Made(callee, args))

    def _build(self, _: Any) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if not isinstance(made, Made) or made.state is not None:
            raise PlainPickleError(f"it changes a {made if isinstance(made, Name) else type(made).__name__}")
        made.state = state

    def _check_protocol(self, protocol: int) -> None:
        if protocol not in _PROTOCOLS:
            raise PlainPickleError(f"it is of protocol {protocol}")


_WITH_PARTS = (tuple, list, dict, Made, Outside)


def _parts(value: Any) -> list[Any]:
    """Return the values that a container holds, which is of a type in _WITH_PARTS."""
    match value:
        case dict():
            return [*value.keys(), *value.values()]
        case Made():
            keyed = [part for pair in value.pairs or () for part in pair]
            return [*value.args, value.state, *(value.items or ()), *keyed]
        case Outside():
            return [value.key]
        case _:
            return list(value)


def _check_shape(root: Any, most_values: int) -> None:
    """Check that a value is not nested deeply, does not contain itself, and is not too large when written out.

    It raises PlainPickleError. This function is not recursive, because a pickle can have a million levels.
    """
    # For each list, tuple, dict or call, by its id: the number of its levels and its size. While these are unknown, the
    # entry is the list of those of its parts that have parts themselves.
    shapes: dict[int, tuple[int, int] | list[Any]] = {}
    # The number of values whose parts are being looked at now. Each of these values lies within the one before it, so
    # their number is the depth that was reached.
    unfinished = 0
    waiting = [root] if isinstance(root, _WITH_PARTS) else []
    while waiting:
        value = waiting[-1]
        shape = shapes.get(id(value))
        if shape is None:
            inner = [part for part in _parts(value) if type(part) in _WITH_PARTS and part != ()]
            shapes[id(value)] = inner
            unfinished += 1
            if any(type(shapes.get(id(part))) is list for part in inner):
                raise PlainPickleError("it has a value that contains itself")
            if unfinished > MOST_LEVELS:
                raise PlainPickleError(_TOO_DEEP)
            waiting += [part for part in inner if id(part) not in shapes]
            continue
        waiting.pop()
        if isinstance(shape, list):
            unfinished -= 1
            levels, values = 1, len(_parts(value))
            for part in shape:
                of_part = shapes[id(part)]
                assert isinstance(of_part, tuple)
                levels, values = max(levels, 1 + of_part[0]), values + of_part[1]
            if levels > MOST_LEVELS:
                raise PlainPickleError(_TOO_DEEP)
            if values > most_values:
                raise PlainPickleError("its shared values would be too large when written out")
            shapes[id(value)] = levels, values
