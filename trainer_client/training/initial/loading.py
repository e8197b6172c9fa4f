"""A reader of element ranges of safetensors files, so that each rank reads only the bytes of its own partitions.

A file of the format (https://github.com/huggingface/safetensors#format) has eight bytes with the length of the header,
the header as JSON, and the tensors' bytes. This module must never read a tensor that the caller has not asked for, nor
hold more than one piece of a tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paramserver.contract.documents import parse_small_json
from trainer_client.base.foreign.files import open_regular, read_regular
from trainer_client.errors import ConfigError

_INDEX_NAME = "model.safetensors.index.json"
_FILE_NAME = "model.safetensors"

# A tensor is read from a file in pieces of at most so many bytes, so that a large tensor needs little memory beside its
# own.
_PIECE_BYTES = 16 << 20
# The most bytes of the JSON header of a safetensors file; a longer header is refused. The reference implementation has
# the same limit.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 256 << 20
# The most JSON values in a file's header or in the index of several files; more are refused. A tensor of five
# dimensions takes 10 values in a header, and a tensor takes 1 value in an index. Models of 92,000 tensors are known.
MOST_VALUES = 1 << 22

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        path: the file.
        name: the tensor's name in the file.
        dtype: the tensor's dtype.
        shape: the tensor's shape.
        first_byte: the position of the tensor's first byte in the file.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    first_byte: int

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read_into(self, target: torch.Tensor, offset: int, as_dtype: torch.dtype) -> None:
        """Fill `target` [n], on the CPU, with elements [offset, offset + n) of the flattened tensor.

        Args:
            target: tensor of any dtype.
            offset: first element.
            as_dtype: values are rounded to this dtype before they are converted to that of `target`.

        Raises:
            ConfigError: the file is too short, or cannot be read.
        """
        step = _PIECE_BYTES // self.dtype.itemsize
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for first in range(0, target.numel(), step):
                    part = target[first : first + step]
                    if part.dtype == as_dtype == self.dtype and part.is_contiguous():
                        self._read_piece(descriptor, part, offset + first)
                        continue
                    piece = torch.empty(part.numel(), dtype=self.dtype)
                    self._read_piece(descriptor, piece, offset + first)
                    part.copy_(piece.to(as_dtype))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"weights {self.path} cannot be read: {error.strerror}") from None

    def _read_piece(self, descriptor: int, piece: torch.Tensor, offset: int) -> None:
        waiting = piece.view(torch.uint8).numpy().data
        position = self.first_byte + offset * self.dtype.itemsize
        while waiting:
            count = os.preadv(descriptor, [waiting], position)
            if count == 0:
                raise ConfigError(f"weights {self.path}: the file ends within tensor {self.name!r}")
            waiting, position = waiting[count:], position + count


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The tensors in files from which a model takes its initial values.

    Attributes:
        parameters: the tensors of parameters, by the key that the caller has given to each parameter.
        buffers: the tensors of buffers, by name.
    """

    parameters: Mapping[int, FileTensor]
    buffers: Mapping[str, FileTensor]


