"""The name of the job that an engine for inference reads, also if the config names no job.

If the config names no job, the name is computed from the weights, so that processes with the same weights share a job.
This module must never replace the weights that a model has by those of a job that the user has not named. It must not
replace them by those of a job that this process trains, either: in preference learning, the reference model is made
with the config of its policy, which names the policy's job.
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
    """Return the name of the job to read, the same on all ranks. All ranks must call this.

    If the config names a job, this is the job. If it names none and all parameters of the model are on the meta device,
    it is the job that a training run has by default. If it names none and there are weights in the model or in files,
    the name is computed from the weights that rank 0 has. The name is also computed if the config names a job that is
    the policy's, and the model has values of its own.

    Args:
        model: the model, as the user has passed it.
        parameters: all parameters of the model.
        dtypes: the dtype in which the model computes with each parameter.
        section: the section `paramserver` of the config.
        weights: the files with the weights, if there are any.
        collectives: the collectives of this rank.
        is_a_references: whether an engine of this process trains the named job, or the program imports `deepspeed`.
        is_there: whether this rank's store has a committed step of the named job.

    Raises:
        ConfigError: the config names no job, but it names a step, or a parameter has no values.
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
    """Return whether a model keeps its own values although the config names a job. All ranks must call this.

    It keeps them if the job is that of a policy of which the model is the reference, and if no store has the job yet,
    because a policy that is made later may use the job's name. If the config has `paramserver.inference`, the model
    gets the stored weights in any case.
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
        # A model that was built under zero.Init has a record of how its initial values are computed, and the user may
        # have meant these values and not those of a stored job. So the message is a warning for such a model.
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
    """Return a name that is computed from the files, and from the model's values that the files lack."""
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
        # A parameter on the meta device that the files lack has no values yet: it gets them when the job is put into
        # the store. So it does not count for the digest in the job's name.
        if id(parameter.tensor) in from_files or (weights is not None and parameter.tensor.is_meta):
            continue
        digest.update(_values_of(parameter).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"inference-{digest.hexdigest()}"


def _values_of(parameter: ModelParameter) -> torch.Tensor:
    """Return the values of a parameter, from which the name is computed. Raise ConfigError if it has no values."""
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
