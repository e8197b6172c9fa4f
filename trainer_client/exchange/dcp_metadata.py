"""The `.metadata` of a checkpoint of torch.distributed.checkpoint: which tensors it has, in which chunks, and where.

This module checks the plain values of the pickle, and makes records of its own from them. It must never import the
classes that the pickle names, because an import could execute code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_client.base.foreign import plain_pickle
from trainer_client.base.foreign.files import read_regular
from trainer_client.base.foreign.plain_pickle import Made, Name
from trainer_client.errors import ImportCheckpointError

_MAX_METADATA_BYTES = 1 << 30
_MODULE = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of the checkpoint.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        chunks: the first index and the shape of each chunk. The chunks together have all elements of the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where the bytes of an entry or chunk are: the file, as the checkpoint names it, and the range in the file."""

    file: str
    first_byte: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """The entries of a checkpoint, and where their bytes are.

    Attributes:
        entries: the tensors by key; None for an entry that is no tensor.
        paths: by key, the names that lead to the entry in the nested state dict, if the checkpoint has recorded them.
        places: the places of the bytes, by the entry's key and, for a tensor, by the first index of the chunk; None
            stands in the place of the index for an entry that is no tensor.
    """

    entries: Mapping[str, DcpTensor | None]
    paths: Mapping[str, tuple[str, ...]]
    places: Mapping[tuple[str, tuple[int, ...] | None], FilePlace]


def read_metadata(path: Path) -> DcpMetadata:
    """Return the content of a `.metadata`. It can raise ImportCheckpointError."""
    try:
        value, _ = plain_pickle.read(read_regular(path, _MAX_METADATA_BYTES))
        fields = _fields(value, f"{_MODULE}.Metadata")
        entries = {_text(key): _tensor(key, entry) for key, entry in fields["state_dict_metadata"].items()}
        planned = fields.get("planner_data") or {}
        return DcpMetadata(
            entries=entries,
            paths={key: tuple(map(_part, path)) for key, path in planned.items() if key in entries},
            places=dict(_places(fields["storage_data"])),
        )
    except OSError as error:
        raise ImportCheckpointError(f"{path} is not loaded: {error.strerror}") from None
    except Exception as error:
        # A damaged metadata file may have a value of any type in any place, so reading it may raise any error.
        raise ImportCheckpointError(f"{path} is not loaded: {str(error) or type(error).__name__}") from None


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    """Return the attributes of a pickled object of class `name`. Raise TypeError for any other value."""
    if not isinstance(value, Made):
        raise TypeError(f"it has a {type(value).__name__} where {name} is expected")
    if str(value.callee) != name or not isinstance(value.state, dict):
        raise TypeError(f"it has {value.callee} where {name} is expected")
    return value.state


def _tensor(key: str, entry: Any) -> DcpTensor | None:
    if isinstance(entry, Made) and str(entry.callee) == f"{_MODULE}.BytesStorageMetadata":
        return None
    fields = _fields(entry, f"{_MODULE}.TensorStorageMetadata")
    shape = _sizes(fields["size"])
    chunks = []
    numel = 0
    for chunk in fields["chunks"]:
        of_chunk = _fields(chunk, f"{_MODULE}.ChunkStorageMetadata")
        offsets, sizes = _sizes(of_chunk["offsets"]), _sizes(of_chunk["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk of {key!r} has another number of dimensions")
        if any(first + count > whole for first, count, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {key!r} leaves the tensor")
        numel += math.prod(sizes)
        chunks.append((offsets, sizes))
    if numel != math.prod(shape):
        raise ValueError(f"the chunks of {key!r} have {numel} elements, and the tensor {math.prod(shape)}")
    return DcpTensor(_dtype(fields["properties"]), shape, chunks)


def _dtype(properties: Any) -> torch.dtype:
    """Return the dtype in the pickled properties of a tensor. Raise TypeError if they have none."""
    if not isinstance(properties, Made) or not isinstance(properties.state, tuple):
        raise TypeError("a tensor has no properties")
    name = properties.state[0]
    dtype = vars(torch).get(name.name) if isinstance(name, Name) and name.module == "torch" else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return dtype


def _places(stored: Any) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], FilePlace]]:
    for key, value in stored.items():
        index = _fields(key, f"{_MODULE}.MetadataIndex")
        place = _fields(value, "torch.distributed.checkpoint.filesystem._StorageInfo")
        first_byte, size_bytes = _sizes((place["offset"], place["length"]))
        offsets = None if index.get("offset") is None else _sizes(index["offset"])
        yield (_text(index["fqn"]), offsets), FilePlace(_text(place["relative_path"]), first_byte, size_bytes)


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the integers of a pickled torch.Size or tuple. Raise TypeError for any other value."""
    values = value.args[0] if isinstance(value, Made) and str(value.callee) == "torch.Size" else value
    if not isinstance(values, tuple) or not all(type(size) is int and size >= 0 for size in values):
        raise TypeError("it has no sizes where sizes are expected")
    return values


def _part(value: Any) -> str:
    """Return one part of a path in the state dict as text: a name, or the number of an element of a list."""
    if not isinstance(value, str | int):
        raise TypeError(f"a path has a {type(value).__name__}")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name is a {type(value).__name__}")
    return value