class Weights:
    """The tensors of a safetensors file or of a directory of such files; `match` finds those of a model.

    Args:
        path: a file; or a directory with model.safetensors; or a directory with model.safetensors.index.json and the
            files that this index names.

    Raises:
        ConfigError: a file does not exist or is not a safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, FileTensor] = {}
        files = _files(self.path)
        listed = {name: file for file, names in files.items() for name in names or ()}
        for file, names in files.items():
            header = _read_header(file)
            if names is not None and (absent := [name for name in names if name not in header]):
                raise ConfigError(f"weights {file} has no tensor {absent[0]!r}, which the index beside it says it has")
            # Several files may have a tensor of the same name, for example if a file of an earlier export is left in
            # the directory. The tensor of the file that the index names for it is taken, and the others are ignored.
            self.tensors |= {name: tensor for name, tensor in header.items() if listed.get(name, file) == file}

    def match(
        self, wanted: Sequence[tuple[str, torch.Tensor]], keys: Mapping[int, int], *, strict: bool
    ) -> Found:  # fmt: skip
        """Return the tensors that a model takes from the files.

        Args:
            wanted: the tensors of the model's state with their names. A tied parameter has several names, and the files
                need only one of them; if the files have several, the last one is used.
            keys: the key of each parameter, by the id of its tensor. Tensors of `wanted` without a key are buffers.
            strict: whether a missing or an unexpected tensor is an error. A shape that does not fit is always an error.

        Raises:
            ConfigError: the files do not fit the model; the message lists every difference.
        """
        parameters: dict[int, FileTensor] = {}
        buffers: dict[str, FileTensor] = {}
        problems = []
        for name, tensor in wanted:
            stored = self.tensors.get(name)
            if stored is None:
                continue
            if stored.shape != tensor.shape:
                problems.append(f"{name} is {list(stored.shape)} in {stored.path.name}, {list(tensor.shape)} here")
            elif id(tensor) in keys:
                parameters[keys[id(tensor)]] = stored
            else:
                buffers[name] = stored
        if strict:
            here = {id(tensor) for name, tensor in wanted if name in self.tensors}
            problems += [f"{name} is missing in the files" for name, tensor in wanted if id(tensor) not in here]
            names = {name for name, _ in wanted}
            problems += [f"{name} is unexpected: the model has no such tensor" for name in self.tensors.keys() - names]
        if problems:
            hint = "" if not strict else "\n(initialize(strict_weights=False) leaves out what is missing or unexpected)"
            raise ConfigError(f"weights {self.path} do not fit the model:\n" + "\n".join(sorted(problems)) + hint)
        return Found(parameters=parameters, buffers=buffers)


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Return the safetensors files at `path`, each with the names of the tensors that the index lists for it.

    If there is no index, the file has None in place of the names.
    """
    try:
        return _listed_files(path)
    except OSError as error:
        raise ConfigError(f"weights {path} cannot be read: {error.strerror}") from None


def _listed_files(path: Path) -> dict[Path, list[str] | None]:
    if path.is_file():
        return {path: None}
    index = path / _INDEX_NAME
    if not index.is_file():
        if not (path / _FILE_NAME).is_file():
            raise ConfigError(f"weights {path}: write the path of a safetensors file, or of a directory with one")
        return {path / _FILE_NAME: None}
    files: dict[Path, list[str] | None] = {}
    try:
        for name, file in parse_small_json(read_regular(index, _MAX_INDEX_BYTES), MOST_VALUES)["weight_map"].items():
            if not isinstance(file, str) or Path(file).name != file or file == "..":
                raise ConfigError(f"weights {index} names the file {file!r}, which is not in its own directory")
            names = files.setdefault(path / file, [])
            assert names is not None
            names.append(name)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"weights {index} is not an index of safetensors files: {error!r}") from None
    return files


def _read_header(path: Path) -> dict[str, FileTensor]:
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ConfigError(f"weights {path} is not a safetensors file: its header would have {size} bytes")
            header = parse_small_json(file.read(size), MOST_VALUES)
            end = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"weights {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"weights {path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"weights {path} is not a safetensors file: its header is a {type(header).__name__}")
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, entry, 8 + size, end) for name, entry in header.items()}
    _check_order(path, found, 8 + size, end)
    return found


def _check_order(path: Path, tensors: Mapping[str, FileTensor], first_byte: int, file_bytes: int) -> None:
    """Check that the tensors' bytes follow one after another up to the file's end, as the format requires.

    It can raise ConfigError.
    """
    end = first_byte
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.first_byte, tensor.nbytes)):
        if tensor.first_byte != end:
            what = "overlaps another one" if tensor.first_byte < end else "has a gap before it"
            raise ConfigError(f"weights {path}: tensor {tensor.name!r} {what}, which the format does not allow")
        end += tensor.nbytes
    if end != file_bytes:
        raise ConfigError(
            f"weights {path}: {file_bytes - end} bytes follow the last tensor, which the format does not allow"
        )


def _entry(path: Path, name: str, entry: Mapping[str, Any], data: int, end: int) -> FileTensor:
    try:
        first, last = entry["data_offsets"]
        shape, dtype = torch.Size(entry["shape"]), _DTYPES[entry["dtype"]]
        if min(shape, default=0) < 0:
            raise ValueError("a negative size")
        if not (isinstance(first, int) and isinstance(last, int)):
            raise ValueError("offsets that are no integers")
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f"weights {path}: the entry of tensor {name!r} is not understood: {entry}") from None
    # The number of elements is computed by `math.prod` with Python's integers. `shape.numel()` could overflow, and give
    # a number that fits the offsets by accident.
    if not 0 <= first <= last <= end - data or last - first != math.prod(shape) * dtype.itemsize:
        raise ConfigError(f"weights {path}: tensor {name!r} has offsets {first}:{last} that do not fit it or the file")
    return FileTensor(path=path, name=name, dtype=dtype, shape=shape, first_byte=data + first)
