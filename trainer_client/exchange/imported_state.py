"""The client state of an imported job: what a commit of a trainer would carry, as far as the checkpoint has it.

run/imported.py reads it when a trainer goes on from the job. Must never have a value that the checkpoint does not have:
what is not known is None there, and the trainer's own value counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trainer_client.errors import ClientStateError
from trainer_client.exchange.checkpoint import Checkpoint, CheckpointTensor
from trainer_client.model.plain_state import MAX_BUFFER_BYTES
from trainer_client.run import client_state

log = logging.getLogger(__name__)


def encode_state(
    checkpoint: Checkpoint, tensors: Sequence[CheckpointTensor], buffers: Mapping[str, torch.Tensor], source: str
) -> tuple[bytes, tuple[str, ...]]:
    """Return the encoded client state, and the names of entries of the checkpoint that it does not have.

    Args:
        checkpoint: the checkpoint.
        tensors: those of its tensors that are the job's parameters.
        buffers: the model's buffers.
        source: the path or URL that the user has named.

    Raises:
        ClientStateError: the user's part of the checkpoint has a value that cannot be stored.
    """
    names = {tensor.name: index for index, tensor in enumerate(tensors)}
    kept, left_out = _small(buffers)
    scheduler = _storable(checkpoint.lr_scheduler)
    if scheduler is None and checkpoint.lr_scheduler is not None:
        left_out.append("lr_scheduler")
    state = {
        "counters": {
            "global_steps": checkpoint.step,
            "skipped_steps": checkpoint.skipped_steps,
            "skipped_in_row": 0,
            "micro_steps": 0,
            "accumulation": None,
            "train_batch_size": None,
            "global_samples": checkpoint.samples,
            "clock": 0,
        },
        "update_counts": [tensor.update_count for tensor in tensors],
        "scaler": checkpoint.loss_scale or {"scale": 1.0, "patience": 1, "good_steps": 0, "dynamic": False},
        "optimizer": _groups(checkpoint, names),
        "lr_scheduler": scheduler,
        "random": None,
        "data": None,
        "model": {
            "aliases": {alias: fqn for alias, fqn in checkpoint.aliases.items() if fqn in names},
            "buffers": kept,
            "left_out": left_out,
        },
        "user": checkpoint.user,
        "made_at": time.time(),
        "made_with": None,
        "imported": {"format": checkpoint.format, "source": source},
    }
    return client_state.encode(state), tuple(left_out)


def _small(buffers: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the buffers that a commit has room for, and the names of the others."""
    kept: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    room = MAX_BUFFER_BYTES
    for name, buffer in buffers.items():
        if buffer.nbytes <= room:
            kept[name] = buffer
            room -= buffer.nbytes
        else:
            left_out.append(name)
    return kept, left_out


def _storable(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the state of a scheduler, or None if it has a value that a commit cannot carry."""
    try:
        client_state.encode({"lr_scheduler": state})
    except ClientStateError as error:
        log.warning("the state of the learning-rate scheduler is not imported: %s", error)
        return None
    return state


def _groups(checkpoint: Checkpoint, names: Mapping[str, int]) -> list[dict[str, Any]] | None:
    """Return the parameter groups, with the numbers of their parameters."""
    if checkpoint.groups is None:
        return None
    return [
        {key: value for key, value in group.settings.items() if _storable({key: value}) is not None}
        | {"params": _ranges(names[name] for name in group.names if name in names)}
        for group in checkpoint.groups
    ]


def _ranges(indexes: Iterable[int]) -> list[list[int]]:
    """Return the runs of consecutive indexes as [first, last]."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ranges
