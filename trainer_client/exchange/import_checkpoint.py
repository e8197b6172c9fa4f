"""The import of a checkpoint: the detection of its format, the choice of the job's parameters, and the result.

This module keeps nothing after a call. It must never leave anything in the store after an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from trainer_client.client.store_client.types import Kind, Placement
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import ConfigError, ImportCheckpointError, TrainerClientError
from trainer_client.exchange.checkpoint import Checkpoint
from trainer_client.exchange.dcp_source import open_dcp
from trainer_client.exchange.deepspeed_files import is_deepspeed
from trainer_client.exchange.deepspeed_zero import open_deepspeed
from trainer_client.exchange.export import DTYPES, TensorProgress, WeightDType
from trainer_client.exchange.imported_job import ImportedJob
from trainer_client.exchange.imported_state import encode_state
from trainer_client.exchange.source import DCP_METADATA, check_foreign, local_source
from trainer_client.exchange.weight_files import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    divide,
    is_state_dict,
    open_safetensors,
    open_state_dict,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """An import that is complete.

    Attributes:
        job: the job, which is new.
        source: the checkpoint, as the caller has named it.
        format: its format: "safetensors", "state-dict", "dcp" or "deepspeed".
        step: the number of steps that the checkpoint's run had made, from which a trainer goes on.
        committed_step: the number of the job's commit in the store, which operators see. It is above `step` if `step`
            is 0, or if the job's durability would not make a commit with the number `step` durable.
        tensors: the number of parameters.
        states: the kinds of the imported optimizer states; none if only weights were imported.
        size_bytes: the bytes that the job takes in the store.
        left_out: entries of the checkpoint that the job does not have.
        seconds: the duration.
    """

    job: str
    source: str
    format: str
    step: int
    committed_step: int
    tensors: int
    states: tuple[Kind, ...]
    size_bytes: int
    left_out: tuple[str, ...]
    seconds: float


def import_checkpoint(
    store: str,
    job: str,
    source: str | os.PathLike[str],
    *,
    dtype: WeightDType | None = None,
    device: Placement = "nvme",
    durability: str = "step",
    tag: str | None = None,
    weights_only: bool = False,
    exclude: Sequence[str] = (),
    verify: bool = True,
    is_buffer: Callable[[str], bool] | None = None,
    is_excluded: Callable[[str], bool] | None = None,
    credentials: Credentials | None = None,
    on_progress: Callable[[TensorProgress], None] | None = None,
) -> ImportResult:
    """Write a checkpoint of another framework into a store as a new job, and return a description of the job.

    A trainer whose `paramserver.job` is the job resumes from it, on any number of ranks. The job is complete, or not
    there at all. Nothing in the files is executed.

    Args:
        store: the address of the store daemon (`unix:/path` or `host:port`).
        job: name of the job, which the store must not have.
        source: a local path or a URL that fsspec knows, of one of these: safetensors (a file, or a directory with an
            index); a state dict of torch.save (such as DeepSpeed's consolidated fp32 file); a checkpoint of
            torch.distributed.checkpoint; a checkpoint directory of DeepSpeed's ZeRO stages 1 to 3.
        dtype: the dtype in which the model computes; None: fp32 for checkpoints with fp32 weights, else the dtype of
            the file. Of parameters that have optimizer states, the store also keeps the fp32 weights.
        device: the home of the tensors until a trainer resumes from the job.
        durability: the durability of the job: "step", "snapshot:N" or "none". A trainer that resumes from the job must
            have the same durability in its config.
        tag: for DeepSpeed: the tag of the checkpoint; None: the newest one.
        weights_only: whether optimizer states, counters and schedules are left out, so that a run begins at step 0.
        exclude: patterns (of `fnmatch`) for names of tensors that are left out.
        verify: whether all files are read and compared with their checksums first.
        is_buffer: tells by its name whether a tensor is a buffer, for formats that do not say so; None: integers and
            the statistics of batch norms are buffers.
        is_excluded: tells by its name whether a tensor is left out; names that match `exclude` are left out in any
            case.
        credentials: token and TLS files to connect with; None: those that the environment names, as for StoreClient.
        on_progress: called after each piece that was written.

    Raises:
        ConfigError: an argument is malformed, or there is nothing at `source`.
        ImportCheckpointError: the checkpoint is damaged, incomplete, of an unknown format, or not safe to load.
        ClientStateError: the checkpoint has a client state with a value that cannot be stored.
        JobConflictError: the store already has a job of this name.
        StoreError: the store failed, or has no room.
    """
    began = time.monotonic()
    type_in_model = None if dtype is None else _dtype_called(dtype)
    shown = Credentials.from_environment(os.environ) if credentials is None else credentials
    with local_source(source) as path:
        checkpoint = _read(path, tag, exclude, is_excluded, verify=verify, weights_only=weights_only)
        tensors, buffers = divide(checkpoint, is_buffer)
        if not tensors:
            raise ImportCheckpointError(f"{source} has no parameters that can be imported")
        made = ImportedJob(job, tensors, dtype=type_in_model, device=device, durability=durability)
        encoded, left_out = encode_state(checkpoint, tensors, buffers, os.fspath(source))
        with contextlib.closing(_session_for(job, store, shown)) as session:
            committed_step = made.write(session, checkpoint.step, encoded, _Report(made.size_bytes, on_progress))
    return ImportResult(
        job=job,
        source=os.fspath(source),
        format=checkpoint.format,
        step=checkpoint.step,
        committed_step=committed_step,
        tensors=len(tensors),
        states=tuple(sorted({kind for tensor in tensors for kind in tensor.states})),
        size_bytes=made.size_bytes,
        left_out=(*checkpoint.left_out, *left_out),
        seconds=time.monotonic() - began,
    )


def _dtype_called(name: str) -> torch.dtype:
    """Return a dtype by its name in `WeightDType`. Raise ConfigError for another name."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def _session_for(job: str, store: str, credentials: Credentials) -> RankStore:
    return RankStore(store, f"import of {job} on {socket.gethostname()}, process {os.getpid()}", credentials)


def _read(
    path: Path,
    tag: str | None,
    patterns: Sequence[str],
    is_excluded: Callable[[str], bool] | None,
    *,
    verify: bool,
    weights_only: bool,
) -> Checkpoint:
    """Open a checkpoint, and leave out the tensors that `patterns` or `is_excluded` exclude by their names.

    It can raise ImportCheckpointError and ConfigError.
    """
    left = _without(_opened(path, tag, verify=verify, weights_only=weights_only), patterns, is_excluded)
    return _weights_of(left) if weights_only else left


def _opened(path: Path, tag: str | None, *, verify: bool, weights_only: bool) -> Checkpoint:
    """Open a checkpoint, and raise ImportCheckpointError for any error that a malformed record causes.

    It can raise ImportCheckpointError.
    """
    try:
        return _open(path, tag, verify=verify, weights_only=weights_only)
    except TrainerClientError:
        raise
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, OSError) as error:
        raise ImportCheckpointError(f"{path} has a record that is not as its format has it: {error!r}") from None


