"""The ways in which the campaign of hostile_files.py spoils a file.

A file is spoiled as bytes, as an archive, as a pickle or as JSON, or a pipe, a device or the like takes its place.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tests.faults.fuzz_requests import EDGES, STRINGS, mutated
from tests.special_files import SPECIAL_FILES, replace_with

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    10**400,
    *EDGES,
    *STRINGS,
    [],
    {},
    [[]],
    {"a": {}},
    "../../x",
)


def _text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + pickle.STACK_GLOBAL


# Parts of pickles that call, change, nest or ask for much, which leave one value.
PARTS = (
    _name("os", "system") + _text("touch harm") + pickle.TUPLE1 + pickle.REDUCE,
    b"cos\nsystem\n" + _text("touch harm") + pickle.TUPLE1 + pickle.REDUCE,
    b"ctorch\nload\n" + _text("/etc/passwd") + pickle.TUPLE1 + pickle.REDUCE,
    _name("collections", "OrderedDict") + pickle.NONE + pickle.EMPTY_DICT + _text("x") + pickle.NONE + b"s\x86b",
    _name("torch.distributed.checkpoint.metadata", "Metadata") + pickle.NONE + b"}" + _text("__init__") + b"Ns\x86b",
    _name("builtins", "bytearray") + pickle.LONG1 + b"\5\0\0\0\0\1" + pickle.TUPLE1 + pickle.REDUCE,
    _name("torch", "FloatTensor") + pickle.LONG1 + b"\5\0\0\0\0\1" + pickle.TUPLE1 + pickle.REDUCE,
    pickle.NONE + pickle.LONG_BINPUT + (1 << 27).to_bytes(4, "little"),
    pickle.NONE + pickle.TUPLE1 * 5000,
    pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.APPEND,
    pickle.NONE + b"".join(pickle.MEMOIZE + pickle.BINGET + bytes([n]) + pickle.TUPLE2 for n in range(60)),
    pickle.LONG4 + (5000).to_bytes(4, "little") + b"\1" * 5000,
    pickle.EMPTY_SET * 2000 + pickle.TUPLE2 * 1999,
    pickle.BINUNICODE8 + (1 << 60).to_bytes(8, "little"),
)


def spoil(rng: random.Random, place: Path) -> str:
    """Spoil a file of a directory, and return how."""
    file = rng.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    ways: dict[str, Callable[[random.Random, bytes], bytes]] = {"bytes": mutated}
    content = file.read_bytes()
    if zipfile.is_zipfile(file) and file.suffix != ".distcp":
        ways |= {"archive": _archive, "pickle in archive": _pickle_in_archive}
    if file.name == ".metadata":
        ways["pickle"] = _pickle
    if file.suffix == ".safetensors":
        ways["header"] = _header
    if file.suffix == ".json":
        ways["json"] = _backup_manifest if file.parent.name == "steps" else _json
    how = rng.choice([*ways, *ways, "special"])
    if how == "special":
        how = rng.choice(sorted(SPECIAL_FILES))
        replace_with(file, how)
        return f"{file.name}: {how}"
    file.write_bytes(ways[how](rng, content))
    return f"{file.name}: {how}"


def _operations(pickled: bytes) -> list[bytes]:
    places = [place for _, _, place in pickletools.genops(pickled) if place is not None]
    return [pickled[begin:end] for begin, end in zip(places, [*places[1:], len(pickled)], strict=True)]


def _pickle(rng: random.Random, pickled: bytes) -> bytes:
    operations = _operations(pickled)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, other = rng.randrange(len(operations)), rng.randrange(len(operations))
        match rng.randrange(6):
            case 0:
                del operations[at]
                operations = operations or [pickle.STOP]
            case 1:
                operations.insert(at, operations[other])
            case 2:
                operations[at], operations[other] = operations[other], operations[at]
            case 3:
                operations[at] = mutated(rng, operations[at])
            case 4:
                operations.insert(at, rng.choice(PARTS))
            case _:
                operations[at] = rng.choice(PARTS)
    return b"".join(operations)


def _records(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _written(records: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return written.getvalue()


def _pickle_in_archive(rng: random.Random, content: bytes) -> bytes:
    return _written(
        {name: _pickle(rng, data) if name.endswith("data.pkl") else data for name, data in _records(content).items()}
    )


def _archive(rng: random.Random, content: bytes) -> bytes:
    records = _records(content)
    name = rng.choice(sorted(records))
    others = {key: data for key, data in records.items() if key != name}
    stranger = rng.choice(("../x", "/x", "x", "a/b/c", f"{name}/x", "é"))
    ways: list[Callable[[], bytes]] = [
        lambda: _written(records, rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))),
        lambda: rng.randbytes(rng.randrange(1, 100)) + content,
        lambda: content + _written(others),
        lambda: _written(others),
        lambda: _written(records | {name: mutated(rng, records[name])}),
        lambda: _written(records | {stranger: b"x"}),
        lambda: _with_another_list(rng, content),
    ]
    return rng.choice(ways)()


def _with_another_list(rng: random.Random, content: bytes) -> bytes:
    """Change a number of the list of records: a size, a place, a method or a length."""
    changed = bytearray(content)
    places = [at for at in range(len(content)) if content.startswith((b"PK\1\2", b"PK\5\6"), at)]
    at = rng.choice(places) + rng.randrange(4, 44, 2)
    struct.pack_into("<H", changed, min(at, len(changed) - 2), rng.choice((0, 1, 8, 9, 99, 0xFFFF)))
    return bytes(changed)


def _changed(rng: random.Random, value: Any) -> Any:
    """Return a value of JSON with another one in the place of one of its parts."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {name: part for name, part in value.items() if name != key}
        return value | {key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return rng.choice(([*value, value[at]], [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]))
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.8:
        return json.dumps(_changed(rng, json.loads(value)))
    if rng.random() < 0.05:
        return json.loads("[" * 400 + "]" * 400)
    return rng.choice(VALUES)


def _json(rng: random.Random, content: bytes) -> bytes:
    document = _changed(rng, json.loads(content))
    if isinstance(document, dict) and isinstance(checkpoint := document.get("checkpoint"), dict):
        canonical = json.dumps(checkpoint, sort_keys=True, separators=(",", ":"))
        document["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
    return json.dumps(document).encode()


def _backup_manifest(rng: random.Random, content: bytes) -> bytes:
    line = _json(rng, content.partition(b"\n")[0])
    return line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n"


def _header(rng: random.Random, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(_changed(rng, json.loads(content[8 : 8 + size]))).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]
