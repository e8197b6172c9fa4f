"""The opening of an engine for inference, which is made of a model and a config.

This module owns the order in which the parts of the engine are made. After an error it must close the daemon, the
session and the process group that it has opened.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.config.batch_sizes import BatchSizes, resolve_batch_sizes
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.start import InitialArguments
from trainer_client.errors import ConfigError
from trainer_client.inference.engine import InferenceEngine, InferenceParts
from trainer_client.inference.hooks import InferenceHooks
from trainer_client.inference.job_name import choose_job, has_values
from trainer_client.inference.residency import WeightResidency
from trainer_client.inference.stored_job import newest_step, put
from trainer_client.inference.units import check_fit, divide
from trainer_client.inference.weights import StepWeights
from trainer_client.training.model.buffers import cast_buffers, give_buffers
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.unit_policy import UnitPolicy
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.context import Resources
from trainer_client.training.run.extra_states import ExtraStates
from trainer_client.training.run.job_choice import is_of_training, note_stored_values
from trainer_client.training.run.node_store import find_store, join_ranks
from trainer_client.training.step.precision import PrecisionPolicy

log = logging.getLogger(__name__)

# The fraction of the host budget that weights in use may take if the config gives no limit: _OWN_SHARE for a daemon
# that serves only this job, _COMMON_SHARE for a daemon that other jobs may use, too. The daemon's own buffers take up
# to an eighth of the budget.
_OWN_SHARE = 13 / 16
_COMMON_SHARE = 3 / 4
# The most buffers that the warning about buffers without stored values lists by name.
_SHOWN_BUFFERS = 3


def open_engine(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    settings: TrainingConfig,
    policy: UnitPolicy,
    initial: InitialArguments,
    *,
    processes: tuple[bool | None, int] | None = None,
    prefer_streams: bool = False,
) -> InferenceEngine:
    """Return an engine whose model has the weights of a committed step. All ranks of a process group must call this.

    If the store does not have the job, the values of the model, or those that `initial` names, are put into the store
    first.

    Args:
        model: the model; its parameters do not require gradients afterwards.
        parameters: all parameters of the model.
        settings: the config.
        policy: chooses the modules (blocks) that are fetched from the store as a whole.
        initial: the source of a new job's values.
        processes: the arguments `dist_init_required` and `distributed_port` of `initialize`, which joins the process
            group that a launcher has announced. None: the process group is used as it is.
        prefer_streams: whether the weights are copied through gRPC even if the store is on this node.

    Raises:
        ConfigError: the stored model has other parameters than `model`, or a key of the config cannot be honoured.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    section = settings.paramserver
    with ExitStack() as everything:
        resources = everything.enter_context(ExitStack())
        joined = resources.enter_context(ExitStack())
        local_rank, collectives = join_ranks(settings, processes, joined)
        address, credentials = find_store(settings, collectives, local_rank, resources)
        # The process group is left before the daemon is stopped, so that no other rank still uses the daemon when it is
        # stopped.
        resources.callback(joined.close)
        initial.take_over()
        name = f"pid {os.getpid()} on {socket.gethostname()}, inference"
        client = StoreClientSync.connect(address, credentials=credentials, client=name, prefer_streams=prefer_streams)
        resources.callback(client.close)
        policy_of_dtypes = PrecisionPolicy.of(settings)
        dtypes = [policy_of_dtypes.dtype_of(parameter) for parameter in parameters]
        job = choose_job(
            model,
            parameters,
            dtypes,
            section,
            initial.weights,
            collectives,
            is_a_references=is_of_training(address, section.job),
            is_there=newest_step(client, section.job) is not None,
        )
        if job == section.job and "inference" not in section.model_fields_set and all(map(_has_values, parameters)):
            note_stored_values(address, job, resources)
        weights = _read(client, job, model, parameters, dtypes, settings, initial, collectives, local_rank)
        everything.callback(weights.close)
        units = divide(model, parameters, weights.tensors, policy)
        residency = WeightResidency(units, weights, _host_bytes(settings, weights))
        everything.callback(residency.close)
        residency.load()
        hooks = InferenceHooks(model, units, residency)
        everything.callback(hooks.remove)
        parts = InferenceParts(weights=weights, residency=residency, hooks=hooks, parameters=tuple(parameters))
        sizes = _sizes(settings, collectives.world_size)
        given_back = Resources(all=everything, apart=resources)
        return InferenceEngine(model, parts, settings, sizes, collectives, local_rank, given_back)


