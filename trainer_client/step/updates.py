"""What the optimizer's step does to each flat group: in the store, or on this rank's device, with the same bits.

Owns the updates that began before the step. Must never decide what a step is: the scale and the hyper-parameters are
given.

[Note: early updates] What the store updates it may begin with in the backward pass, as soon as a group's gradient is
final: on the assumption that the step will be made, with the scale and the hyper-parameters foreseen. The store keeps
the committed versions, and the gradients stay leased until the step is voted for. What turns out otherwise (a gradient
that is not finite, or was changed; clipping; another learning rate) is withdrawn, and made again as it should be: the
bits are those of the update after the norm. Until the step is made, reads see the parameters as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from paramserver.contract.kinds import PARAM
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.update import update_shards
from trainer_client.config.home import Home
from trainer_client.errors import StoreError
from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.layout import ShardRange
from trainer_client.model.placement import Residence
from trainer_client.model.states import PlacedStates
from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.ranks.collectives import Collectives
from trainer_client.step.early_update import EarlyUpdate
from trainer_client.step.gradients import GradientGroup
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import GroupUpdate, RankStore


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """A step's arithmetic, for all groups.

    Attributes:
        scale: what gradients are multiplied by, in fp32: unscaling and clipping by norm in one.
        clip_value: the limit of each element after that; None: no limit.
        updated: for each parameter of the model, whether it is updated in this step.
        table: the hyper-parameters.
    """

    scale: float
    clip_value: float | None
    updated: Sequence[bool]
    table: HyperParameterTable

    def rows(self, group: FlatGroup, shards: Iterable[ShardRange]) -> list[int]:
        """For each shard the row of the table, or -1 if it stays as it is."""
        indices = [group.parameters[shard.slot].index for shard in shards]
        return [self.table.row_of(index) if self.updated[index] else -1 for index in indices]

    def rows_of(self, update: GroupUpdate) -> list[HyperParameters | None]:
        """The hyper-parameters of an update by this rule, for each shard; None: it stays as it is."""
        return [self.table.rows[row] if row >= 0 else None for row in update.hyper_parameters_of_shard]

    def only(self, gradient: GradientGroup) -> UpdateRule:
        """The rule for what has a gradient, in one group."""
        parameters = gradient.flat_group.parameters
        present = {parameters[slot].index for slot in gradient.present}
        return replace(self, updated=[is_updated and i in present for i, is_updated in enumerate(self.updated)])


class Updates:
    """Attributes:
    begun_early, withdrawn: early updates so far, and those of them that were undone.

    Args:
    states: of all groups, in forward order.
    """

    def __init__(self, states: Sequence[PlacedStates], store: RankStore, collectives: Collectives) -> None:
        self.begun_early = 0
        self.withdrawn = 0
        self._states = {state.group.name: state for state in states}
        self._store = store
        self._collectives = collectives
        self._updated: list[PlacedStates] = []
        # Early updates that are part of the step which `apply` has made. The commit consumes their leases.
        self._accepted: list[EarlyUpdate] = []
        self._foreseen: tuple[int, UpdateRule] | None = None

    def foresee(self, step: int, rule: UpdateRule | None) -> None:
        """A backward pass begins, after which the `step` will most probably be made by this rule. None: none will, or
        nobody knows."""
        self._foreseen = None if rule is None else (step, rule)

    def begin_early(self, gradient: GradientGroup) -> None:
        """The gradient of a group is final, as far as anybody knows: begins with its update, if the rule is foreseen
        and the store has what it needs. Does not wait."""
        group = gradient.flat_group
        if self._foreseen is None or self._states[group.name].placement.optimizer is Home.DEVICE:
            return
        _, norms = gradient.norms()
        if not bool(norms.isfinite().all()):
            # There will be no such step.
            self._foreseen = None
            return
        leased = gradient.memory.leased
        if leased is None:
            return
        step, rule = self._foreseen
        rule = rule.only(gradient)
        update = self._describe(gradient, leased, rule)
        gradient.early = EarlyUpdate(
            step=step,
            update=update,
            rows=rule.rows_of(update),
            accepted=self._store.start_apply_gradients(step, list(rule.table.rows), [update]),
            undo=self._undo,
        )
        self.begun_early += 1

    def _undo(self, early: EarlyUpdate) -> None:
        if early.accepted.wait():
            self._store.withdraw_updates(early.step, [early.update.group])
        self.withdrawn += 1

    def withdraw(self, gradients: Iterable[GradientGroup]) -> None:
        """Undoes the updates that have begun, for a step that is not made."""
        for gradient in gradients:
            gradient.begin_change()

    def apply(self, step: int, gradients: Iterable[GradientGroup], rule: UpdateRule) -> None:
        """Updates the groups that have gradients, which are done with afterwards.

        What the store updates is handed over first: it works on that while this rank works on its own. A collective
        where states are replicated.
        """
        self._updated = []
        self._accepted = []
        self._foreseen = None
        own: list[GradientGroup] = []
        stored: list[GradientGroup] = []
        begun: list[GroupUpdate] = []
        for gradient in gradients:
            state = self._states[gradient.flat_group.name]
            self._updated.append(state)
            if state.placement.optimizer is Home.DEVICE:
                own.append(gradient)
                continue
            if (early := self._begun(gradient, rule)) is not None:
                leased = gradient.take_lease(step)
                if early.update.gradient is leased:
                    self._accepted.append(early)
                    begun.append(self._describe(gradient, leased, rule))
                else:
                    # The daemon was lost in this moment: its successor has granted other memory.
                    self._hand_over(step, rule, [(gradient, leased)])
                continue
            if state.placement.gradients is Home.DEVICE:
                # One at a time: the store's memory need not hold more of them than it works on.
                self._hand_over(step, rule, [(gradient, None)])
            else:
                stored.append(gradient)
        if begun:
            # The commit consumes the leases.
            self._store.apply_gradients(step, rule.table.rows, begun, begun=True)
        if stored:
            self._hand_over(step, rule, [(gradient, None) for gradient in stored])
        for gradient in own:
            self._update_on_device(self._states[gradient.flat_group.name], gradient, rule)

    def _hand_over(
        self, step: int, rule: UpdateRule, gradients: Iterable[tuple[GradientGroup, LeasedBytes | None]]
    ) -> None:
        """Have the store update groups, each with its lease; None: it is taken here. The leases are the store's once it
        has accepted them."""
        leases: list[LeasedBytes] = []
        updates: list[GroupUpdate] = []
        try:
            for gradient, leased in gradients:
                leases.append(gradient.take_lease(step) if leased is None else leased)
                updates.append(self._describe(gradient, leases[-1], rule))
            self._store.apply_gradients(step, rule.table.rows, updates)
        except BaseException:
            self._store.give_back(leases)
            raise

    def abandon(self, *, is_voted_for: bool) -> None:
        """Give back what the step under way holds, after a failure that the caller reports.

        Args:
            is_voted_for: this rank has voted for the step, whose commit consumes the gradients of early updates.
        """
        for state in self._states.values():
            state.forgo_parameters()
        accepted, self._accepted = self._accepted, []
        for early in () if is_voted_for else accepted:
            with suppress(StoreError):
                early.withdraw()
            self._store.give_back([early.update.gradient])

    def refresh(self) -> None:
        """Brings what this rank keeps of the parameters up to date with the step that `apply` made and all ranks have
        voted for. A collective, for what is resident."""
        updated, self._updated = self._updated, []
        self._accepted = []
        for index, state in enumerate(updated):
            # One ahead: the store reads the next group while this rank copies and gathers.
            for ahead in updated[index : index + 2]:
                ahead.start_load_parameters()
            state.load_parameters()
            if state.placement.residence is Residence.RESIDENT:
                state.refill()

    def _begun(self, gradient: GradientGroup, rule: UpdateRule) -> EarlyUpdate | None:
        """The update that has begun early, if it is as the rule says; one that is otherwise is undone."""
        early = gradient.early
        if early is None or not early.accepted.wait():
            gradient.early = None
            return None
        update = self._describe(gradient, early.update.gradient, rule)
        if not early.is_as(update, rule.rows_of(update)):
            gradient.begin_change()
            return None
        return early

    def _describe(self, gradient: GradientGroup, leased: LeasedBytes, rule: UpdateRule) -> GroupUpdate:
        group = gradient.flat_group
        return GroupUpdate(
            group=group.name,
            gradient=leased,
            scale=rule.scale,
            hyper_parameters_of_shard=rule.rows(group, group.shards),
            clip_value=rule.clip_value,
            next_use=gradient.next_use,
        )

    @torch.no_grad()
    def _update_on_device(self, state: PlacedStates, gradient: GradientGroup, rule: UpdateRule) -> None:
        """Update a group whose states live on the device: this rank's chunk, or the whole group where states are
        replicated. The store's optimizer kernel gives the same bits."""
        group = state.group
        replicated = state.placement.residence is Residence.REPLICATED
        values = gradient.chunk.to(group.device)
        if replicated:
            whole = torch.empty(group.layout.numel, dtype=values.dtype, device=group.device)
            self._collectives.all_gather_flat(whole, values)
            values = whole
        # In place where it has that type already: the gradient is done with.
        scratch = values.float()
        weight = state.held.get(group.weight_kind)
        if weight is None:
            weight = state.read(group.weight_kind).to(group.device)
        shards = group.layout.whole() if replicated else group.shards
        rows = [rule.table.rows[row] if row >= 0 else None for row in rule.rows(group, shards)]
        update_shards(
            zip(shards, rows, strict=True),
            weight,
            scratch,
            {kind: state.held[kind] for kind in group.state_kinds},
            grad_scale=rule.scale,
            clip_value=rule.clip_value,
        )
        gradient.finish()
        if (parameters := state.held.get(PARAM)) is None:
            state.note_update(weight.to(group.dtype))
            return
        if parameters is not weight:
            parameters.copy_(weight)
        state.note_update()
