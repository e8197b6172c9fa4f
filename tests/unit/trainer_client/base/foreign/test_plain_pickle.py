"""Pickles are read as plain values: the same that pickle reads, and nothing is called, changed or made large."""

from __future__ import annotations

import pathlib
import pickle
import pickletools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp

from trainer_client.base.foreign import plain_pickle
from trainer_client.base.foreign.plain_pickle import MOST_LEVELS, MOST_NUMBERED_KEYS, Made, Name, PlainPickleError
from trainer_client.errors import ImportCheckpointError
from trainer_client.exchange.dcp_source import open_dcp
from trainer_client.exchange.source import DCP_METADATA

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)
# The prime by which Python's hash of an integer is the rest.
HASH_PRIME = (1 << 61) - 1


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + pickle.STACK_GLOBAL


def changing(target: bytes, attribute: str, value: bytes) -> bytes:
    """Return a pickle that sets an attribute of an object, whatever the object is."""
    slots = pickle.EMPTY_DICT + text(attribute) + value + pickle.SETITEM
    return pickle.PROTO + b"\4" + target + pickle.NONE + slots + pickle.TUPLE2 + pickle.BUILD + pickle.STOP


def random_value(rng: random.Random, levels: int) -> Any:
    leaves: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, 0, 255, 256, -1, 1 << 31, -(1 << 40), (1 << 120) + 3]),
        lambda: rng.random() * 10 ** rng.randrange(-300, 300),
        lambda: rng.choice(["", "weight", "é" * 300, "\N{SNOWMAN}", "x" * 70_000]),
        lambda: rng.randbytes(rng.randrange(300)),
    ]
    parts: list[Callable[[], Any]] = [
        lambda: [random_value(rng, levels - 1) for _ in range(rng.randrange(5))],
        lambda: tuple(random_value(rng, levels - 1) for _ in range(rng.randrange(5))),
        lambda: {f"key {number}": random_value(rng, levels - 1) for number in range(rng.randrange(5))},
        lambda: dict.fromkeys(range(rng.randrange(5)), random_value(rng, levels - 1)),
        # One value at two places.
        lambda: [random_value(rng, levels - 1)] * 2,
    ]
    return rng.choice(leaves if levels == 0 else [*leaves, *parts, *parts])()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_are_those_that_pickle_reads(protocol: int) -> None:
    rng = random.Random(protocol)
    for _ in range(200):
        value = random_value(rng, 4)
        pickled = pickle.dumps(value, protocol)
        found, names = plain_pickle.read(pickled)
        # In protocol 2, bytes are calls of functions.
        assert found == value if not names else protocol == 2
        for end in [rng.randrange(len(pickled)) for _ in range(3)]:
            with pytest.raises(PlainPickleError):
                plain_pickle.read(pickled[:end])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_and_names_stay_what_they_are(protocol: int) -> None:
    value, names = plain_pickle.read(pickle.dumps({"size": torch.Size((2, 3)), "set": {5}}, protocol))
    size = value["size"]
    assert isinstance(size, Made) and size.callee == Name("torch", "Size") and size.args == ((2, 3),)
    of_set = value["set"]
    assert of_set.callee == Name("builtins", "set") and (of_set.items or of_set.args[0]) == [5]
    assert names <= {Name("torch", "Size"), Name("builtins", "set")}
    ordered, _ = plain_pickle.read(pickle.dumps(OrderedDict(a=1), protocol))
    assert ordered.callee == Name("collections", "OrderedDict") and ordered.pairs == [("a", 1)]


@pytest.mark.parametrize(
    ("owner", "attribute", "pickled"),
    [
        (dcp.Metadata, "__init__", changing(name(dcp.__name__, "Metadata"), "__init__", name("builtins", "set"))),
        (
            torch.serialization._get_layout,
            "__defaults__",
            changing(name("torch.serialization", "_get_layout"), "__defaults__", text("x") + pickle.TUPLE1),
        ),
        (pathlib.PurePosixPath, "parent", changing(name("pathlib", "PosixPath"), "parent", text("/root/.ssh"))),
        (dcp.MetadataIndex, "__hash__", changing(name(dcp.__name__, "MetadataIndex"), "__hash__", pickle.NONE)),
    ],
)
def test_a_metadata_that_changes_classes_of_the_process_changes_nothing(
    tmp_path: Path, owner: Any, attribute: str, pickled: bytes
) -> None:
    (tmp_path / DCP_METADATA).write_bytes(pickled)
    before = getattr(owner, attribute)
    try:
        with pytest.raises(ImportCheckpointError, match="it changes a "):
            open_dcp(tmp_path, verify=False)
        assert getattr(owner, attribute) == before
    finally:
        setattr(owner, attribute, before)


