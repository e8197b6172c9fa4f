"""The reader of checkpoints of torch.distributed.checkpoint: weights and optimizer states by name, from any ranks.

The `.metadata` of a checkpoint is a pickle, and torch reads it with the plain pickle module. This module reads it as
plain values (base/foreign/plain_pickle.py), and makes records of its own of the few things in it that an import needs.
It must never hold more than one chunk of a tensor; the program that wrote the checkpoint has decided how large its
chunks are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_client.base.foreign import torch_files
from trainer_client.base.foreign.files import open_regular
from trainer_client.client.store_client.types import Kind
from trainer_client.errors import ImportCheckpointError
from trainer_client.exchange.checkpoint import STATE_KINDS, Checkpoint, CheckpointTensor, ParameterGroup
from trainer_client.exchange.dcp_metadata import DcpMetadata, DcpTensor, FilePlace, read_metadata
from trainer_client.exchange.source import DCP_METADATA, name_within, verify_checksums

# Programs keep the optimizer's state dict in a checkpoint under one of these top-level names.
_OPTIMIZERS = ("optimizer", "optim", "optimizers")
_MODEL = "model"
_SETTING = re.compile(r"param_groups\.(\d+)\.(\w+)")
_COUNT = "step"


def open_dcp(path: Path, *, verify: bool, weights_only: bool = False) -> Checkpoint:
    """Open a checkpoint of torch.distributed.checkpoint.

    Weights are the tensors below an entry `model`, at any depth; without such an entry, all tensors that are not the
    optimizer's. An optimizer state belongs to the weight whose name it has.

    Args:
        verify: whether all files are read and compared with their checksums first.
        weights_only: whether the optimizer's states and parameter groups are left out.

    Raises:
        ImportCheckpointError: the checkpoint is damaged, incomplete, or not safe to load, or has an optimizer state of
            a weight that it does not have, or of an unknown kind.
    """
    metadata = read_metadata(path / DCP_METADATA)
    files = _Files(path, metadata)
    if verify:
        verify_checksums([path / DCP_METADATA, *files.paths])
    weights, states, others = _sort(metadata)
    if not weights:
        raise ImportCheckpointError(
            f"{path} has no tensors of a model; its entries: {', '.join(sorted(metadata.entries)[:5])}"
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


def _sort(metadata: DcpMetadata) -> tuple[dict[str, str], dict[str, dict[str, str]], dict[str, str]]:
    """Return three dicts with keys of the checkpoint.

    They have the keys of the weights by name, those of the optimizer states by name and kind, and those of the other
    entries of the optimizer by name.
    """
    paths = {key: metadata.paths.get(key, (key,)) for key in metadata.entries}
    has_model = any(_MODEL in path[:-1] for path in paths.values())
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    for key, names in paths.items():
        begin = next((place for place, part in enumerate(names[:-1]) if part in _OPTIMIZERS), None)
        if begin is not None:
            # If the optimizer's state dict was flattened, one element of `names` has several names, joined by dots. So
            # all elements after the optimizer's name are joined before they are divided.
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
    tensors = {name: key for name, key in weights.items() if metadata.entries[key] is not None}
    return tensors, states, others


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The elements of one tensor of the checkpoint, which `read` gathers from the chunks in the files."""

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
    """One chunk of a tensor: the box that begins at index `offsets` and has the shape `sizes`."""

    files: _Files
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def rows(self, shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the runs of elements of the box that lie in [begin, end) of the flattened tensor.

        Each run is yielded as (index of its first element in the flattened tensor, number of elements, values). The
        file is read only if the box has a run in [begin, end).
        """
        if not math.prod(self.sizes):
            return
        strides = _strides(shape)
        # In the dimension `whole` and all later ones, the chunk is as large as the tensor. So the chunk's elements that
        # differ only in these dimensions lie one after another in the flattened tensor.
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
    """The data files of a checkpoint, from which this class reads chunks of tensors and other values of the optimizer.

    A chunk is a box of a tensor's elements, which the checkpoint has in one file. The chunk that was read most recently
    stays in memory, because a caller reads a tensor in pieces, and several pieces may lie in one chunk.
    """

    def __init__(self, directory: Path, metadata: DcpMetadata) -> None:
        self._directory = directory
        self._metadata = metadata
        self._last: tuple[_Chunk, torch.Tensor] | None = None
        self._of_key: dict[str, list[_Chunk]] = {}
        names = {place.file for place in metadata.places.values()}
        self.paths = [directory / name_within(name, directory / DCP_METADATA) for name in sorted(names)]

    def values(self, key: str) -> _Chunks:
        entry = self._tensor(key)
        for chunk in self.chunks(key):
            _, place = self._locate(key, chunk.offsets)
            # A small damaged file may name a chunk of any size, for which the import would prepare. So the size of each
            # chunk is compared with the bytes that the file has for it.
            if math.prod(chunk.sizes) * entry.dtype.itemsize > place.size_bytes:
                raise ImportCheckpointError(
                    f"{self._directory}: the chunk of {key!r} at {list(chunk.offsets)} has fewer bytes than elements"
                )
        return _Chunks(self, key, entry.shape, entry.dtype)

    def chunks(self, key: str) -> list[_Chunk]:
        if key not in self._of_key:
            self._of_key[key] = [_Chunk(self, key, offsets, sizes) for offsets, sizes in self._tensor(key).chunks]
        return self._of_key[key]

    def aliases(self, weights: Mapping[str, str]) -> dict[str, str]:
        """Return the further names of tied weights, which share bytes of a file, each with the weight's first name."""
        first: dict[tuple[str, int], str] = {}
        found: dict[str, str] = {}
        for name, key in weights.items():
            chunks = self.chunks(key)
            if not chunks or not math.prod(chunks[0].sizes):
                continue
            place = self._place(key, chunks[0].offsets)
            other = first.setdefault((place.file, place.first_byte), name)
            if other != name:
                found[name] = other
        return found

    def load_chunk(self, chunk: _Chunk) -> torch.Tensor:
        """Return the flattened values of a chunk. It can raise ImportCheckpointError."""
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None
        values = self._load(chunk.key, chunk.offsets)
        if not isinstance(values, torch.Tensor) or tuple(values.shape) != chunk.sizes:
            raise ImportCheckpointError(
                f"{self._directory}: the chunk of {chunk.key!r} at {list(chunk.offsets)} is not a tensor of shape "
                f"{list(chunk.sizes)}"
            )
        # A tensor with a stride of 0 repeats its elements, so a small file could make the import copy a tensor of any
        # size. So a tensor that is larger than its storage is refused.
        if values.nbytes > values.untyped_storage().nbytes():
            raise ImportCheckpointError(f"{self._directory}: the chunk of {chunk.key!r} has fewer bytes than elements")
        flat = values.detach().contiguous().reshape(-1)
        self._last = chunk, flat
        return flat

    def is_unknown(self, kind: str, key: str) -> bool:
        """Return whether an optimizer state is of a kind that no store keeps; false for counts and other scalars."""
        entry = self._metadata.entries[key]
        return kind not in STATE_KINDS and entry is not None and len(entry.shape) > 0

    def scalar(self, key: str) -> int:
        """Return a count, for example of updates, that the checkpoint has as a tensor or as a number.

        Raises:
            ImportCheckpointError: the entry is no count.
        """
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
        """Return an entry of the optimizer that is no state of a parameter; a tensor of one element as a number."""
        if self._metadata.entries[key] is None:
            return self._load(key, None)
        value = self.load_chunk(self.chunks(key)[0])
        return value.item() if value.numel() == 1 else value

    def _tensor(self, key: str) -> DcpTensor:
        entry = self._metadata.entries[key]
        if entry is None:
            raise ImportCheckpointError(f"{self._directory}: the entry {key!r} is no tensor")
        return entry

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> FilePlace:
        place = self._metadata.places.get((key, offsets))
        if place is None:
            raise ImportCheckpointError(f"{self._directory / DCP_METADATA} does not say where {key!r} is")
        return place

    def _locate(self, key: str, offsets: tuple[int, ...] | None) -> tuple[Path, FilePlace]:
        """Return the file that has the bytes of an entry or of one of its chunks, and the range of these bytes.

        Args:
            key: the entry's key in the checkpoint.
            offsets: the first index of the chunk; None for an entry that is no tensor.

        Raises:
            ImportCheckpointError: the checkpoint does not name the bytes, or the file is missing or too short.
        """
        place = self._place(key, offsets)
        path = self._directory / name_within(place.file, self._directory / DCP_METADATA)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ImportCheckpointError(f"{path}: {key!r} cannot be read: {error.strerror}") from None
        if place.first_byte + place.size_bytes > size:
            raise ImportCheckpointError(
                f"{path}: {key!r} cannot be read: {place.size_bytes} bytes from {place.first_byte} on leave the file "
                f"of {size}"
            )
        return path, place

    def _load(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        path, place = self._locate(key, offsets)
        content = bytearray(place.size_bytes)
        try:
            with open_regular(path) as file:
                file.seek(place.first_byte)
                file.readinto(content)
        except OSError as error:
            raise ImportCheckpointError(f"{path}: {key!r} cannot be read: {error.strerror}") from None
        return torch_files.load_embedded(content, f"{path}: {key!r}")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
