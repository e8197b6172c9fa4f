"""The import of a checkpoint at the start of a run, if none of the run's stores has a step of the job yet.

The run has the model, and the model says which tensors are buffers and which names are those of tied parameters. If the
daemon is restarted meanwhile, the import begins anew. This module must never import into a job that has steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from paramserver.contract.durability import durability_text, parse_durability
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ImportCheckpointError, TrainerClientError
from trainer_client.exchange.import_checkpoint import import_checkpoint
from trainer_client.model.parameters import ModelParameter
from trainer_client.ranks.collectives import Collectives
from trainer_client.run.stored_step import StoreAddress, connect
from trainer_client.transport.credentials import Credentials
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)


def import_at_start(
    source: str | Path,
    settings: TrainingConfig,
    store: RankStore,
    collectives: Collectives,
    model: nn.Module,
    parameters: Sequence[ModelParameter],
) -> None:
    """Have rank 0 import a checkpoint as the run's job, unless the job has steps. All ranks must call this.

    Raises:
        TrainerClientError: on rank 0 the error that `import_checkpoint` raises; on the other ranks an
            ImportCheckpointError.
    """
    section = settings.paramserver
    addresses = [store.address, *(section.peers if collectives.rank == 0 else ())]

    def has_steps() -> bool:
        return any(_has_steps(addresses, section.job, store.credentials))

    def import_unless_it_has_steps() -> None:
        if not has_steps():
            _import(source, settings, store, model, parameters)

    failure: TrainerClientError | None = None
    has_any = store.repeat_over_restarts(has_steps)
    if not any(collectives.any_rank([has_any])) and collectives.rank == 0:
        try:
            # If the daemon is lost, the next one has nothing of the job, so the import begins anew; or it has the
            # import's commit, if the crash came between the commit and its confirmation.
            store.repeat_over_restarts(import_unless_it_has_steps)
        except TrainerClientError as error:
            failure = error
    failed = any(collectives.any_rank([failure is not None]))
    if failure is not None:
        raise failure
    if failed:
        raise ImportCheckpointError(f"rank 0 could not import {source}: see its message")


def _has_steps(addresses: Iterable[str], job: str, credentials: Credentials) -> Iterable[bool]:
    """Yield for each store whether it has a committed step of the job. It can raise StoreError."""
    for address in addresses:
        with connect(StoreAddress(address=address), credentials) as client:
            yield any(stored.name == job and stored.step is not None for stored in client.list_jobs())


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