def shared_tuples(levels: int) -> bytes:
    """Return a pickle of a tuple of two equal tuples of two equal tuples, and so on."""
    pickled = pickle.PROTO + b"\4" + text("x")
    for level in range(levels):
        pickled += pickle.MEMOIZE + pickle.BINGET + bytes([level]) + pickle.TUPLE2
    return pickled + pickle.STOP


def equal_hashes(count: int) -> bytes:
    pairs = b"".join(pickle.dumps(number * HASH_PRIME, 2)[2:-1] + pickle.NONE for number in range(count))
    return pickle.PROTO + b"\4" + pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS + pickle.STOP


def remembered(number: int) -> bytes:
    return pickle.NONE + pickle.LONG_BINPUT + number.to_bytes(4, "little") + pickle.STOP


def self_containing() -> bytes:
    return pickle.PROTO + b"\4" + pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.APPEND + b"."


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (remembered(1 << 27), "remembers value 134217728 after 0 others"),
        (shared_tuples(40), "too large when written out"),
        (pickle.NONE + pickle.TUPLE1 * (1 << 20) + pickle.STOP, f"more than {MOST_LEVELS} values within each other"),
        (self_containing(), "a value that contains itself"),
        (equal_hashes(MOST_NUMBERED_KEYS + 1), "keys that are no texts"),
        (pickle.LONG4 + (1 << 20).to_bytes(4, "little") + b"\1" * (1 << 20) + b".", "an integer of 8388601 bits"),
        (pickle.BINUNICODE8 + (1 << 62).to_bytes(8, "little") + b"x.", "it is damaged"),
        (pickle.BINUNICODE + (3).to_bytes(4, "little") + b"\xed\xa0\x80.", "it is damaged"),
        (pickle.PROTO + b"\6N.", "of protocol 6"),
        (pickle.PROTO + b"\1N.", "of protocol 1"),
        (pickle.NONE + pickle.STOP + b"N", "followed by other bytes"),
        (pickle.NONE * 2 + pickle.STOP, "does not end with one value"),
        (pickle.MARK + pickle.NONE + pickle.STOP, "does not end with one value"),
        (pickle.NONE + pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.STOP, "calls a NoneType"),
        (name("a", "b") + pickle.NONE + pickle.REDUCE + pickle.STOP, "calls a Name"),
        (pickle.EMPTY_LIST + pickle.NONE + pickle.BUILD + pickle.STOP, "changes a list"),
        (pickle.EMPTY_DICT + pickle.EMPTY_LIST + pickle.NONE + pickle.SETITEM + pickle.STOP, "a key is a list"),
        (pickle.INST + b"os\nsystem\n.", "the operation INST, which is not carried out"),
        (b"(S'x'\nios\nsystem\n.", "the operation STRING"),
        (b"\x82\1.", "the operation EXT1"),
        (b"", "it is damaged"),
    ],
)
def test_what_no_program_writes_is_refused(pickled: bytes, reason: str) -> None:
    with pytest.raises(PlainPickleError, match=reason):
        plain_pickle.read(pickled)


def test_every_operation_is_carried_out_or_refused_on_an_empty_stack() -> None:
    """An operation that takes more values than there are must not take those of an outer mark."""
    for operation in pickletools.opcodes:
        for before in (b"", pickle.MARK, pickle.NONE + pickle.MARK):
            with pytest.raises(PlainPickleError):
                plain_pickle.read(before + operation.code.encode("latin-1") + b"\0" * 8 + b"N")


def test_a_state_that_is_given_twice_is_refused() -> None:
    twice = name("a", "b") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + (pickle.EMPTY_DICT + pickle.BUILD) * 2 + pickle.STOP
    with pytest.raises(PlainPickleError, match="it changes a Made"):
        plain_pickle.read(pickle.PROTO + b"\4" + twice)
