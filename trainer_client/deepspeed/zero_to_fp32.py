"""DeepSpeed's functions that convert a checkpoint to fp32 weights, for checkpoints of this library.

A checkpoint of this library is a step that stores keep, so the weights are read from the stores, without a process
group and without an engine. The environment names the token and TLS files, as for StoreClient.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from trainer_client.base.not_built import refuse
from trainer_client.client.transport.credentials import Credentials
from trainer_client.engine.engine import Engine
from trainer_client.errors import CheckpointError, ConfigError
from trainer_client.exchange.destination import open_destination
from trainer_client.exchange.safetensors_format import write_safetensors
from trainer_client.exchange.stored_model import ModelTensor, StoredModel, open_model
from trainer_client.exchange.torch_format import write_fp32
from trainer_client.training.model.owners import owner_of
from trainer_client.training.run import checkpoint_files as files

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
]

_NO_FILES = (
    "the states of a checkpoint are in its store, and not in files; get_fp32_state_dict_from_zero_checkpoint returns "
    "the weights, and engine.load_checkpoint restores the states"
)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint by name, and the model's buffers, on the CPU.

    Args:
        checkpoint_dir: the directory that was passed to `save_checkpoint` as `save_dir`.
        tag: name of the checkpoint's directory within it; None: the name in the file `latest`.
        exclude_frozen_parameters: whether parameters that are not trained are left out.
        lazy_mode: has no effect. The values are always tensors, and scripts for lazy mode work, because they call
            `contiguous()` of each value.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or DeepSpeed has written it.
        StoreError: a store that keeps the step cannot be reached, or does not have it any more.
    """
    state: dict[str, torch.Tensor] = {}
    with _open(checkpoint_dir, tag) as model:
        weights = _weights(model, with_frozen=not exclude_frozen_parameters)
        model.plan(weights)
        for weight in weights:
            pieces = [piece.flatten().clone() for piece in model.pieces(weight)]
            value = torch.cat(pieces) if pieces else torch.empty(0, dtype=weight.dtype)
            state |= dict.fromkeys((weight.name, *weight.aliases), value.view(weight.shape))
    return state


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> NoReturn:
    """Refuse the call, because a checkpoint of this library has no such file. It raises NotBuiltError."""
    refuse(f"get_model_state_file({str(checkpoint_dir)!r}, {zero_stage!r})", _NO_FILES)


def get_optim_files(checkpoint_dir: str | Path) -> NoReturn:
    """Refuse the call, because a checkpoint of this library has no such files. It raises NotBuiltError."""
    refuse(f"get_optim_files({str(checkpoint_dir)!r})", _NO_FILES)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint as `pytorch_model.bin`, or as several files with an index.

    The weights are copied from the store to the files in pieces, so the model need not fit into memory.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as for `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: a directory that does not exist yet.
        max_shard_size: the most bytes of weights in one file, as a number or a text such as "5GB".
        safe_serialization: whether the files are safetensors.

    Raises:
        ConfigError: `max_shard_size` is not a size.
        CheckpointError, StoreError: as for `get_fp32_state_dict_from_zero_checkpoint`.
        ExportError: the directory exists or cannot be written.
    """
    shard_bytes = _bytes_of(max_shard_size)
    with open_destination(output_dir, overwrite=False) as target, _open(checkpoint_dir, tag) as model:
        weights = _weights(model, with_frozen=not exclude_frozen_parameters)
        model.plan(weights)
        target.require(sum(weight.nbytes for weight in weights))
        write = write_safetensors if safe_serialization else write_fp32
        write(model, weights, target, shard_bytes)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a model, on the CPU, and return the model.

    If the model belongs to an engine, it is taken out of the engine: it becomes a plain model and keeps its dtype, and
    the engine can then only be closed. So this rank cannot go on training. The other ranks do not have to call this
    function.

    Parameters that the checkpoint does not have keep their values. But a parameter of an engine may have no values
    outside of the engine. So if the model belongs to an engine and the checkpoint lacks a parameter, the call is
    refused and the model stays in its engine.

    Args:
        model: the model, or an engine, whose model is then used.

    Raises:
        RuntimeError: the shapes do not fit; or the model belongs to an engine, and the checkpoint lacks a parameter, or
            the engine is within a step.
        CheckpointError, StoreError: as for `get_fp32_state_dict_from_zero_checkpoint`.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if isinstance(model, Engine):
        model = model.module
    if isinstance(engine := owner_of(next(model.parameters(), torch.empty(0))), Engine):
        _require_all(engine, model, state, checkpoint_dir)
        engine.give_up_model()
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def _require_all(
    engine: Engine, model: nn.Module, state: Mapping[str, torch.Tensor], checkpoint_dir: str | Path
) -> None:
    """Raise RuntimeError unless `state`, by the names in `model`, has values for all parameters of the engine."""
    given = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name in state and state[name].shape == parameter.shape
    }
    if lacking := [name for name, parameter in engine.module.named_parameters() if id(parameter) not in given]:
        raise RuntimeError(
            f"load_state_dict_from_zero_checkpoint(): the checkpoint in {checkpoint_dir} has no values, or none of the "
            f"shape, of {', '.join(lacking)}, and a model that leaves its engine has no others: name a checkpoint of "
            "this model, or load into a model that belongs to no engine; nothing was changed"
        )


@contextmanager
def _open(checkpoint_dir: str | Path, tag: str | None) -> Iterator[StoredModel]:
    """Have the stores hold the step of a checkpoint, and yield its model for reading within the context."""
    directory = Path(checkpoint_dir).absolute()
    wanted = files.read_latest(directory) if tag is None else files.check_tag(str(tag))
    if wanted is None:
        raise CheckpointError(f"there is no file {directory / files.LATEST}: give tag=...")
    manifest = files.read_manifest(directory / wanted)
    stores = [store.address for store in manifest.stores]
    with open_model(stores, manifest.job, None, Credentials.from_environment(os.environ), kept=manifest.kept) as model:
        # The buffers are taken from the checkpoint's manifest, which has all of them, because the commit in the store
        # has only the small ones.
        model.buffers = files.decode_buffers(manifest.buffers_of(0), str(directory / wanted / files.MANIFEST))
        yield model


def _weights(model: StoredModel, *, with_frozen: bool) -> list[ModelTensor]:
    """Return a checkpoint's parameters as fp32, without the frozen ones unless `with_frozen`, and its buffers."""
    weights = model.weights(torch.float32)
    if with_frozen:
        return weights
    trained = model.optimizer().states
    return [weight for weight in weights if weight.kind is None or weight.name in trained]


def _bytes_of(size: str | int) -> int:
    """Return the bytes of a size, such as "5GB" or a number. It can raise ConfigError."""
    number, unit = (size, 1) if isinstance(size, int) else (size[:-2].strip(), _UNITS.get(size[-2:].upper(), 0))
    try:
        if (found := int(number) * unit) > 0:
            return found
    except ValueError:
        pass
    raise ConfigError(f"max_shard_size = {size!r} is no size: write a number of bytes, or a text such as '5GB'")