def _has_values(parameter: ModelParameter) -> bool:
    return has_values(parameter.tensor)


def _sizes(settings: TrainingConfig, world_size: int) -> BatchSizes:
    """Return the config's batch sizes; if it has none, one sample for each rank, because inference needs no sizes."""
    if settings.train_batch_size is None and settings.train_micro_batch_size_per_gpu is None:
        return BatchSizes(train=world_size, micro=1, accumulation=1)
    return resolve_batch_sizes(settings, world_size)


def _read(
    client: StoreClientSync,
    job: str,
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    dtypes: Sequence[torch.dtype],
    settings: TrainingConfig,
    initial: InitialArguments,
    collectives: Collectives,
    local_rank: int,
) -> StepWeights:
    """Return the weights of the step that the engine reads, and fill the model's buffers from the step.

    If the store does not have the job, the model is put into the store first.
    """
    section, device = settings.paramserver, collectives.device
    is_there = newest_step(client, job) is not None
    if job != section.job:
        # The key `resume` is about the job that the config names. This engine reads another job, so the key does not
        # apply.
        section = section.model_copy(update={"resume": "auto"})
    if section.resume == "must" and not is_there:
        raise ConfigError(f"paramserver.resume is 'must', and the store has no committed step of job {job!r}")
    if section.resume == "never" and is_there:
        raise ConfigError(f"paramserver.resume is 'never', and the store has job {job!r} already")
    (is_missing,) = collectives.any_rank([not is_there], "the look for the stored model")
    tensors = (*model.parameters(), *model.buffers())
    (is_meta,) = collectives.any_rank([any(tensor.is_meta for tensor in tensors)], "the look at the model")
    if is_missing or is_meta or initial.weights is not None:
        values = initial.values(model, parameters, collectives)
        if is_missing:
            # One rank of a node puts the model into the store: local rank 0. A launcher may have given another local
            # rank to a process without a process group. So a process that is alone always writes.
            writes = (local_rank == 0 or collectives.world_size == 1) and not is_there
            put(client, job, parameters, dtypes, values, collectives, is_writer=writes)
    if is_there:
        log.info("job %r is in the store already, so the model gets its weights", job)
    weights = StepWeights(client, job, section.inference.step, device)
    try:
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            tensor = parameter.tensor
            tensor.requires_grad_(False)
            if tensor.dtype != dtype or tensor.device != device:
                # A parameter gets its values from the store later, so here it only needs the right shape, dtype and
                # device. The expanded tensor takes the memory of one element.
                tensor.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(tensor.shape)
        check_fit(parameters, weights.tensors, f"step {weights.step} of job {job!r}")
        _fill_buffers(model, weights, device)
        ExtraStates(model, is_loud=True).restore(weights.extra_states)
        cast_buffers(model, PrecisionPolicy.of(settings).buffer_dtype)
    except BaseException:
        weights.close()
        raise
    return weights


def _fill_buffers(model: nn.Module, weights: StepWeights, device: torch.device) -> None:
    """Give the buffers the values that a trainer has committed with the step, and move all buffers to the device."""
    give_buffers(model, weights.buffers)
    known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    if larger := [name for name in weights.left_out if name in known]:
        log.warning(
            "step %d of job %r has no values of %d buffers of its state dict (%s%s): the model computes "
            "with those of the files, or with its own",
            *(weights.step, weights.job, len(larger)),
            *(", ".join(larger[:_SHOWN_BUFFERS]), ", ..." if larger[_SHOWN_BUFFERS:] else ""),
        )
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _host_bytes(settings: TrainingConfig, weights: StepWeights) -> int:
    """Return the most bytes of the store's host memory that leases of this process may hold.

    If the config does not give the number, it is a share of the store's host budget. The share is smaller for a store
    that an operator runs, because other processes may lease its memory, too.
    """
    given = settings.paramserver.inference.host_bytes
    if given is not None:
        return int(given)
    share = _OWN_SHARE if settings.store_address(os.environ) is None else _COMMON_SHARE
    return int(weights.arena_bytes * share)
