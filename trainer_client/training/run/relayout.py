"""The filling of this rank's part of a new layout from a step in another layout.

The layouts may differ in the number of ranks, the units, the dtypes and the set of frozen parameters. This module must
never hold more than one flat group's partitions at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from paramserver.contract.kinds import PARAM, Kind, StoredKind
from paramserver.contract.sizes import shown_size
from trainer_client.client.store_client.types import kind_from_proto
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.states import GroupStates
from trainer_client.training.run.stored_step import StoredStep

log = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0


def fill(
    states: Sequence[GroupStates],
    stored_step: StoredStep,
    open_again: Callable[[], StoredStep],
    fresh: Collection[str],
    step: int,
) -> None:
    """Fill this rank's partitions of all groups, and hand them over for the uncommitted `step`.

    Args:
        states: the states of all groups.
        stored_step: the step that the partitions are filled from.
        open_again: opens the same step again, because partitions have to be handed over again if a daemon is restarted.
        fresh: FQNs of trainable parameters whose optimizer states begin at zero.
        step: number of the commit that the partitions are handed over for.

    Raises:
        StoreError: a store failed, or the stores do not have all elements.
    """
    total = sum(_bytes(state.group) for state in states)
    done, started = 0, time.monotonic()
    reported = started
    for state in states:
        again = partial(_read_again, state.group, open_again, fresh)
        state.hand_over(_partitions(state.group, stored_step, fresh), step, again)
        done += _bytes(state.group)
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            log.info("job %r: %s of %s are laid out anew", stored_step.job, shown_size(done), shown_size(total))
    log.info("job %r: %s were laid out anew in %.1f s", stored_step.job, shown_size(done), time.monotonic() - started)


def replace(
    states: Sequence[GroupStates],
    stored_step: StoredStep,
    *,
    fresh: Collection[str],
    missing: Collection[str],
    with_states: bool,
    step: int,
) -> None:
    """Hand over for the uncommitted `step` partitions with new values, in place of those that this rank has now.

    After the call, the caller has to `refill` the groups on every rank, because gathered parameters are old then.

    Args:
        states: the states of all groups.
        stored_step: the step that has the new values.
        fresh: FQNs of trainable parameters whose optimizer states become zero.
        missing: FQNs of parameters that keep their values, because the step does not have them.
        with_states: whether optimizer states are replaced, too. If not, they stay as they are.
        step: number of the commit that the partitions are handed over for.

    Raises:
        StoreError: a store failed, or the stores do not have all elements.
    """
    for state in states:
        group = state.group
        kinds = [kind for kind in group.kinds if with_states or kind not in group.state_kinds]
        shards = [shard for shard in group.shards if shard.fqn not in missing]
        partitions = {}
        for kind in kinds if shards else ():
            is_state = kind in group.state_kinds
            partition = torch.zeros(group.slot_table.partition_numel, dtype=group.dtype_of(kind))
            if len(shards) < len(group.shards):
                partition = state.read(kind)
            for shard in shards:
                if is_state and shard.fqn in fresh:
                    partition[shard.in_partition] = 0
                    continue
                source = _source_of(kind, partition.dtype, shard.fqn, stored_step, is_state=is_state)
                stored_step.read(partition[shard.in_partition], shard.fqn, source, shard.offset)
            partitions[kind] = partition
        if partitions:
            state.hand_over(partitions, step)


def _read_again(
    group: FlatGroup, open_again: Callable[[], StoredStep], fresh: Collection[str]
) -> Mapping[Kind, torch.Tensor]:
    with open_again() as stored_step:
        return _partitions(group, stored_step, fresh)


def _partitions(group: FlatGroup, stored_step: StoredStep, fresh: Collection[str]) -> dict[Kind, torch.Tensor]:
    """Return this rank's partition [partition_numel] of each kind, padded with zeros. Zero states are left out."""
    partitions = {}
    for kind in group.kinds:
        is_state = kind in group.state_kinds
        shards = [shard for shard in group.shards if not (is_state and shard.fqn in fresh)]
        if is_state and not shards:
            continue
        partition = torch.zeros(group.slot_table.partition_numel, dtype=group.dtype_of(kind))
        for shard in shards:
            source = _source_of(kind, partition.dtype, shard.fqn, stored_step, is_state=is_state)
            stored_step.read(partition[shard.in_partition], shard.fqn, source, shard.offset)
        partitions[kind] = partition
    return partitions


def _source_of(kind: Kind, dtype: torch.dtype, fqn: str, stored_step: StoredStep, *, is_state: bool) -> StoredKind:
    """Return the kind of the stored step whose bytes fill the kind `kind` of a parameter in the new layout."""
    return kind_from_proto(kind) if is_state else _weight_for(kind, dtype, fqn, stored_step)


def _weight_for(kind: Kind, dtype: torch.dtype, fqn: str, stored_step: StoredStep) -> StoredKind:
    """Return the stored kind from which a parameter or master weight is made.

    If the kind with the same bits is stored, this is that kind. If not, it is the most precise kind that is stored.
    """
    stored = stored_step.kinds_of(fqn)
    if kind == PARAM and stored["param"] == dtype:
        return "param"
    return "master" if "master" in stored else "param"


def _bytes(group: FlatGroup) -> int:
    return sum(group.slot_table.partition_numel * group.dtype_of(kind).itemsize for kind in group.kinds)
