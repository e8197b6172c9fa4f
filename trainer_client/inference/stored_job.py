"""The job that an engine for inference reads: it is found in the store, or put into it once from a model or its files.

This module owns the writing of such a job. It must never write to a job that has a committed step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import grpc
import torch

from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.types import TensorSpec
from trainer_client.client.store_client.writer import StoreWriterSync
from trainer_client.errors import JobConflictError, StoreTimeoutError
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.ranks.collectives import Collectives

log = logging.getLogger(__name__)

# The most seconds to wait for another process that is putting the same model into the store, and the seconds between
# two checks whether it has finished.
_OTHER_WRITER_SECONDS = 1800.0
_LOOK_SECONDS = 0.5


def newest_step(client: StoreClientSync, job: str) -> int | None:
    """Return the newest committed step of a job; None if the store has no such job or no committed step of it.

    The stores of other nodes may not have this step.
    """
    return next((stored.newest for stored in client.list_jobs() if stored.name == job), None)


def put(
    client: StoreClientSync,
    job: str,
    parameters: Sequence[ModelParameter],
    dtypes: Sequence[torch.dtype],
    values: InitialValues,
    collectives: Collectives,
    *,
    is_writer: bool,
) -> None:
    """Put the model into this node's store, unless another process is doing so. All ranks must call this.

    Only one parameter at a time is in memory, once in fp32 and once in its own dtype.

    Args:
        client: this rank's client of the store.
        job: the job's name.
        parameters: the model's parameters.
        dtypes: the dtype in which each parameter is stored.
        values: the parameters' values.
        collectives: the collectives of this rank.
        is_writer: whether this rank puts the model into its store.

    Raises:
        StoreError: the store has no room, or failed.
    """
    specs = {
        parameter.fqn: TensorSpec(shape=tuple(parameter.shape), dtype=dtype)
        for parameter, dtype in zip(parameters, dtypes, strict=True)
        if parameter.shape.numel()
    }
    is_alone = collectives.world_size == 1
    # Only a process that is alone waits for another process that is storing the same model. In a process group, the
    # other ranks wait for this rank in the collective of the first value (`values.whole`), and one of them may be the
    # other writer.
    writer = _open_writer(client, job, specs, waits=is_alone) if is_writer else None
    try:
        if writer is not None or not is_alone:
            for parameter, dtype in zip(parameters, dtypes, strict=True):
                whole = values.whole(parameter)
                if writer is not None and parameter.fqn in specs:
                    writer.put({parameter.fqn: whole.to(dtype).view(parameter.shape)})
        if writer is not None:
            writer.commit()
    finally:
        if writer is not None:
            writer.close()
    if is_writer:
        _wait_for_step(client, job)
    collectives.any_rank([False], "the end of the model's import")


def _open_writer(
    client: StoreClientSync, job: str, specs: Mapping[str, TensorSpec], *, waits: bool
) -> StoreWriterSync | None:
    """Return a writer of the job; None if another process has committed the model, or is writing it.

    With `waits`, wait until the other process has committed the model, and return None. If the other process ends
    without a commit, this process becomes the writer. It can raise StoreTimeoutError.
    """
    deadline = time.monotonic() + _OTHER_WRITER_SECONDS
    is_told = False
    while newest_step(client, job) is None:
        try:
            writer = client.open(job, specs)
        except JobConflictError:
            if not is_told:
                log.info("another process is putting job %r into the store", job)
            is_told = True
        else:
            if writer.step is None:
                return writer
            writer.close()
        if not waits:
            return None
        _pause(job, deadline)
    return None


def _wait_for_step(client: StoreClientSync, job: str) -> None:
    """Wait until another process has committed the job's first step. It can raise StoreTimeoutError."""
    deadline = time.monotonic() + _OTHER_WRITER_SECONDS
    while newest_step(client, job) is None:
        _pause(job, deadline)


def _pause(job: str, deadline: float) -> None:
    """Sleep until the next look whether another process has committed the job.

    It raises StoreTimeoutError after `deadline`, which is a time of time.monotonic().
    """
    if time.monotonic() > deadline:
        raise StoreTimeoutError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"another client has had job {job!r} open for {_OTHER_WRITER_SECONDS:g} s without a commit; end it, or "
            "name another job",
        )
    time.sleep(_LOOK_SECONDS)
