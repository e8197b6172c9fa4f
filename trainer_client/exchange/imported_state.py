"""The client state of an imported job: the values that a trainer commits, as far as the checkpoint has them.

training/run/imported.py reads this client state when a trainer resumes from the job. This module must never invent a
value that the checkpoint does not have: it stores None, and the trainer then uses the value of its own run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_client.base.index_ranges import to_ranges
from trainer_client.errors import ClientStateError
from trainer_client.exchange.checkpoint import Checkpoint, CheckpointTensor
from trainer_client.training.model.plain_state import MAX_BUFFER_BYTES
from trainer_client.training.run import client_state
from trainer_client.training.run.stored_state import sort_counts, sort_groups


def encode_state(
    checkpoint: Checkpoint, tensors: Sequence[CheckpointTensor], buffers: Mapping[str, torch.Tensor], source: str
) -> tuple[bytes, tuple[str, ...]]:
    """Return the encoded client state, and the names of the checkpoint's entries that are left out of it.

    Args:
        checkpoint: the checkpoint.
        tensors: the tensors of the checkpoint that are the job's parameters.
        buffers: the model's buffers.
        source: the path or URL of the checkpoint, as the user has written it.

    Raises:
        ClientStateError: the user's part of the checkpoint has a value that cannot be stored.
    """
    names = {tensor.name: index for index, tensor in enumerate(tensors)}
    counts = [tensor.update_count for tensor in tensors]
    groups = _groups(checkpoint, names)
    kept, left_out = _small(buffers)
    scheduler = checkpoint.lr_scheduler
    if not _is_storable(scheduler):
        scheduler = None
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
        "update_counts": counts,
        "sorted_counts": sort_counts(counts, list(names)),
        "scaler": checkpoint.loss_scale or {"scale": 1.0, "patience": 1, "good_steps": 0, "dynamic": False},
        "optimizer": groups,
        "sorted_groups": None if groups is None else sort_groups(groups, list(names)),
        "lr_scheduler": scheduler,
        "random": None,
        "data": None,
        "model": {
            "aliases": {alias: fqn for alias, fqn in checkpoint.aliases.items() if fqn in names},
            "buffers": kept,
            "left_out": left_out,
            # The commit records the parameters without elements. A store lists only parameters of which it has
            # elements, so an export could not find them there.
            "empty": {t.name: torch.empty(t.shape, dtype=t.weight.dtype) for t in tensors if not t.numel},
        },
        "user": checkpoint.user,
        "made_at": time.time(),
        "made_with": None,
        "imported": {"format": checkpoint.format, "source": source},
    }
    return client_state.encode(state), tuple(left_out)


def _small(buffers: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the buffers that the client state takes (at most MAX_BUFFER_BYTES together), and the others' names."""
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


def _is_storable(value: Any) -> bool:
    """Return whether a value is of a type that can be stored in the client state of a commit."""
    try:
        client_state.encode({"value": value})
    except ClientStateError:
        return False
    return True


def _groups(checkpoint: Checkpoint, names: Mapping[str, int]) -> list[dict[str, Any]] | None:
    """Return the optimizer's parameter groups, with ranges of parameters' indexes in place of the names.

    The result is None if the checkpoint has no parameter groups. `names` has each parameter's index in the job.
    """
    if checkpoint.groups is None:
        return None
    return [
        {key: value for key, value in group.settings.items() if _is_storable(value)}
        | {"params": to_ranges(names[name] for name in group.names if name in names)}
        for group in checkpoint.groups
    ]
