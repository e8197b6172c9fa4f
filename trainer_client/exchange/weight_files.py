"""The reader of weights in safetensors files and in state dicts of torch.save, as transformers and DeepSpeed write.

These files have names and values only, and do not say which tensors are buffers. So the caller gives a function that
tells buffers by their names; without one, integers and the statistics of batch norms are taken for buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paramserver.contract.documents import parse_small_json
from trainer_client.base.foreign import torch_files
from trainer_client.base.foreign.files import read_regular
from trainer_client.errors import ConfigError, ImportCheckpointError
from trainer_client.exchange.checkpoint import Checkpoint, CheckpointTensor, TensorValues, Values
from trainer_client.exchange.source import name_within, verify_checksums
from trainer_client.training.initial.loading import MOST_VALUES, FileTensor, Weights

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MAX_INDEX_BYTES = 256 << 20
# The most elements of a tensor that an import converts to another dtype at a time.
_CONVERTED_AT_ONCE = 128 << 10

# The names of the statistics of torch's batch norms. If the caller does not tell which tensors are buffers, a tensor is
# taken for a buffer if the last part of its name is one of these.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class _FileValues:
    """The elements of a tensor in a safetensors file, which `read` reads from the file piece by piece."""

    stored: FileTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def read(self, target: torch.Tensor, offset: int) -> None:
        # A tensor that is read in another dtype is converted in small pieces, because the heap was seen to keep the
        # temporary memory of large conversions after it was freed.
        step = target.numel() or 1 if target.dtype == self.dtype else _CONVERTED_AT_ONCE
        try:
            for first in range(0, target.numel(), step):
                self.stored.read_into(target[first : first + step], offset + first, target.dtype)
        except ConfigError as error:
            raise ImportCheckpointError(str(error)) from None


def open_safetensors(path: Path, *, verify: bool) -> Checkpoint:
    """Open a safetensors file, or a directory with one file or with an index of several files.

    It can raise ImportCheckpointError.
    """
    try:
        weights = Weights(path)
    except ConfigError as error:
        raise ImportCheckpointError(str(error)) from None
    if verify:
        verify_checksums(sorted({tensor.path for tensor in weights.tensors.values()}))
    return _weights(
        "safetensors", {name: (tuple(stored.shape), _FileValues(stored)) for name, stored in weights.tensors.items()}
    )


def open_state_dict(path: Path, *, verify: bool) -> Checkpoint:
    """Open a state dict of torch.save, or a directory with one file or with an index of several files.

    Names that share the bytes of one tensor are tied.

    Raises:
        ImportCheckpointError: a file is damaged, is no state dict, or is not safe to load.
    """
    files = [path] if path.is_file() else _state_dict_files(path)
    if verify:
        verify_checksums(files)
    tensors: dict[str, tuple[tuple[int, ...], Values]] = {}
    aliases: dict[str, str] = {}
    for file in files:
        # torch maps a file once. So two names in a file whose tensors have the same address are names of one tied
        # tensor.
        places: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in torch_files.load_tensors(file).items():
            if name in tensors:
                raise ImportCheckpointError(f"{file} has tensor {name!r}, which another file has, too")
            first = places.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
            if first != name:
                aliases[name] = first
            else:
                tensors[name] = (tuple(tensor.shape), TensorValues(tensor))
    return _weights("state-dict", tensors, aliases)


def is_state_dict(path: Path) -> bool:
    """Return whether a path has a state dict of torch.save under the names that transformers and DeepSpeed use."""
    return path.is_file() or (path / TORCH).is_file() or (path / TORCH_INDEX).is_file()


def _state_dict_files(path: Path) -> list[Path]:
    index = path / TORCH_INDEX
    if not index.is_file():
        return [path / TORCH]
    try:
        names = set(parse_small_json(read_regular(index, _MAX_INDEX_BYTES), MOST_VALUES)["weight_map"].values())
    except OSError as error:
        raise ImportCheckpointError(f"{index} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImportCheckpointError(f"{index} is not an index of files: {error!r}") from None
    return [path / name_within(name, index) for name in sorted(names, key=str)]


def _weights(
    format: str, found: Mapping[str, tuple[tuple[int, ...], Values]], aliases: Mapping[str, str] | None = None
) -> Checkpoint:
    tensors = [CheckpointTensor(name=name, shape=shape, weight=values) for name, (shape, values) in found.items()]
    return Checkpoint(format=format, tensors=tensors, aliases=aliases or {})


def divide(
    checkpoint: Checkpoint, is_buffer: Callable[[str], bool] | None
) -> tuple[list[CheckpointTensor], dict[str, torch.Tensor]]:
    """Return the parameters of a checkpoint, and the buffers among its tensors with their values.

    Args:
        checkpoint: the checkpoint.
        is_buffer: returns by a tensor's name whether it is a buffer; by default only the statistics of batch
            norms, by their names. Tensors of integers are buffers in any case.

    Raises:
        ImportCheckpointError: a buffer cannot be read.
    """
    parameters, buffers = [], dict(checkpoint.buffers)
    for tensor in checkpoint.tensors:
        by_name = tensor.name.rpartition(".")[2] in _STATISTICS if is_buffer is None else is_buffer(tensor.name)
        if by_name or not tensor.weight.dtype.is_floating_point:
            values = torch.empty(tensor.numel, dtype=tensor.weight.dtype)
            tensor.weight.read(values, 0)
            buffers[tensor.name] = values.reshape(tensor.shape)
        else:
            parameters.append(tensor)
    return parameters, buffers