def _open(path: Path, tag: str | None, *, verify: bool, weights_only: bool) -> Checkpoint:
    """Find out the format of a checkpoint, and open it. It can raise ImportCheckpointError."""
    if tag is not None or is_deepspeed(path):
        return open_deepspeed(path, tag, verify=verify, weights_only=weights_only)
    if (path / DCP_METADATA).is_file():
        return open_dcp(path, verify=verify, weights_only=weights_only)
    if path.suffix == ".safetensors" or (path / SAFETENSORS).is_file() or (path / SAFETENSORS_INDEX).is_file():
        return open_safetensors(path, verify=verify)
    if is_state_dict(path):
        return open_state_dict(path, verify=verify)
    check_foreign(path)
    raise ImportCheckpointError(
        f"{path} is no checkpoint that is read: it has no {SAFETENSORS}, pytorch_model.bin, an index of several of "
        "these, .metadata (torch.distributed.checkpoint), or mp_rank_00_model_states.pt (DeepSpeed)"
    )


def _weights_of(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weights alone, without the optimizer and the counters of its run."""
    tensors = [replace(tensor, states={}, update_count=0) for tensor in checkpoint.tensors]
    return Checkpoint(format=checkpoint.format, tensors=tensors, aliases=checkpoint.aliases, buffers=checkpoint.buffers)


def _without(checkpoint: Checkpoint, patterns: Sequence[str], is_excluded: Callable[[str], bool] | None) -> Checkpoint:
    """Return the checkpoint without the tensors that a pattern or `is_excluded` excludes by their names.

    Raises:
        ConfigError: a pattern matches no name of the checkpoint.
    """
    names = {*(tensor.name for tensor in checkpoint.tensors), *checkpoint.aliases, *checkpoint.buffers}
    dropped = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if is_excluded is not None:
        # `is_excluded` gets only the names under which the files have tensors, not the further names of tied tensors.
        # If it excludes a tied tensor, the import leaves out the tensor's further names, too.
        dropped |= {tensor.name for tensor in checkpoint.tensors if is_excluded(tensor.name)}
    if idle := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ConfigError(f"exclude {idle[0]!r} matches no name of the checkpoint")
    return replace(
        checkpoint,
        tensors=[tensor for tensor in checkpoint.tensors if tensor.name not in dropped],
        aliases={alias: fqn for alias, fqn in checkpoint.aliases.items() if not {alias, fqn} & dropped},
        buffers={name: buffer for name, buffer in checkpoint.buffers.items() if name not in dropped},
        left_out=[*checkpoint.left_out, *sorted(dropped)],
    )


class _Report:
    """Counts the bytes that an import has written so far, and passes the sum to `on_progress` after each piece."""

    def __init__(self, total_bytes: int, on_progress: Callable[[TensorProgress], None] | None) -> None:
        self._total_bytes = total_bytes
        self._written_bytes = 0
        self._on_progress = on_progress

    def __call__(self, nbytes: int) -> None:
        self._written_bytes += nbytes
        if self._on_progress is not None:
            self._on_progress(TensorProgress(read_bytes=self._written_bytes, total_bytes=self._total_bytes))
