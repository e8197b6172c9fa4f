"""The opening of a job on one rank: its shards are declared, filled or rolled back, and an engine's parts are made.

This module owns the order of these steps. It must never train; the engine uses the objects that are made here.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import grpc
import torch
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.base.device import CPU, memory_bytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.home import Home
from trainer_client.errors import ConfigError, JobConflictError, OtherModelError, StoreNotFoundError
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.gather import CollectiveGather, Gather, OneSidedGather, is_one_sided
from trainer_client.training.model.large_buffers import LargeBuffers, can_store
from trainer_client.training.model.placement import GroupPlacement, PlacementPolicy
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.model.tiling import Tiling
from trainer_client.training.model.unit_policy import UnitPolicy, UnitSpec, find_units
from trainer_client.training.model.units import Unit
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run import stored_state
from trainer_client.training.run.context import RankContext, UserObjects
from trainer_client.training.run.declaration import assign, flat_groups, open_request
from trainer_client.training.run.device_budget import bytes_of_copies, need_of, require_room
from trainer_client.training.run.device_copies import CopyRoom
from trainer_client.training.run.imported import load_buffers
from trainer_client.training.run.relayout import fill
from trainer_client.training.run.resume_point import Start, carried_state, find_start, name_layout
from trainer_client.training.run.rolled_back import RollBacks
from trainer_client.training.run.stored_state import AMENDMENT, counts_of, decode_stored, groups_of
from trainer_client.training.run.stored_step import StoredStep
from trainer_client.training.step.precision import PrecisionPolicy

log = logging.getLogger(__name__)

_ID_BYTES = 16

T = TypeVar("T")

_RESUME_POLICIES: Mapping[str, pb.ResumePolicy] = {
    "auto": pb.RESUME_POLICY_AUTO,
    "never": pb.RESUME_POLICY_NEVER,
    # With the policy "must", a missing job is an error only if no store has the job. The own store cannot know this, so
    # it is asked with the policy "auto", and `_begin` raises the error.
    "must": pb.RESUME_POLICY_AUTO,
}


class Job:
    """A job that this rank has opened.

    Attributes:
        units: the units of the model, the root first.
        states: this rank's partitions of all groups, in the order of the units.
        tiling: the parameters that are cut into tiles, and the layers that compute with these tiles.
        lanes: the copies between this rank's host memory and its device.
        gather: the way in which the units' parameters are gathered.
        sharers: number of ranks that use the same store as this one.
        leads_store: whether this rank speaks for all ranks that use its store, so that it alone settles steps and
            starts followers.
        part: the number of this rank's store among the stores of the job, which are ordered by their lowest ranks.
        resumed_step: the commit that the run resumes from; None for a new job.
        resumed_state: the client state of that commit for this rank; None for a new job.
        rolled_back: the roll-backs of the job by operators, see rolled_back.py.
        fresh: FQNs of trainable parameters whose optimizer states begin at zero, although the job is resumed.
        layout: the name of the job's layout in the stores.
        buffers: the large buffers of this rank's model.
        device_copies: the memory of this rank's device that the store may use for copies of parameters.
        handed_over_step: for a new job or layout, the number of the first commit, for which its states are handed over
            already; None: the states are committed already.
    """

    def __init__(
        self,
        user: UserObjects,
        rank: RankContext,
        unit_policy: UnitPolicy,
        initial_values: InitialValues,
        *,
        is_imported: bool = False,
    ) -> None:
        """Open the job, and hand over or load its states. All ranks must call this.

        Args:
            is_imported: whether this run has imported the job itself. It then goes on with the job even if
                `paramserver.resume` is "never".
        """
        settings, store, collectives = rank.settings, rank.store, rank.collectives
        self._settings = settings
        self._parameters = user.parameters
        self._optimizer = user.optimizer
        self._store = store
        self._collectives = collectives
        self._place = rank.place
        # With the policy "never", the store refuses a job that has a step. A job that this run has imported itself has
        # a step already, so the policy "auto" is used for it.
        self._resume = pb.RESUME_POLICY_AUTO if is_imported else _RESUME_POLICIES[settings.paramserver.resume]
        self._policy = PrecisionPolicy.of(settings)
        stores = self._within_one_epoch(self._find_stores)
        self.part = next(part for part, ranks in enumerate(stores) if collectives.rank in ranks)
        self._store_ranks = stores[self.part]
        self.sharers = len(self._store_ranks)
        self.leads_store = self._store_ranks[0] == collectives.rank
        placement = PlacementPolicy.of(settings)
        self.lanes = collectives.lanes
        self.gather = self._choose_gather(placement)
        self.tiling = self._cut(user.module)
        specs = self.tiling.cut(find_units(user.module, user.parameters, unit_policy))
        if collectives.device.type != CPU:
            self._require_device_memory(specs, placement)
        placed = self._make_units(user, specs, placement)
        groups = [state.group for state in self.states]
        self.buffers = _find_large_buffers(user, store, collectives)
        layout = name_layout(groups, self.buffers, collectives)
        opened = self._open(layout)
        section = settings.paramserver
        # The daemons that hold replicas are asked for their steps, too, because a replica may have a newer step than
        # this store, for example if the state of this node was lost.
        peers = (*section.peers, *(section.replica.addresses if section.replicas else ()))
        start = self._within_one_epoch(
            lambda: find_start(section.job, layout, opened, groups, store, peers, collectives)
        )
        self.resumed_step = None if start is None else start.step
        self.rolled_back: RollBacks = {} if start is None else start.rolled_back
        self.fresh = frozenset[str]() if start is None else start.fresh
        self.layout = start.layout if start is not None and start.fits else layout
        self.resumed_state, self.handed_over_step = self._fill(start, opened, initial_values)
        if self.resumed_state is not None:
            load_buffers(user.module, self.resumed_state)
        _move_buffers(user.module, collectives)
        self.buffers.note()
        self.tiling.install(user.module, settings.paramserver.tiling.loss_tokens)
        most_bytes = self._bytes_of_copies(groups, placed) if collectives.device.type != CPU else 0
        self.device_copies = CopyRoom(store.leases.device, self.lanes, collectives.device, most_bytes)
        self.device_copies.offer(section.gpu_budget)

    def _make_units(
        self, user: UserObjects, specs: Sequence[UnitSpec], placement: PlacementPolicy
    ) -> Mapping[str, GroupPlacement]:
        """Make the units and their states, and return the placement of each group by its name."""
        store, collectives = self._store, self._collectives
        groups_of_units = [
            flat_groups(
                spec,
                user.optimizer,
                self._policy,
                rank=collectives.rank,
                world_size=collectives.world_size,
                device=collectives.device,
            )
            for spec in specs
        ]
        groups = list(chain.from_iterable(groups_of_units))
        placed = assign(groups, placement)
        self.states = [PlacedStates(group, placed[group.name], store, collectives) for group in groups]
        self.units = [
            Unit(
                index=index,
                spec=spec,
                groups=groups_of_unit,
                gather=self.gather,
                slab_leases=store.leases,
                lanes=self.lanes,
                residence=placement.residence,
                transient_host_bytes=sum(
                    g.whole_bytes for g in groups_of_unit if placed[g.name].parameters is not Home.HOST
                ),
            )
            for index, (spec, groups_of_unit) in enumerate(zip(specs, groups_of_units, strict=True))
        ]
        return placed

    def _bytes_of_copies(self, groups: Sequence[FlatGroup], placed: Mapping[str, GroupPlacement]) -> int:
        return bytes_of_copies(groups, placed, self._collectives.world_size if self.gather.is_one_sided else 1)

    def _cut(self, model: nn.Module) -> Tiling:
        """Return the tiles that the config asks for, which are the same on all ranks. All ranks must call this."""
        budget = self._store.arena_bytes
        if self._settings.paramserver.tiling.largest_tile == "auto":
            budget = int(self._collectives.gather_rows(torch.tensor([budget]), "the cut of large layers").min())
        return Tiling.of(
            model,
            self._parameters,
            self._settings,
            self._policy.dtype_of,
            host_bytes=budget,
            is_loud=self._collectives.rank == 0,
        )

    def _within_one_epoch(self, act: Callable[[], T]) -> T:
        """Return the result of `act`, during which no daemon of a rank was restarted. All ranks must call this.

        An epoch is the random name of a daemon's start. After a restart, only some ranks may have attached to the new
        daemon, so a result of `act` that compares epochs may be wrong. So `act` is called again after a restart.
        """
        while True:
            epoch = self._store.job.confirm_epoch()
            failure, found = None, list[T]()
            try:
                found.append(act())
            except JobConflictError as error:
                failure = error
            (restarted,) = self._collectives.any_rank([self._store.job.confirm_epoch() != epoch])
            if restarted:
                continue
            if failure is not None:
                raise failure
            return found[0]

    def _find_stores(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each store, ordered by the lowest rank. Daemons with the same epoch are one store.

        All ranks must call this.
        """
        epoch = hashlib.sha256(self._store.epoch.encode()).digest()[:_ID_BYTES]
        stores: dict[bytes, list[int]] = {}
        for number, other in enumerate(self._collectives.gather_ids(epoch)):
            stores.setdefault(other, []).append(number)
        return list(stores.values())

    def _fill(
        self, start: Start | None, opened: pb.OpenJobResponse, initial_values: InitialValues
    ) -> tuple[dict[str, Any] | None, int | None]:
        """Give the states the values that the run starts from. All ranks must call this.

        Returns:
            The values of the attributes `resumed_state` and `handed_over_step`.
        """
        if start is None:
            self._begin(initial_values)
            return None, 0
        if start.fits:
            encoded = next(commit.client_state for commit in opened.committed if commit.step == start.step)
            resumed_state = decode_stored(encoded)
            self._amend(resumed_state)
            names = [p.fqn for p in self._parameters]
            resumed_state["update_counts"] = counts_of(resumed_state, names)
            resumed_state["optimizer"] = groups_of(resumed_state, names)
            self._register()
            self._roll_back(start.step)
            for state in self.states:
                state.load()
            self.buffers.load()
            self._take_over()
            return resumed_state, None
        # The new layout has the same values as `step`, but begins at step + 1. A crash may leave the new layout on some
        # stores only, and the higher number shows then which layout is newer.
        handed_over_step = start.step + 1
        resumed_state = self._lay_out(start, handed_over_step)
        self._take_over()
        return resumed_state, handed_over_step

    def _choose_gather(self, placement: PlacementPolicy) -> Gather:
        ranks = self._collectives.world_size
        (far,) = self._collectives.any_rank([self.sharers != ranks or self._store.plane.name != "arena"])
        why = (
            "not all ranks can read the shared memory of one store daemon (they are on several nodes, or use streams); "
            f"{self.sharers} of {ranks} share this rank's"
        )
        if is_one_sided(
            self._settings.paramserver.gather,
            far=why if far else None,
            parameters_on_device=Home.DEVICE in placement.parameters,
            on_cpu=self._collectives.device.type == CPU,
        ):
            return OneSidedGather(self._store.leases, ranks, self.lanes)
        return CollectiveGather(self._store.leases, self._collectives, self.lanes)

    def _require_device_memory(self, specs: Sequence[UnitSpec], placement: PlacementPolicy) -> None:
        """Check that this job fits on this rank's device, before any of its memory is allocated.

        All ranks must call this.

        Raises:
            ConfigError: the job does not fit on this rank's device, or on the device of another rank.
        """
        rank, size, device = self._collectives.rank, self._collectives.world_size, self._collectives.device
        units = [
            flat_groups(spec, self._optimizer, self._policy, rank=rank, world_size=size, device=torch.device("meta"))
            for spec in specs
        ]
        groups = list(chain.from_iterable(units))
        placed = assign(groups, placement)
        copies = min(self._settings.paramserver.gpu_budget, self._bytes_of_copies(groups, placed))
        need = need_of(units, placed, copies)
        failure: ConfigError | None = None
        if (memory := memory_bytes(device)) is not None:
            try:
                require_room(need, str(device), *memory)
            except ConfigError as error:
                failure = error
        (failed_somewhere,) = self._collectives.any_rank([failure is not None], "the look at the devices' memory")
        if failure is not None:
            raise failure
        if failed_somewhere:
            raise ConfigError("this job does not fit on the device of another rank: see its message")

    def _open(self, layout: str) -> pb.OpenJobResponse:
        """Attach to the job, and return the store's response, which has the committed steps.

        Raises:
            JobConflictError: this run cannot go on with the job. If the user has to choose what becomes of the stored
                model, the message lists the choices.
        """
        section = self._settings.paramserver
        request = open_request(
            self._parameters,
            self._optimizer,
            self._policy,
            job=section.job,
            run_id=self._collectives.broadcast_id(secrets.token_bytes(_ID_BYTES)).hex(),
            rank=self._collectives.rank,
            world_size=self._collectives.world_size,
            attached_ranks=self.sharers,
            durability=section.durability,
            resume=self._resume,
            layout=layout,
            buffers=self.buffers.to_parameters(),
        )
        try:
            return self._store.job.open(request)
        except JobConflictError as error:
            if not isinstance(error, OtherModelError) and error.code is not grpc.StatusCode.ALREADY_EXISTS:
                raise
            ways_on = self._place.ways_on(on_every_node=self.sharers < self._collectives.world_size)
            if isinstance(error, OtherModelError):
                ways_on += '.\n(paramserver.resume = "never" deletes nothing: it refuses every job that has steps)'
            raise type(error)(error.code, f"{error.message}.\n{ways_on}") from None

    def _begin(self, initial_values: InitialValues) -> None:
        """Stage the initial values of a new job, and free the model's own memory. All ranks must call this.

        Raises:
            StoreNotFoundError: paramserver.resume is "must".
        """
        section = self._settings.paramserver
        if section.resume == "must":
            raise StoreNotFoundError(
                grpc.StatusCode.NOT_FOUND,
                f"job {section.job!r} has no committed step to resume from, and paramserver.resume is 'must'",
            )
        self._register()
        initial_values.stage(self.states)
        self.buffers.hand_over(0)

    def _take_over(self) -> None:
        """Update each rank's copies of other ranks' partitions, and free the model's own memory.

        All ranks must call this.
        """
        for state in self.states:
            state.refill()
            state.group.take_over()

    def _lay_out(self, start: Start, step: int) -> dict[str, Any]:
        """Hand over, for `step`, the values of a step in another layout, and return its client state.

        All ranks must call this.
        """
        if self._collectives.rank == 0:
            log.info("job %r: its shards are laid out anew, from step %d", self._place.job, start.step)
        self._store.job.begin_layout(step)
        self._register()
        open_stored_step = partial(
            StoredStep,
            job=self._place.job,
            layout=start.layout,
            step=start.step,
            stores=start.stores,
            credentials=self._store.credentials,
        )
        with open_stored_step() as stored_step:
            fill(self.states, stored_step, open_stored_step, start.fresh, step)
            self.buffers.take(stored_step.buffers(self._collectives.rank))
            self.buffers.hand_over(step)
            state = carried_state(stored_step, start, self._parameters, self._optimizer, self._collectives.rank)
            self._amend(state, stored_step)
            return state

    def _amend(self, state: dict[str, Any], stored_step: StoredStep | None = None) -> None:
        """Apply or drop the changes that the script made after the step to resume from. All ranks must call this.

        A rank that waited for a commit has added such changes to its client state as an amendment. The amendments are
        applied if all ranks that made the step have one.

        Args:
            state: this rank's decoded client state, which this call changes; see stored_state.amend.
            stored_step: the reader of the step, if other ranks than those of this run may have made it. Rank 0 then
                reads the client states of the ranks that made it.
        """
        lacks = state[AMENDMENT] is None
        if stored_step is not None:
            # Rank 0 reads the client states of all ranks that made the step, so that each of these states is read only
            # once.
            leads = self._collectives.rank == 0
            lacks = leads and not all(stored_state.is_amended(stored_step.client_state(r)) for r in stored_step.ranks())
        has_changes = stored_state.has_changes(state)
        is_somewhere, lacks_somewhere = self._collectives.any_rank([has_changes, lacks], "a look at amended states")
        stored_state.amend(state, everywhere=not lacks_somewhere, somewhere=is_somewhere)

    def _register(self) -> None:
        """Declare this rank's shard groups and large buffers to its store, which then knows their sizes and homes."""
        groups = [state.group.to_proto(state.placement) for state in self.states]
        self._store.job.register_shards([*groups, *self.buffers.to_groups()])

    def _roll_back(self, step: int) -> None:
        """Roll the job back to `step` in the stores of all ranks. All ranks must call this."""
        with self._store.job.rolling_back(step):
            if self.leads_store:
                self._store.job.roll_back(step)
            self._collectives.barrier()


def _find_large_buffers(user: UserObjects, store: RankStore, collectives: Collectives) -> LargeBuffers:
    """Return the buffers that are too large for the client state of a commit. All ranks must call this."""
    plain = PlainState(user.module, user.parameters)
    larger = plain.larger_buffers(plain.to_commit()["buffers"])
    return LargeBuffers(user.module, [n for n, buffer in larger.items() if can_store(buffer)], store, collectives)


def _move_buffers(model: nn.Module, collectives: Collectives) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(collectives.device))
