"""The optimizer's update of each flat group: in the store, or on this rank's device, with the same bits.

This module owns the rule that is foreseen for the next step. It must never decide what a step is: its callers give the
scale and the hyper-parameters.

[Note: early updates] The store may begin with the update of a group in the backward pass already, as soon as the
group's gradient is final. The store does so on the assumption that the step will be made, with the scale and the
hyper-parameters that are foreseen. The store keeps the committed versions meanwhile, and the gradients stay leased
until the rank votes for the step. If the assumption was wrong (a gradient is not finite or was changed, gradients are
clipped, the learning rate is another one), the update is withdrawn and made again as the step says, so that the bits
are always those of an update after the norm. Until the step is made, reads see the parameters as they were.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from paramserver.contract.kinds import PARAM
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.update import update_shards
from trainer_client.client.transport.journal import GroupUpdate
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.home import Home
from trainer_client.errors import StoreError
from trainer_client.optimizers.hyper_parameters import HyperParameterTable
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import note_new_values
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.slot_table import ShardRange
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.early_updates import EarlyUpdate, EarlyUpdates
from trainer_client.training.step.gradient_group import GradientGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """The arithmetic of one step for all groups: which parameters it updates, and by which numbers.

    Attributes:
        scale: the factor of all gradients, in fp32: unscaling and clipping by norm in one.
        clip_value: the limit of each element's magnitude after the scaling; None: no limit.
        updated: for each parameter of the model, whether it is updated in this step.
        table: the hyper-parameters of the step: its rows are the different ones, and `row_of` gives a parameter's row.
    """

    scale: float
    clip_value: float | None
    updated: Sequence[bool]
    table: HyperParameterTable

    def rows(self, group: FlatGroup, shards: Iterable[ShardRange], slots: Container[int] | None = None) -> list[int]:
        """Return for each shard the row of its hyper-parameters in `table`, or -1 if the step does not update it.

        With `slots`, the row of each parameter of the group that is not in these slots is -1, too.
        """
        rows = []
        for shard in shards:
            index = group.parameters[shard.slot].index
            is_updated = self.updated[index] and (slots is None or shard.slot in slots)
            rows.append(self.table.row_of(index) if is_updated else -1)
        return rows

    def rows_of(self, update: GroupUpdate) -> list[HyperParameters | None]:
        """Return the hyper-parameters of each shard of an update by this rule; None for a shard without an update."""
        return [self.table.rows[row] if row >= 0 else None for row in update.hyper_parameters_of_shard]


class Updates:
    """Updates all groups by the rule of a step: has the store update those in its memory, and updates the others here.

    Args:
        states: the states of all groups, in forward order.
        early: the early updates, the same object by which Gradients withdraws updates before gradients change.
    """

    def __init__(
        self, states: Sequence[PlacedStates], early: EarlyUpdates, store: RankStore, collectives: Collectives
    ) -> None:
        self._early = early
        self._states = {state.group.name: state for state in states}
        self._store = store
        self._collectives = collectives
        self._updated: list[PlacedStates] = []
        # The early updates that have become part of the step which `apply` has made. Their leases are not released by
        # this rank, because the commit consumes them.
        self._accepted: list[EarlyUpdate] = []
        self._foreseen: tuple[int, UpdateRule] | None = None

    def foresee(self, step: int, rule: UpdateRule | None) -> None:
        """Take note of the rule by which the `step` will most probably be made after the backward pass that begins.

        The rule None means that no step follows the backward pass, or that the rule is not known.
        """
        self._foreseen = None if rule is None else (step, rule)

    def begin_early(self, gradient: GradientGroup) -> None:
        """Have the store begin with the update of a group whose gradient is expected to be final. It does not wait.

        Does nothing if no rule is foreseen, if the group is updated on the device, or if the gradient is not in the
        store's memory.
        """
        group = gradient.flat_group
        if self._foreseen is None or self._states[group.name].placement.optimizer is Home.DEVICE:
            return
        if not gradient.is_finite():
            # A step with a gradient that is not finite is skipped, so no other group needs to begin its update early.
            self._foreseen = None
            return
        leased = gradient.memory.leased
        if leased is None:
            return
        step, rule = self._foreseen
        update = self._describe(gradient, leased, rule, gradient.present)
        self._early.begin(step, update, rule.table.rows, rule.rows_of(update))

    def withdraw_early(self) -> None:
        """Have the store undo all early updates, because the states that they are computed from change.

        Gradients whose copies are still under way begin no early update either, because the change of states is a
        commit of its own, which takes the number that was foreseen for the step.
        """
        self._foreseen = None
        self._early.withdraw_all()

    def apply(self, step: int, gradients: Iterable[GradientGroup], rule: UpdateRule) -> None:
        """Update the groups that have gradients, and finish the gradients.

        If states are replicated, all ranks must call this.

        The groups that the store updates are handed over first, so that it works on them while this rank updates those
        on its device.
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
            note_new_values(p for p in gradient.flat_group.parameters if rule.updated[p.index])
            if state.placement.optimizer is Home.DEVICE:
                own.append(gradient)
                continue
            if (early := self._begun(gradient, rule)) is not None:
                leased = gradient.take_lease(step)
                if early.update.gradient.is_same_lease(leased):
                    self._accepted.append(early)
                    begun.append(self._describe(gradient, leased, rule))
                else:
                    # The daemon was restarted after it had accepted the early update. The new daemon has granted other
                    # memory and does not know the update, so this rank hands the gradient over again.
                    self._hand_over(step, rule, [(gradient, leased)])
                continue
            if state.placement.gradients is Home.DEVICE:
                # Gradients on the device are handed over one at a time, so that the store needs memory only for the
                # gradients that it is updating with at the moment.
                self._hand_over(step, rule, [(gradient, None)])
            else:
                stored.append(gradient)
        if begun:
            # The leases of early updates are not released after this call, because the commit consumes them.
            self._store.gradients.apply(step, rule.table.rows, begun, begun=True)
        if stored:
            self._hand_over(step, rule, [(gradient, None) for gradient in stored])
        for gradient in own:
            self._update_on_device(self._states[gradient.flat_group.name], gradient, rule)

    def _hand_over(
        self, step: int, rule: UpdateRule, gradients: Iterable[tuple[GradientGroup, LeasedBytes | None]]
    ) -> None:
        """Have the store update the groups of `gradients` by the rule of `step`.

        Args:
            gradients: each gradient with the lease on its bytes; None: this method takes the lease from the gradient.
                The store owns the leases once it has accepted the updates. If it refuses them, they are released.
        """
        leases: list[LeasedBytes] = []
        updates: list[GroupUpdate] = []
        try:
            for gradient, leased in gradients:
                leases.append(gradient.take_lease(step) if leased is None else leased)
                updates.append(self._describe(gradient, leases[-1], rule))
            self._store.gradients.apply(step, rule.table.rows, updates)
        except BaseException:
            self._store.leases.release_quietly(leases)
            raise

    def abandon(self, *, is_voted_for: bool) -> None:
        """Release what the step under way holds, after a failure that the caller reports.

        Args:
            is_voted_for: whether this rank has voted for the step, whose commit consumes the gradients of early
                updates.
        """
        for state in self._states.values():
            state.release_parameter_leases()
        accepted, self._accepted = self._accepted, []
        for early in () if is_voted_for else accepted:
            with suppress(StoreError):
                self._early.undo(early)
            self._store.leases.release_quietly([early.update.gradient])

    def refresh(self) -> None:
        """Bring the parameters on this rank's device up to date with the step that `apply` made.

        Call this after all ranks have voted for the step. If parameters are resident, all ranks must call this.
        """
        updated, self._updated = self._updated, []
        self._accepted = []
        for index, state in enumerate(updated):
            # This rank requests the parameters of the next group too, so that the store reads them while this rank
            # copies and gathers the present group.
            for ahead in updated[index : index + 2]:
                ahead.start_load_parameters()
            state.load_parameters()
            if state.placement.residence is Residence.RESIDENT:
                state.refill()

    def _begun(self, gradient: GradientGroup, rule: UpdateRule) -> EarlyUpdate | None:
        """Return a group's early update if it is the one that the rule asks for. If not, withdraw it, return None."""
        early = self._early.find(gradient.flat_group.name)
        if early is None:
            return None
        update = self._describe(gradient, early.update.gradient, rule)
        if not early.is_as(update, rule.rows_of(update)):
            self._early.require_revisable(
                f"the step updates {gradient.flat_group.unit} with other hyper-parameters than the backward pass began "
                "with",
                gradient.flat_group.name,
            )
            gradient.withdraw()
            return None
        return early

    def _describe(
        self, gradient: GradientGroup, leased: LeasedBytes, rule: UpdateRule, slots: Container[int] | None = None
    ) -> GroupUpdate:
        """Return a group's update by the rule, with the gradient in `leased`, as the store is to make it.

        Args:
            slots: the parameters of the group that are updated; None: all that the rule updates.
        """
        group = gradient.flat_group
        return GroupUpdate(
            group=group.name,
            gradient=leased,
            scale=rule.scale,
            hyper_parameters_of_shard=rule.rows(group, group.shards, slots),
            clip_value=rule.clip_value,
            next_use=gradient.next_use,
        )

    @torch.no_grad()
    def _update_on_device(self, state: PlacedStates, gradient: GradientGroup, rule: UpdateRule) -> None:
        """Update a group as the store's optimizer kernel does.

        If the group's states are replicated, each rank updates the whole group, and all ranks must call this.
        """
        group = state.group
        replicated = state.placement.residence is Residence.REPLICATED
        values = gradient.partition.to(group.device)
        if replicated:
            whole = torch.empty(group.slot_table.numel, dtype=values.dtype, device=group.device)
            self._collectives.all_gather_flat(whole, values)
            values = whole
        # `float` returns the same tensor if the gradient is fp32 already. Then the gradient is scaled in place, which
        # is allowed, because it is not needed after the update.
        scratch = values.float()
        weight = state.held.get(group.weight_kind)
        if weight is None:
            weight = state.read(group.weight_kind).to(group.device)
        shards = group.slot_table.whole() if replicated else group.shards
        rows = [rule.table.rows[row] if row >= 0 else None for row in rule.rows(group, shards)]
        update_shards(
            ((shard.partition_offset, shard.numel, row) for shard, row in zip(shards, rows, strict=True)),
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
