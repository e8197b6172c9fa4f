"""The import of a checkpoint at the start of a run, if no store has a step of the run's job.

The run's model says which tensors are buffers and which names are those of tied parameters. If the daemon is restarted
during the import, the import begins anew. This module must never import into a job that has steps. It must never assume
that a store that does not answer has no steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import grpc
from torch import nn

from paramserver.contract.durability import durability_text, parse_durability
from paramserver.contract.replica_names import replicated_job
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ImportCheckpointError, JobConflictError, StoreError, TrainerClientError
from trainer_client.exchange.import_checkpoint import import_checkpoint
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.stored_step import StoreAddress, connect

log = logging.getLogger(__name__)


def import_at_start(
    source: str | Path,
    settings: TrainingConfig,
    store: RankStore,
    collectives: Collectives,
    model: nn.Module,
    parameters: Sequence[ModelParameter],
) -> bool:
    """Have rank 0 import a checkpoint as the run's job, unless the job has steps. All ranks must call this.

    The ranks ask their stores, and rank 0 also asks the peers and the daemons that hold replicas, whether they have a
    step of the job. Where `paramserver.resume` is "must", nothing is imported, because the job must have a step
    already.

    Returns:
        Whether the checkpoint was imported.

    Raises:
        JobConflictError: on rank 0, a peer or a holder of replicas did not answer, and no other store has a step.
        TrainerClientError: on rank 0 the error that `import_checkpoint` raises; on the other ranks an
            ImportCheckpointError.
    """
    section = settings.paramserver
    if section.resume == "must":
        return False
    others = (*section.peers, *(section.replica.addresses if section.replicas else ()))

    def has_steps() -> bool:
        return _has_steps(store.address, section.job, store.credentials)

    def import_unless_it_has_steps() -> None:
        if not has_steps():
            _import(source, settings, store, model, parameters)

    failure: TrainerClientError | None = None
    has_any = store.repeat_over_restarts(has_steps)
    if collectives.rank == 0 and not has_any:
        try:
            has_any = _any_has_steps(others, section.job, store.credentials)
        except JobConflictError as error:
            failure = error
    if any(collectives.any_rank([has_any])):
        return False
    if collectives.rank == 0 and failure is None:
        try:
            # If the daemon is restarted during the import, the new daemon has nothing of the job, so the import begins
            # anew. But if the former daemon crashed after the import's commit and before its confirmation, the new
            # daemon has the commit. So each attempt asks for steps first.
            store.repeat_over_restarts(import_unless_it_has_steps)
        except TrainerClientError as error:
            failure = error
    failed = any(collectives.any_rank([failure is not None]))
    if failure is not None:
        raise failure
    if failed:
        raise ImportCheckpointError(f"rank 0 could not import {source}: see its message")
    return True


def _any_has_steps(addresses: Iterable[str], job: str, credentials: Credentials) -> bool:
    """Return whether one of the stores has a committed step of the job, or a replica of a part of the job.

    Raises:
        JobConflictError: none of the stores that answer has a step or a replica, and some stores do not answer.
    """
    problems = []
    for address in addresses:
        try:
            if _has_steps(address, job, credentials):
                return True
        except StoreError as error:
            problems.append(f"{address}: {error}")
    if problems:
        raise JobConflictError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"job {job!r} is not begun with the checkpoint, because stores that may have a step of it do not answer "
            f"({'; '.join(problems)}): start their daemons, or remove their addresses from paramserver.peers and "
            "paramserver.replica.addresses if the job is new or they are gone for good",
        )
    return False


def _has_steps(address: str, job: str, credentials: Credentials) -> bool:
    """Return whether the store at `address` has a step of the job, or a replica of a part of the job.

    It can raise StoreError.
    """
    with connect(StoreAddress(address=address), credentials) as client:
        return any(
            job in (stored.name, replicated_job(stored.name)) and stored.newest is not None
            for stored in client.list_jobs()
        )


def _import(
    source: str | Path,
    settings: TrainingConfig,
    store: RankStore,
    model: nn.Module,
    parameters: Sequence[ModelParameter],
) -> None:
    names = {parameter.fqn for parameter in parameters}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    result = import_checkpoint(
        store.address,
        settings.paramserver.job,
        source,
        durability=durability_text(parse_durability(settings.paramserver.durability)),
        is_buffer=buffers.__contains__,
        is_excluded=tied.__contains__,
        credentials=store.credentials,
    )
    log.info(
        "job %r: step %d of %s was imported as step %d in %.1f s",
        *(result.job, result.step, source, result.committed_step, result.seconds),
    )
