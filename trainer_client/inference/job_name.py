"""The name of the job that an engine for inference reads, also where the config names none.

This module owns the names that follow from weights, so that processes with the same weights share a job. It must never
let a model that has weights get those of a job which the user has not named, nor those of a job that this process
trains: a reference model is made from the config of its policy.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from trainer_client.config.paramserver import ParamserverSection
from trainer_client.errors import ConfigError
from trainer_client.training.initial.deferred_init import recipe_of, replay
from trainer_client.training.initial.loading import Weights
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.released import ReleasedParameter
from trainer_client.training.ranks.collectives import Collectives

log = logging.getLogger(__name__)


def choose_job(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    dtypes: Sequence[torch.dtype],
    section: ParamserverSection,
    weights: str | Path | None,
    collectives: Collectives,
    *,
    is_a_references: bool,
    is_there: bool,
) -> str:
    """Return the name of the job, the same on all ranks. All ranks must call this.

    It is the job that the config names. If the config names none, it is the one that a training run has by default for
    a model whose parameters are all on the meta device; and for weights in the model or in files, the name follows from
    those that rank 0 has. The same holds beside a named job for a model with values, if the job is the policy's.

    Args:
        model: the model, as the user has passed it.
        parameters: all of its parameters.
        dtypes: the dtype in which the model computes with each parameter.
        section: the section `paramserver` of the config.
        weights: the files with the weights, if there are any.
        collectives: the collectives of this rank.
        is_a_references: whether an engine of this process trains the named job, or the program imports `deepspeed`.
        is_there: whether this rank's store has a committed step of the named job.

    Raises:
        ConfigError: the config names no job, and it names a step of one, or a parameter has no values.
    """
    keeps = is_a_references
    if "job" in section.model_fields_set:
        keeps = _keeps_its_values(
            parameters, section, weights, collectives, is_a_references=is_a_references, is_there=is_there
        )
        if not keeps:
            return section.job
    name, failure = "", None
    if collectives.rank == 0:
        try:
            name = _choose(model, parameters, dtypes, section, weights, keeps=keeps)
        except (ConfigError, OSError) as error:
            failure = error
    name = collectives.gather_bytes(name.encode(), "the name of the stored job")[0].decode()
    if not name:
        raise failure or ConfigError("rank 0 has found no name for the stored job; see its message")
    return name


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a parameter has values, or `zero.Init` has recorded how they are made."""
    return not isinstance(tensor, ReleasedParameter) and (not tensor.is_meta or bool(recipe_of(tensor)))


def _keeps_its_values(
    parameters: Sequence[ModelParameter],
    section: ParamserverSection,
    weights: str | Path | None,
    collectives: Collectives,
    *,
    is_a_references: bool,
    is_there: bool,
) -> bool:
    """Return whether a model keeps the values that it has, although the config names a job. All ranks must call this.

    So it is for the reference model of a policy, and where no store has the job yet: a policy that is made later may
    have it. `paramserver.inference` in the config asks for the stored weights in any case.
    """
    lacks_values = weights is not None or not all(has_values(p.tensor) for p in parameters)
    asks = "inference" in section.model_fields_set
    lacks, trains, found = collectives.any_rank([lacks_values or asks, is_a_references, is_there])
    if lacks or not (trains or not found):
        if collectives.rank == 0 and found:
            log.info("the model gets the weights of job %r, which paramserver.job names", section.job)
        return False
    if collectives.rank == 0:
        log.warning(
            "the model of this engine, which has no optimizer, keeps its own values, and not those of job %r, which "
            "%s: to have these, write paramserver.inference into the config, or build the model on the meta device",
            *(section.job, "is the policy's" if trains else "the store does not have"),
        )
    return True


def _choose(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    dtypes: Sequence[torch.dtype],
    section: ParamserverSection,
    weights: str | Path | None,
    *,
    keeps: bool,
) -> str:
    are_recorded = keeps and all(recipe_of(parameter.tensor) for parameter in parameters)
    if weights is None and not are_recorded and all(parameter.tensor.is_meta for parameter in parameters):
        # A model of zero.Init has values that it would have got, so the user may have meant these.
        level = logging.WARNING if any(recipe_of(parameter.tensor) for parameter in parameters) else logging.INFO
        log.log(
            level,
            "the config has no paramserver.job, and the model is on the meta device: if the store has job %r, the "
            "model gets its weights; name the job that is meant",
            section.job,
        )
        return section.job
    if section.inference.step is not None:
        raise ConfigError(
            f"paramserver.inference.step is {section.inference.step}, and the config does not say of which job: write "
            "paramserver.job"
        )
    name = _name_of(model, parameters, dtypes, weights)
    log.info("the weights that were passed are job %r", name)
    return name


def _name_of(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    dtypes: Sequence[torch.dtype],
    weights: str | Path | None,
) -> str:
    """Return a name that follows from the weights: from the files, and from the values of the model that they lack."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr([(p.fqn, tuple(p.shape)) for p in parameters]).encode())
    digest.update(repr(sorted({str(dtype) for dtype in dtypes})).encode())
    from_files: set[int] = set()
    if weights is not None:
        stored = Weights(weights).tensors
        for path in sorted({tensor.path.resolve() for tensor in stored.values()}):
            status = path.stat()
            digest.update(repr((str(path), status.st_size, status.st_mtime_ns, status.st_ino)).encode())
        from_files = {id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False) if name in stored}
    for parameter in parameters:
        # A parameter on the meta device that the files lack gets values when the job is put into the store, and no
        # sooner.
        if id(parameter.tensor) in from_files or (weights is not None and parameter.tensor.is_meta):
            continue
        digest.update(_values_of(parameter).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"inference-{digest.hexdigest()}"


def _values_of(parameter: ModelParameter) -> torch.Tensor:
    """Return the values of a parameter. Raise ConfigError if it has none."""
    tensor = parameter.tensor
    if isinstance(tensor, ReleasedParameter):
        raise ConfigError(
            f"parameter {parameter.fqn} has no values, because the engine for inference that had the model is closed: "
            "name the stored job with paramserver.job, or build the model anew"
        )
    if recipe_of(tensor):
        return replay(tensor)
    if tensor.is_meta:
        raise ConfigError(
            f"parameter {parameter.fqn} is on the meta device, and others have values: name the stored job with "
            "paramserver.job, or pass files that have all weights"
        )
    return tensor.detach()
