"""The search for the stores that keep the step of a checkpoint, and its comparison with the model of this run.

A checkpoint may have been saved by another job, by another number of ranks or at another address, so all stores that
this run knows are asked. This module owns no state. One rank searches on behalf of all ranks. It must never change what
is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import grpc

from trainer_client.client.store_client.types import StoredTensor, kind_from_proto
from trainer_client.client.transport.credentials import Credentials
from trainer_client.errors import CheckpointError, OtherModelError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.run.checkpoint_files import CheckpointManifest
from trainer_client.training.run.stored_step import StepPart, StoreAddress, find_parts, first_gap

_WEIGHTS = {"param", "master"}
# The most parameters that an error text names.
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSource:
    """The stores that keep a checkpoint's step, and how the step's parameters differ from those of this run.

    Attributes:
        stores: the addresses of the stores.
        fresh: FQNs of trainable parameters whose optimizer states the step does not have, so these states begin at
            zero.
        missing: FQNs of parameters that the step does not have, or has in another shape, so these parameters keep their
            values.
        places: for each parameter that the step has, its index in the order of the model that made the step.
        keeps_groups: whether optimizer and parameters are those with which the step was made. If not, the
            hyper-parameters of the parameter groups are this run's.
    """

    stores: tuple[StoreAddress, ...]
    fresh: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    places: Mapping[str, int] = field(default_factory=dict)
    keeps_groups: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the source as JSON types, so that rank 0 can send it to the other ranks."""
        return {
            "stores": [asdict(store) for store in self.stores],
            "fresh": sorted(self.fresh),
            "missing": sorted(self.missing),
            "places": dict(self.places),
            "keeps_groups": self.keeps_groups,
        }

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> Self:
        """Return the source that `to_json` converted to `source`."""
        return cls(
            stores=tuple(StoreAddress(**store) for store in source["stores"]),
            fresh=frozenset(source["fresh"]),
            missing=frozenset(source["missing"]),
            places=source["places"],
            keeps_groups=source["keeps_groups"],
        )


def find_source(
    manifest: CheckpointManifest,
    path: str,
    groups: Sequence[FlatGroup],
    known: Iterable[StoreAddress],
    credentials: Credentials,
    *,
    strict: bool,
) -> KeptSource:
    """Return the stores that keep the step of a checkpoint, and the parts of the step that this run can take over.

    Args:
        manifest: the checkpoint.
        path: the checkpoint's directory, for messages.
        groups: the flat groups of this run's model.
        known: the stores of this run; the stores that the manifest names are asked, too.
        credentials: token and TLS files to connect with.
        strict: whether the model must have exactly the parameters of the step.

    Raises:
        CheckpointError: no store keeps the step any more, or the stores that can be reached do not have all of it.
        OtherModelError: `strict`, and the parameters have other names or shapes.
    """
    candidates = [*known, *(StoreAddress(address=store.address) for store in manifest.stores)]

    def why_not(store: StoreAddress, part: StepPart) -> str | None:
        other = part.reader.step
        return None if other == manifest.step else f"{store.address}: keeps step {other} under that name"

    stores, tensors, problems = find_parts(
        candidates,
        credentials,
        lambda client, _: StepPart(client, manifest.job, "", manifest.step, manifest.kept),
        why_not,
    )
    places = "; ".join(f"{store.address}, state directory {store.state_dir}" for store in manifest.stores)
    kept = (
        f"the checkpoint {path} is step {manifest.global_steps} of job {manifest.job!r}, kept as {manifest.kept!r} at "
        f"{places}"
    )
    if not stores:
        raise CheckpointError(
            f"{kept}; none of the stores that were asked has it ({'; '.join(problems) or 'none was asked'}). Start the "
            "daemon of that state directory at its address, or name its address in paramserver.peers; if the step was "
            "forgotten or the job deleted, the checkpoint cannot be loaded any more"
        )
    source, differences = _compare(groups, tensors, stores)
    slots = (slot for group in groups for slot in group.slot_table.slots if slot.fqn not in source.missing)
    lacking = first_gap(tensors, slots)
    if lacking is None and differences and len(stores) < len(manifest.stores):
        lacking = _listed(differences)
    if lacking is not None:
        raise CheckpointError(
            f"{kept}; of these stores, {len(stores)} of {len(manifest.stores)} were reached, and they lack: {lacking} "
            f"({'; '.join(problems) or 'none refused'}). Start the daemons of the other nodes, or name them in "
            "paramserver.peers"
        )
    if differences and strict:
        raise OtherModelError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{kept}, and holds another model: {_listed(differences)}; load it into that model, or give "
            "load_module_strict=False to load what fits",
        )
    if len(source.missing) == len({parameter.fqn for group in groups for parameter in group.parameters}):
        raise OtherModelError(
            grpc.StatusCode.FAILED_PRECONDITION, f"{kept}, and has no parameter of this model: {_listed(differences)}"
        )
    return source


def _compare(
    groups: Sequence[FlatGroup], tensors: Mapping[str, Sequence[StoredTensor]], stores: Sequence[StoreAddress]
) -> tuple[KeptSource, list[str]]:
    """Return the source, and a text for each parameter that differs between the step and this model."""
    fresh, missing, places, differences = set(), set(), {}, []
    keeps_groups = True
    for group in groups:
        wanted = {kind_from_proto(kind) for kind in group.state_kinds}
        for parameter in group.parameters:
            stored = tensors.get(parameter.fqn)
            if not parameter.whole.shape.numel():
                # A parameter without elements has no part in any store, so nothing is loaded for it.
                continue
            if stored is None:
                differences.append(f"parameter {parameter.fqn!r} is not in the step")
            elif stored[0].shape != tuple(parameter.whole.shape):
                shapes = f"{list(stored[0].shape)} in the step and {list(parameter.whole.shape)} in this model"
                differences.append(f"parameter {parameter.fqn!r} has shape {shapes}")
            else:
                places[parameter.fqn] = stored[0].index
                states = {kind for tensor in stored for kind in tensor.kinds} - _WEIGHTS
                if states != wanted:
                    keeps_groups = False
                    if group.trainable:
                        fresh.add(parameter.fqn)
                continue
            missing.add(parameter.fqn)
    own = {parameter.fqn for group in groups for parameter in group.parameters}
    differences += [f"parameter {fqn!r} is not in this model" for fqn in tensors if fqn not in own]
    source = KeptSource(
        stores=tuple(stores),
        fresh=frozenset(fresh),
        missing=frozenset(missing),
        places=places,
        keeps_groups=keeps_groups and not differences,
    )
    return source, differences


def _listed(differences: Sequence[str]) -> str:
    more = f"; and {len(differences) - _SHOWN} more differences" if len(differences) > _SHOWN else ""
    return f"{'; '.join(differences[:_SHOWN])}{more}"
