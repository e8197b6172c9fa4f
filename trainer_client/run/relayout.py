"""Filling this rank's part of a new layout from a step in another one: other ranks, units, types, frozen parameters.

Must never hold more than one flat group's chunks at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

import torch

from paramserver.contract.kinds import PARAM, Kind, StoredKind
from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.states import GroupStates
from trainer_client.run.stored_step import Origin
from trainer_client.store_client.types import kind_from_proto

log = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0


def fill(states: Sequence[GroupStates], origin: Origin, fresh: Collection[str], step: int) -> None:
    """Stages this rank's chunks of all groups as the version of the uncommitted `step`.

    Args:
        fresh: the FQNs of trainable parameters whose optimizer states are zero.

    Raises:
        StoreError: a store failed, or the step is not whole.
    """
    total = sum(_bytes(state.group) for state in states)
    done, started = 0, time.monotonic()
    reported = started
    for state in states:
        state.stage(_chunks(state.group, origin, fresh), step)
        done += _bytes(state.group)
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            log.info("job %r: %d of %d MB are laid out anew", origin.job, done // 1_000_000, total // 1_000_000)
    log.info("job %r: %d bytes were laid out anew in %.1f s", origin.job, done, time.monotonic() - started)


def _chunks(group: FlatGroup, origin: Origin, fresh: Collection[str]) -> dict[Kind, torch.Tensor]:
    """This rank's chunk of each kind [layout.chunk], padding zero; without states that are all zero."""
    chunks = {}
    for kind in group.kinds:
        is_state = kind in group.state_kinds
        shards = [shard for shard in group.shards if not (is_state and shard.fqn in fresh)]
        if is_state and not shards:
            continue
        chunk = torch.zeros(group.layout.chunk, dtype=group.dtype_of(kind))
        for shard in shards:
            source = kind_from_proto(kind) if is_state else _weight_for(kind, chunk.dtype, shard.fqn, origin)
            origin.read(chunk[shard.position :][: shard.numel], shard.fqn, source, shard.offset)
        chunks[kind] = chunk
    return chunks


def _weight_for(kind: Kind, dtype: torch.dtype, fqn: str, origin: Origin) -> StoredKind:
    """What a parameter or master weight is made of: the same bits where they are stored, else the most precise ones."""
    stored = origin.kinds_of(fqn)
    if kind == PARAM and stored["param"] == dtype:
        return "param"
    return "master" if "master" in stored else "param"


def _bytes(group: FlatGroup) -> int:
    return sum(group.layout.chunk * group.dtype_of(kind).itemsize for kind in group.kinds)
