"""The choice of the step that a run resumes from: the newest step of its job of which the stores have all elements.

[Note: layouts] A layout is the way in which a job is cut into shard groups. It follows from the world size, the units,
the dtypes and the set of trainable parameters. Each run that makes a layout gives it a unique name: a fingerprint of
the shards and a nonce. A run finds one of two cases:

- All stores have the same layout, and each rank's store has the part of that rank. Then all runs since that layout was
made have used these stores together, so a step that all of these stores have is one consistent step.
- The stores have different layouts, because nodes left or came, or a run crashed when only some stores had committed a
  new layout. Or a rank was started at another rank's store, because its own store was lost. Then all stores are asked
  which elements they have. The run resumes from the newest step of which, in one layout, every element is on some
  store, and fills a new layout from it. No stored bytes are changed before the new layout is committed on all stores.

An older step must not be chosen only because a store is missing. This is prevented by a rule of the stores: each keeps
its former layout until all ranks have a commit in the next one. So a store that has a newer step, and does not have the
layout of the older step, shows that the older step is obsolete. See tests/integration/test_elastic.py.

This module owns the decision, which is the same on every rank. It must never change what is stored.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import grpc

from paramserver.contract.address import is_socket
from paramserver.contract.dtypes import WIRE_DTYPES
from paramserver.contract.kinds import GRAD
from paramserver.contract.replica_names import replicated_job
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.types import StoredLayout, StoredTensor, kind_from_proto
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.errors import ClientStateError, JobConflictError, StoreError, TrainerClientError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.large_buffers import LargeBuffers
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run import client_state, rolled_back
from trainer_client.training.run.imported import adapt, is_imported
from trainer_client.training.run.stored_state import counts_of, decode_stored, groups_of
from trainer_client.training.run.stored_step import StepPart, StoreAddress, StoredStep, connect, find_parts, first_gap
from trainer_client.training.store_optimizer import StoreOptimizer

_FINGERPRINT_DIGITS = 16
_NONCE_BYTES = 4
_WEIGHTS = ("param", "master")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The step that a run resumes from.

    Attributes:
        layout: name of the layout that has the step.
        step: number of the step.
        fits: whether this run's own stores have the step in the layout that this run would make, so that the step can
            be used in place.
        rolled_back: the roll-backs of the job by operators, see rolled_back.py. The commits of the run name them.
        stores: the stores that have parts of the step; empty if `fits` is True.
        fresh: FQNs of trainable parameters whose optimizer states begin at zero.
        keeps_groups: whether optimizer and trainable parameters are those with which the step was made. If not, the
            hyper-parameters of the parameter groups are this run's instead of the stored ones.
    """

    layout: str
    step: int
    fits: bool
    rolled_back: Mapping[str, int] = field(default_factory=dict)
    stores: tuple[StoreAddress, ...] = ()
    fresh: frozenset[str] = frozenset()
    keeps_groups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What one store has of the job, as a rank has asked the store: the job's layouts, the oldest first.

    The ranks exchange these records, so that all of them choose the same step.

    Attributes:
        own_steps: the steps of the store's newest layout of which the store has the part of the rank that asked;
            empty for a peer, a store of no rank of this run, which rank 0 asks.
        rolled_back: the roll-backs that the store has recorded, or that its newest commits name.
    """

    store: StoreAddress
    layouts: tuple[StoredLayout, ...]
    own_steps: tuple[int, ...] = ()
    rolled_back: Mapping[str, int] = field(default_factory=dict)

    def has(self, layout: str) -> bool:
        """Return whether the store has steps in the layout with the name `layout`."""
        return any(stored.name == layout for stored in self.layouts)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> _View:
        view = json.loads(text)
        return cls(
            store=StoreAddress(**view["store"]),
            layouts=tuple(StoredLayout(**layout | {"steps": tuple(layout["steps"])}) for layout in view["layouts"]),
            own_steps=tuple(view["own_steps"]),
            rolled_back=view["rolled_back"],
        )


def name_layout(groups: Iterable[FlatGroup], buffers: LargeBuffers, collectives: Collectives) -> str:
    """Return a new name for the layout that this run would make; see [Note: layouts]. All ranks must call this."""
    shards = [
        [
            group.name_of(0),
            group.slot_table.partition_numel,
            [
                # `slot.first` is 0 for all slots except those of tiles. A 0 is not written into the text from which the
                # layout's name is made, so layouts without tiles keep the names that earlier versions gave them.
                [slot.fqn, slot.offset, slot.numel, *([slot.first] if slot.first else [])]
                for slot in group.slot_table.slots
            ],
            [[int(kind), WIRE_DTYPES[group.dtype_of(kind)]] for kind in (*group.kinds, GRAD)],
        ]
        for group in groups
    ]
    content = json.dumps([collectives.world_size, shards, *buffers.form], separators=(",", ":")).encode()
    fingerprint = hashlib.sha256(content).hexdigest()[:_FINGERPRINT_DIGITS]
    return f"{fingerprint}-{collectives.broadcast_id(secrets.token_bytes(_NONCE_BYTES)).hex()}"


def find_start(
    job: str,
    layout: str,
    opened: pb.OpenJobResponse,
    groups: Sequence[FlatGroup],
    store: RankStore,
    peers: Iterable[str],
    collectives: Collectives,
) -> Start | None:
    """Return the step to resume from; None if the job is new. All ranks must call this.

    Args:
        job: name of the job.
        layout: name of the layout that this run would make.
        opened: the layouts and steps of the job that this rank's store has.
        groups: the flat groups of the model.
        store: this rank's store.
        peers: addresses of further stores that may have parts of the job.
        collectives: the collectives of this rank.

    Raises:
        JobConflictError: there are committed steps, but the stores have all elements of none of them; the message names
            what is missing.
    """
    layouts = tuple(StoredLayout.from_proto(message) for message in opened.layouts)
    newest = opened.committed[-1].client_state if opened.committed else b""
    view = _View(
        store=StoreAddress(address=store.address, epoch=store.epoch),
        layouts=layouts,
        # A rank commits its client state together with its shards. So a store that lacks the client state of a step
        # lacks the rank's shards of that step, too, and the step is not listed.
        own_steps=tuple(commit.step for commit in opened.committed if commit.client_state),
        rolled_back={**rolled_back.of_layouts(layouts), **rolled_back.of_state(newest)},
    )
    views = [_View.from_json(text) for text in collectives.gather_bytes(view.to_json())]
    step = _common_step(views, layout)
    fitting = None
    if step is not None:
        known = {name: to for view in views for name, to in view.rolled_back.items()}
        fitting = Start(layout=views[0].layouts[-1].name, step=step, fits=True, rolled_back=known)
    peers = tuple(peers)
    if fitting is not None and not peers:
        return fitting
    # Rank 0 searches the stores of peers for all ranks, so that every store is asked only once.
    found: Mapping[str, Any] = {}
    if collectives.rank == 0:
        try:
            found = {"start": _Search(job, groups, store, views, peers).run()}
        except TrainerClientError as error:
            found = {"error": str(error)}
    found = json.loads(collectives.gather_bytes(json.dumps(found, default=_plain).encode())[0])
    if "error" in found:
        raise JobConflictError(grpc.StatusCode.FAILED_PRECONDITION, found["error"])
    if found["start"] is None:
        return None
    start = dict(found["start"])
    if fitting is not None and (start["layout"], start["step"]) == (fitting.layout, fitting.step):
        return replace(fitting, rolled_back=start["rolled_back"])
    stores = [StoreAddress(**item) for item in start.pop("stores")]
    # The rank's own store comes first in the list, so that the rank reads from it all elements that it has. The epoch
    # of the own store is not compared, because its daemon may be restarted before the rank reads, and then has another
    # epoch.
    patience = store.reattach_seconds
    own = [
        replace(other, address=store.address, epoch="", wait_seconds=max(other.wait_seconds, patience))
        for other in stores
        if other.epoch == store.epoch
    ]
    stores = [*own, *(other for other in stores if other.epoch != store.epoch)]
    return Start(**start | {"stores": tuple(stores), "fresh": frozenset(start["fresh"])})


def carried_state(
    stored_step: StoredStep,
    start: Start,
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    rank: int,
) -> dict[str, Any]:
    """Return the client state of the commit to resume from, adapted to a rank of this run.

    A rank that took part in the commit gets its own random states back. A new rank gets random states that are derived
    from rank 0's and the rank's number. If an import made the commit, it has no random states, and a rank keeps its
    present ones.

    Raises:
        ClientStateError: the commit was made neither by a trainer nor by an import.
    """
    own = stored_step.client_state(rank)
    encoded = stored_step.client_state(0) if own is None else own
    if not encoded:
        raise ClientStateError(
            f"step {stored_step.step} of job {stored_step.job!r} was not committed by a trainer: use another job name"
        )
    state = decode_stored(encoded)
    if is_imported(state):
        adapt(state, _names_by_index(stored_step), parameters, optimizer, start.fresh)
        return state
    if own is None:
        state["random"] = client_state.derived_random_states(state["random"], rank)
    names = [parameter.fqn for parameter in parameters]
    counts = counts_of(state, names)
    state["update_counts"] = [
        0 if parameter.fqn in start.fresh else count for parameter, count in zip(parameters, counts, strict=True)
    ]
    state["optimizer"] = groups_of(state, names) if start.keeps_groups else None
    return state


def _names_by_index(stored_step: StoredStep) -> dict[int, str]:
    """Return the name of each parameter that has elements, by its number in the order in which the job was opened."""
    return {tensor.index: tensor.fqn for part in stored_step.parts() for tensor in part.tensors.values()}


def _common_step(views: Sequence[_View], layout: str) -> int | None:
    """Return the newest step of which every rank's store has the rank's part, in one layout that is cut like `layout`.

    Return None if there is no such step.
    """
    if not all(view.layouts for view in views):
        return None
    newest = [view.layouts[-1] for view in views]
    names = {stored.name for stored in newest}
    if len(names) > 1 or names.pop().partition("-")[0] != layout.partition("-")[0]:
        return None
    return max(set.intersection(*(set(view.own_steps) for view in views)), default=None)


class _Search:
    """The search of rank 0 for the newest step of which all stores together have all elements."""

    def __init__(
        self, job: str, groups: Sequence[FlatGroup], store: RankStore, views: Sequence[_View], peers: Iterable[str]
    ) -> None:
        self._job = job
        self._groups = groups
        self._credentials = store.credentials
        # The keys of `_views` are (epoch of a daemon, name of a replica at that daemon). The name is "" for the job
        # itself. A daemon may have a part of the job, and also replicas of the parts of other daemons.
        self._views = {(view.store.epoch, ""): view for view in views}
        self._problems: list[str] = []
        for address in peers:
            self._add_peer(address)
        self._rolled_back = {name: to for view in self._views.values() for name, to in view.rolled_back.items()}

    def run(self) -> Start | None:
        """Return the step that was found; None if no store has a step. Raise JobConflictError if all lack elements."""
        steps: dict[tuple[int, str], list[_View]] = {}
        for view in self._views.values():
            for stored in view.layouts:
                for step in stored.steps:
                    steps.setdefault((step, stored.name), []).append(view)
        newer: list[tuple[_View, int]] = []
        for step, layout in sorted(steps, reverse=True):
            holders = steps[step, layout]
            stores, tensors = self._ask(layout, step, holders)
            missing = first_gap(tensors, (slot for group in self._groups for slot in group.slot_table.slots))
            # `lost` has the addresses of stores that have a newer step and not this layout, which shows that this step
            # is obsolete; see [Note: layouts]. The first commit of a layout has the same values as the step below it,
            # from which it was filled. So it does not make that step obsolete.
            lost = [view.store.address for view, above in newer if above > step + 1 and not view.has(layout)]
            if missing is None and not lost:
                return self._start(layout, step, stores, tensors)
            newer += [(view, step) for view in holders]
            self._problems.append(
                f"step {step} is whole, but older than what {', '.join(lost)} has"
                if missing is None
                else f"step {step} lacks {missing}"
            )
        if steps or self._problems:
            asked = ", ".join(dict.fromkeys(view.store.address for view in self._views.values()))
            raise JobConflictError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"job {self._job!r} has no step that is whole on the stores {asked}: {'; '.join(self._problems)}. "
                "A node's state is missing: start a rank there, name its store in paramserver.peers, restore it, or "
                "delete the job on every node",
            )
        return None

    def _add_peer(self, address: str) -> None:
        try:
            with connect(StoreAddress(address=address), self._credentials) as client:
                store = StoreAddress(address=address, epoch=client.epoch)
                layouts = {job.name: job.layouts for job in client.list_jobs()}
                found = {(store.epoch, ""): self._view_of(client, store, layouts.get(self._job, ()))}
                for name, held in layouts.items():
                    if replicated_job(name) == self._job:
                        found[store.epoch, name] = self._view_of(client, replace(store, held_as=name), held)
        except TrainerClientError as error:
            self._problems.append(f"{address}: {error}")
            return
        for key, view in found.items():
            known = self._views.setdefault(key, view)
            # If a rank uses this peer as its own store, `_views` has a view of the store already, which stays. That
            # rank may know the store by the path of a UNIX socket, which leads to another store on each node. So the
            # view gets the address by which rank 0 has reached the peer.
            if is_socket(known.store.address):
                self._views[key] = replace(known, store=replace(known.store, address=address))

    def _view_of(self, client: StoreClientSync, store: StoreAddress, layouts: Sequence[StoredLayout]) -> _View:
        """Return the record of what a peer's store has of the job. It can raise StoreError."""
        named = rolled_back.of_layouts(layouts)
        for layout in layouts:
            # An error of this read is ignored, because it only means that the roll-backs of this layout stay unknown.
            # The step may be gone, because a follower has copied a newer one to the peer after the peer listed its
            # steps. Or the peer allows no more readers at the moment. In both cases the view still shows which steps
            # the peer has.
            with (
                suppress(StoreError),
                client.read_layout(store.held_as or self._job, layout.name, max(layout.steps)) as reader,
            ):
                named |= rolled_back.of_step(reader)
        return _View(store=store, layouts=tuple(layouts), rolled_back=named)

    def _ask(
        self, layout: str, step: int, holders: list[_View]
    ) -> tuple[list[StoreAddress], dict[str, list[StoredTensor]]]:
        """Return the reachable stores that have the step, and their parts of each tensor, by the tensor's name.

        A store whose step was given up by an operator's roll-back is removed from `holders`.
        """
        views = {view.store: view for view in holders}

        def why_not(store: StoreAddress, part: StepPart) -> str | None:
            back = self._went_back_to(views[store], layout, step, part)
            if back is None:
                return None
            holders.remove(views[store])
            return f"step {step} at {store.address} was given up: an operator rolled the job back to step {back}"

        reached, tensors, problems = find_parts(
            views,
            self._credentials,
            lambda client, store: StepPart(client, store.held_as or self._job, layout, step),
            why_not,
        )
        self._problems += problems
        return reached, tensors

    def _went_back_to(self, view: _View, layout: str, step: int, part: StepPart) -> int | None:
        """Return the step to which an operator rolled the job back after this step was made; None if there is none."""
        if not self._rolled_back:
            return None
        # A store that is rolled back discards the steps above the step to which it goes back. So if the store has
        # recorded a roll-back and still has a step above that step, the store made this step after the roll-back.
        (stored,) = (one for one in view.layouts if one.name == layout)
        made_after = {*stored.rolled_back, *rolled_back.of_step(part.reader)}
        return rolled_back.went_back_to(self._rolled_back, step, made_after)

    def _start(
        self, layout: str, step: int, stores: Iterable[StoreAddress], tensors: Mapping[str, Sequence[StoredTensor]]
    ) -> Start:
        fresh, other = set(), set()
        for group in self._groups:
            wanted = {kind_from_proto(kind) for kind in group.state_kinds}
            for slot in group.slot_table.slots:
                stored = tensors.get(slot.fqn, ())
                states = {kind for tensor in stored for kind in tensor.kinds} - set(_WEIGHTS)
                if stored and states != wanted:
                    other.add(slot.fqn)
                    if group.trainable:
                        fresh.add(slot.fqn)
        return Start(
            layout=layout,
            step=step,
            fits=False,
            rolled_back=self._rolled_back,
            stores=tuple(stores),
            fresh=frozenset(fresh),
            keeps_groups=not other,
        )


def _plain(value: Any) -> Any:
    """Return a frozenset as a sorted list, or a dataclass as a dict, so that JSON can have it."""
    return sorted(value) if isinstance(value, frozenset) else asdict(value)
