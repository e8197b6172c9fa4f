"""The client state of a job that `paramserver import` made, converted to the form of a commit of this run.

The imported checkpoint has names of its parameters, and lacks values that a run of this library stores. So parameter
groups are found by the names of their parameters, and this run's own values are used for the values that the checkpoint
lacks. This module must never change a state that a trainer has committed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer_client.base.index_ranges import from_ranges
from trainer_client.training.model.buffers import give_buffers
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.run import client_state
from trainer_client.training.run.stored_state import counts_of, groups_of
from trainer_client.training.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)

# The settings of a parameter group that are taken from an imported checkpoint. All other settings of the checkpoint
# choose a kernel or do not exist in this library, so they are not taken.
_SETTINGS = frozenset(
    {
        *("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay"),
        "initial_accumulator_value",
    }
)


def is_imported(state: Mapping[str, Any]) -> bool:
    """Return whether an import made the client state, and no trainer has gone on from it yet."""
    return state["imported"] is not None


def describe_origin(state: Mapping[str, Any]) -> str:
    """Return a text that says from which checkpoint a job was imported, for a line of the log."""
    origin = state["imported"]
    return f"{origin['source']} ({origin['format']})"


def adapt(
    state: dict[str, Any],
    listed: Mapping[int, str],
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    fresh: Collection[str],
) -> None:
    """Give the client state of an imported job the form that a rank of this run would have committed.

    Args:
        state: the state, which is changed.
        listed: the names of the job's parameters of which the stores have elements, by their numbers in the job. In
            jobs that an earlier version imported, a parameter's number is its place in the order of the import.
        parameters: the model's parameters.
        optimizer: this run's optimizer.
        fresh: names of trained parameters whose optimizer states begin at zero.
    """
    state["random"] = client_state.random_states(torch.device("cpu"))
    names = _all_names(state, listed)
    counts = dict(zip(names, counts_of(state, names), strict=True))
    state["update_counts"] = [0 if p.fqn in fresh else counts.get(p.fqn, 0) for p in parameters]
    if (groups := groups_of(state, names)) is not None:
        known = set(listed.values())
        members = [{names[index] for index in from_ranges(group["params"])} & known for group in groups]
        state["optimizer"] = _settings(groups, members, parameters, optimizer, fresh)


def _all_names(state: Mapping[str, Any], listed: Mapping[int, str]) -> list[str]:
    """Return the names of all parameters of an import, also of those without elements, by their numbers in the job."""
    empty = iter((state["model"] or {}).get("empty", ()))
    return [listed[index] if index in listed else next(empty, "") for index in range(len(state["update_counts"]))]


def load_buffers(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy the buffers of a commit into the model's buffers that have the same names and shapes.

    Args:
        state: the client state of the commit for this rank. The state of rank 0 has the buffers in its entry "model",
            beside the names of the parameters.
    """
    stored = state["buffers"] if state["model"] is None else state["model"]["buffers"]
    # Commits of earlier versions of this library have no buffers, or only those of rank 0.
    give_buffers(model, stored or {})


def _settings(
    stored: Sequence[Mapping[str, Any]],
    members: Sequence[Collection[str]],
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    fresh: Collection[str],
) -> list[dict[str, Any]] | None:
    """Return the settings of this run's parameter groups, with stored values for groups of the same parameters.

    Frozen parameters in a group are ignored in this comparison, because DeepSpeed leaves them out of its groups. Return
    None if no group has the same parameters as a stored group.
    """
    found = {frozenset(names): group for names, group in zip(members, stored, strict=True)}
    trained = frozenset().union(*found) - set(fresh)
    settings = optimizer.settings()
    matched = 0
    for group in settings:
        own = trained & {parameters[index].fqn for index in from_ranges(group["params"])}
        before = found.get(own)
        if own and before is not None:
            matched += 1
            group.update({key: before[key] for key in group.keys() & before.keys() & _SETTINGS})
            if "initial_lr" in before:
                group["initial_lr"] = before["initial_lr"]
    if matched < len(found):
        log.warning(
            "%d of the %d imported parameter groups have other parameters than those of this run's optimizer: for "
            "them, today's hyper-parameters count",
            *(len(found) - matched, len(found)),
        )
    return settings if matched else None
