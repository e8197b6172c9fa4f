"""The reader of checkpoints of torch.distributed.checkpoint: weights and optimizer states by name, from any ranks.

Its `.metadata` is a pickle, and torch reads it with the plain pickle module. This module reads it with an unpickler
that knows the few classes that torch writes there, and refuses every other name. It must never hold more than one chunk
of a tensor; the program that wrote the checkpoint has decided how large its chunks are.

torch.distributed.checkpoint takes 1 s to import, so only an import that reads this format imports this module.
"""

from __future__ import annotations

import importlib
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from trainer_client.errors import ImportCheckpointError
from trainer_client.exchange import torch_files
from trainer_client.exchange.checkpoint import STATE_KINDS, Checkpoint, CheckpointTensor, ParameterGroup
from trainer_client.exchange.source import DCP_METADATA, name_within, verify_checksums
from trainer_client.store_client.types import Kind

_MAX_METADATA_BYTES = 1 << 30
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
# The names that a `.metadata` may use, by their modules. None of them does more than to hold values.
_ALLOWED: Mapping[str, frozenset[str]] = {
    _METADATA_MODULE: frozenset(
        {
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch": frozenset({"Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"set", "frozenset"}),
}
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})
# The top-level names under which programs keep the optimizer.
_OPTIMIZERS = ("optimizer", "optim", "optimizers")
_MODEL = "model"
_SETTING = re.compile(r"param_groups\.(\d+)\.(\w+)")
_COUNT = "step"


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that finds only the names of _ALLOWED and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        # A checkpoint has the path to which it was written. This module does not use it, so the path may be that of
        # another operating system.
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath
        if name in _ALLOWED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(importlib.import_module(module), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run any code")


def open_dcp(path: Path, *, verify: bool, weights_only: bool = False) -> Checkpoint:
    """Open a checkpoint of torch.distributed.checkpoint.

    Weights are the tensors below an entry `model`, at any depth; without one, all tensors that are not the optimizer's.
    States belong to weights by name.

    Args:
        verify: whether all files are read and compared with their checksums first.
        weights_only: whether the optimizer is left out.

    Raises:
        ImportCheckpointError: the checkpoint is damaged, incomplete, or not safe to load, or has a state of no weight
            or of an unknown kind.
    """
    metadata = _read_metadata(path / DCP_METADATA)
    files = _Files(path, metadata)
    if verify:
        verify_checksums([path / DCP_METADATA, *files.paths])
    weights, states, others = _sort(metadata)
    if not weights:
        raise ImportCheckpointError(
            f"{path} has no tensors of a model; its entries: {', '.join(sorted(metadata.state_dict_metadata)[:5])}"
        )
    if weights_only:
        states = {}
    elif foreign := sorted(states.keys() - weights.keys()):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ImportCheckpointError(
            f"{path} has optimizer states of {foreign[0]!r}{more}, and no weight of such a name: save the dict that "
            "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict returns, in which "
            "states have the names of their weights, or import the weights alone (--weights-only)"
        )
    aliases = files.aliases(weights)
    tensors = []
    for name, key in weights.items():
        if name in aliases:
            continue
        weight = files.values(key)
        if unknown := [kind for kind, state in states.get(name, {}).items() if files.is_unknown(kind, state)]:
            raise ImportCheckpointError(
                f"{path}: the optimizer has a state {unknown[0]!r}, which no optimizer here has "
                f"({', '.join(STATE_KINDS)}): import the weights alone (--weights-only)"
            )
        kinds: dict[Kind, _Chunks] = {}
        for kind in STATE_KINDS:
            if (state := states.get(name, {}).get(kind)) is not None:
                kinds[kind] = files.values(state)
        for kind, values in kinds.items():
            if math.prod(values.shape) != math.prod(weight.shape):
                raise ImportCheckpointError(f"{path}: {kind} of {name!r} has another shape than the tensor")
        count = files.scalar(states[name][_COUNT]) if _COUNT in states.get(name, {}) else 0
        tensors.append(CheckpointTensor(name=name, shape=weight.shape, weight=weight, states=kinds, update_count=count))
    groups = files.groups(others) if states else None
    return Checkpoint(
        format="dcp",
        tensors=tensors,
        aliases=aliases,
        step=max((tensor.update_count for tensor in tensors), default=0),
        groups=groups,
    )


def _read_metadata(path: Path) -> Metadata:
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise ImportCheckpointError(f"{path} has {path.stat().st_size} bytes, above {_MAX_METADATA_BYTES}")
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it is a {type(metadata).__name__}")
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                _check_entry(key, entry)
        if not isinstance(metadata.storage_data, dict):
            raise TypeError("it does not say where the tensors are")
    except Exception as error:
        # A damaged pickle can raise an error of any class.
        raise ImportCheckpointError(f"{path} is not loaded: {str(error) or type(error).__name__}") from None
    return metadata


def _check_entry(key: str, entry: TensorStorageMetadata) -> None:
    """Check that the chunks of a tensor lie within it and have its number of elements. It can raise ValueError."""
    size = tuple(entry.size)
    numel = 0
    for chunk in entry.chunks:
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError(f"a chunk of {key!r} has another number of dimensions")
        if any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a chunk of {key!r} leaves the tensor")
        numel += math.prod(sizes)
    if numel != math.prod(size):
        raise ValueError(f"the chunks of {key!r} have {numel} elements, and the tensor {math.prod(size)}")


def _sort(metadata: Metadata) -> tuple[dict[str, str], dict[str, dict[str, str]], dict[str, str]]:
    """Return the keys of the weights by name, of the states by name and kind, and of the optimizer's other entries."""
    paths: dict[str, tuple[Any, ...]] = {
        key: tuple((metadata.planner_data or {}).get(key, (key,))) for key in metadata.state_dict_metadata
    }
    has_model = any(_MODEL in path[:-1] for path in paths.values())
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    for key, path in paths.items():
        names = [str(part) for part in path]
        begin = next((place for place, part in enumerate(names[:-1]) if part in _OPTIMIZERS), None)
        if begin is not None:
            # One entry of the path may have several names, joined by dots, if the optimizer was flattened.
            rest = ".".join(names[begin + 1 :])
            name, _, kind = rest.removeprefix("state.").rpartition(".")
            if rest.startswith("state.") and name:
                states.setdefault(name, {})[kind] = key
            else:
                others[rest] = key
        elif has_model and _MODEL in names[:-1]:
            weights[".".join(names[names.index(_MODEL) + 1 :])] = key
        elif not has_model:
            weights[".".join(names)] = key
    tensors = {
        name: key
        for name, key in weights.items()
        if isinstance(metadata.state_dict_metadata[key], TensorStorageMetadata)
    }
    return tensors, states, others


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The elements of a tensor, in chunks of files."""

    files: _Files
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, target: torch.Tensor, offset: int) -> None:
        found = 0
        for chunk in self.files.chunks(self.key):
            for first, count, values in chunk.rows(self.shape, offset, offset + target.numel()):
                target[first - offset : first - offset + count].copy_(values)
                found += count
        if found != target.numel():
            raise ImportCheckpointError(
                f"the chunks of {self.key!r} have {found} of the {target.numel()} elements from {offset} on: they "
                "overlap, or leave out some"
            )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A box of a tensor, with the place of its bytes."""

    files: _Files
    key: str
    index: MetadataIndex
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def rows(self, shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the runs of elements of the box that lie in [begin, end) of the flattened tensor.

        Each is yielded as its first element in the tensor, its length and its values. The box is read only if it has
        such a run.
        """
        if not math.prod(self.sizes):
            return
        strides = _strides(shape)
        # In all dimensions from `whole` on the box is as large as the tensor, so its elements lie one after another in
        # the tensor.
        whole = len(shape)
        while whole and self.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1
        run = math.prod(self.sizes[max(whole - 1, 0) :])
        outer = self.sizes[: max(whole - 1, 0)]
        corner = sum(o * s for o, s in zip(self.offsets, strides, strict=True))
        last = corner + sum((n - 1) * s for n, s in zip(self.sizes, strides, strict=True))
        if last < begin or corner >= end:
            return
        values: torch.Tensor | None = None
        for number in range(math.prod(outer)):
            first, rest = corner, number
            for size, stride in zip(reversed(outer), reversed(strides[: len(outer)]), strict=True):
                rest, place = divmod(rest, size)
                first += place * stride
            low, high = max(first, begin), min(first + run, end)
            if low < high:
                if values is None:
                    values = self.files.load_chunk(self)
                start = number * run + low - first
                yield low, high - low, values[start : start + high - low]


class _Files:
    """The data files of a checkpoint. The chunk that was read last is kept, because it is read piece by piece."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self._directory = directory
        self._metadata = metadata
        self._places: Mapping[Any, Any] = metadata.storage_data
        self._last: tuple[_Chunk, torch.Tensor] | None = None
        self._of_key: dict[str, list[_Chunk]] = {}
        names = {info.relative_path for info in self._places.values()}
        self.paths = [directory / name_within(name, directory / DCP_METADATA) for name in sorted(names, key=str)]

    def values(self, key: str) -> _Chunks:
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise ImportCheckpointError(f"{self._directory}: the entry {key!r} is no tensor")
        dtype = entry.properties.dtype
        for chunk in self.chunks(key):
            _, _, nbytes = self._locate(chunk.index)
            # Without this look, a small file could make the import prepare for a tensor of any size.
            if math.prod(chunk.sizes) * dtype.itemsize > nbytes:
                raise ImportCheckpointError(
                    f"{self._directory}: the chunk of {key!r} at {list(chunk.offsets)} has fewer bytes than elements"
                )
        return _Chunks(self, key, tuple(entry.size), dtype)

    def chunks(self, key: str) -> list[_Chunk]:
        if key not in self._of_key:
            entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[key])
            self._of_key[key] = [
                _Chunk(self, key, MetadataIndex(key, chunk.offsets), tuple(chunk.offsets), tuple(chunk.sizes))
                for chunk in entry.chunks
            ]
        return self._of_key[key]

    def aliases(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Return, for each further name of the same bytes in a file, the first name of these bytes."""
        first: dict[Any, str] = {}
        found: dict[str, str] = {}
        for name, key in weights.items():
            chunks = self.chunks(key)
            if not chunks or not math.prod(chunks[0].sizes):
                continue
            info = self._place(chunks[0].index)
            other = first.setdefault((info.relative_path, info.offset), name)
            if other != name:
                found[name] = other
        return found

    def load_chunk(self, chunk: _Chunk) -> torch.Tensor:
        """Return the flattened values of a chunk. It can raise ImportCheckpointError."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None
        values = self._load(chunk.index)
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != chunk.sizes:
            raise ImportCheckpointError(
                f"{self._directory}: the chunk of {chunk.key!r} at {list(chunk.offsets)} is not a tensor of shape "
                f"{list(chunk.sizes)}"
            )
        # A stride of 0 would let a small file stand for a tensor of any size.
        if values.layout is not torch.strided or values.nbytes > values.untyped_storage().nbytes():
            raise ImportCheckpointError(f"{self._directory}: the chunk of {chunk.key!r} has fewer bytes than elements")
        flat = values.detach().contiguous().reshape(-1)
        self._last = chunk, flat
        return flat

    def is_unknown(self, kind: str, key: str) -> bool:
        """Return whether the entry of a state has elements for a kind that no store keeps. A count has none."""
        entry = self._metadata.state_dict_metadata[key]
        return kind not in STATE_KINDS and isinstance(entry, TensorStorageMetadata) and len(entry.size) > 0

    def scalar(self, key: str) -> int:
        """Return a count that was saved as a tensor or as a number."""
        value = self._value(key)
        if not isinstance(value, int | float) or value < 0 or value != int(value):
            raise ImportCheckpointError(f"{self._directory}: {key!r} is {value!r}, and a count is expected")
        return int(value)

    def groups(self, others: Mapping[str, str]) -> list[ParameterGroup] | None:
        """Return the optimizer's parameter groups; None if the checkpoint does not have them in a known form.

        Args:
            others: the keys of the optimizer's entries that are not states, as `param_groups.0.lr`.
        """
        settings: dict[int, dict[str, Any]] = {}
        for name, key in others.items():
            if (match := _SETTING.fullmatch(name)) is not None:
                settings.setdefault(int(match[1]), {})[match[2]] = self._value(key)
        groups = [settings[number] for number in sorted(settings)]
        if not groups or not all(isinstance(group.get("params"), list) for group in groups):
            return None
        return [
            ParameterGroup(
                names=[str(name) for name in group["params"]],
                settings={key: value for key, value in group.items() if key != "params"},
            )
            for group in groups
        ]

    def _value(self, key: str) -> Any:
        """Return a value of the optimizer that is not a state. A tensor of one element is returned as a number."""
        if not isinstance(self._metadata.state_dict_metadata[key], TensorStorageMetadata):
            return self._load(MetadataIndex(key))
        value = self.load_chunk(self.chunks(key)[0])
        return value.item() if value.numel() == 1 else value

    def _place(self, index: MetadataIndex) -> Any:
        info = self._places.get(index)
        if info is None:
            raise ImportCheckpointError(f"{self._directory / DCP_METADATA} does not say where {index.fqn!r} is")
        return info

    def _locate(self, index: MetadataIndex) -> tuple[Path, int, int]:
        """Return the file, the first byte and the length of an entry. It can raise ImportCheckpointError."""
        info = self._place(index)
        path = self._directory / name_within(info.relative_path, self._directory / DCP_METADATA)
        try:
            size = path.stat().st_size
            if not 0 <= info.offset <= info.offset + info.length <= size:
                raise ValueError(f"{info.length} bytes from {info.offset} on leave the file of {size}")
        except (OSError, ValueError, TypeError) as error:
            raise ImportCheckpointError(f"{path}: {index.fqn!r} cannot be read: {error}") from None
        return path, info.offset, info.length

    def _load(self, index: MetadataIndex) -> Any:
        path, offset, length = self._locate(index)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(length)
        except (OSError, ValueError) as error:
            raise ImportCheckpointError(f"{path}: {index.fqn!r} cannot be read: {error}") from None
        return torch_files.load_embedded(content, f"{path}: {index.fqn!r}")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
