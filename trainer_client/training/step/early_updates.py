"""The updates that the store has begun with before the step is made; see updates.py [Note: early updates].

This module owns which flat groups have an early update. It must never begin one on its own: only Updates knows the rule
of the step, so Updates asks for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.gradient_leases import GradientLeases
from trainer_client.client.transport.journal import GroupUpdate
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.errors import PhaseError

# The end of the error texts for calls that break the promise of final early updates.
_PROMISE = (
    'paramserver.early_updates is "final", which promises that nothing reads or changes gradients, weights, states or '
    "hyper-parameters between the last backward pass of a step and the step: set it to true"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUpdate:
    """An update of one flat group that the store has begun before the step is made.

    Attributes:
        step: the step that the update is for.
        rows: the hyper-parameters of each shard of the group; None: the update does not change the shard.
        accepted: the store's answer, whether it has the update. False: the daemon was restarted, so the update has to
            be handed over again.
    """

    step: int
    update: GroupUpdate
    rows: Sequence[HyperParameters | None]
    accepted: Pending[bool]

    def is_as(self, update: GroupUpdate, rows: Sequence[HyperParameters | None]) -> bool:
        """Return whether the step updates the group exactly as this early update did, so that the update can stay."""
        same = self.update.scale == update.scale and self.update.clip_value == update.clip_value
        return same and self.rows == rows


class EarlyUpdates:
    """The early updates of the step under way, by the name of their flat group.

    A gradient must be withdrawn from the store before it changes, so `Gradients` calls `withdraw` before each change.

    Args:
        are_final: the training loop has promised that nothing changes between backward and step, so the store frees
            gradients whose update is done. An update may then be withdrawn only if its step is not made.

    Attributes:
        begun: number of early updates so far, in all steps.
        withdrawn: how many of them were undone.
    """

    def __init__(self, gradients: GradientLeases, *, are_final: bool = False) -> None:
        self.are_final = are_final
        self.begun = 0
        self.withdrawn = 0
        self._leases = gradients
        self._of_group: dict[str, EarlyUpdate] = {}

    def begin(
        self,
        step: int,
        update: GroupUpdate,
        table: Sequence[HyperParameters],
        rows: Sequence[HyperParameters | None],
    ) -> None:
        """Have the store begin with a group's update, without waiting for its answer.

        Args:
            table: the different hyper-parameters of the step. `update` gives each shard an index of this list.
            rows: the hyper-parameters of each shard of the group; None: the update does not change the shard.
        """
        accepted = self._leases.start_updates(step, list(table), [update], final=self.are_final)
        self._of_group[update.group] = EarlyUpdate(step=step, update=update, rows=rows, accepted=accepted)
        self.begun += 1

    def find(self, group: str) -> EarlyUpdate | None:
        """Return the early update of a group in this step, if there is one that the store has taken."""
        early = self._of_group.get(group)
        if early is None or early.accepted.wait():
            return early
        self.remove(group)
        return None

    def gradient_of(self, group: str) -> LeasedBytes | None:
        """Return the gradient that the group's early update began with, or None if there is no early update."""
        early = self._of_group.get(group)
        return None if early is None else early.update.gradient

    def note_parked(self, group: str, parked: LeasedBytes) -> None:
        """Take note that the gradient of the group, which may have an early update, is in `parked` from now on."""
        if (early := self._of_group.get(group)) is not None:
            self._of_group[group] = replace(early, update=replace(early.update, gradient=parked))

    def remove(self, group: str) -> None:
        """Forget the group's early update, because a step has taken it over or its gradient is freed. Idempotent."""
        self._of_group.pop(group, None)

    def require_revisable(self, change: str, group: str | None = None) -> None:
        """Raise PhaseError if an early update would have to be made again, and updates are final (`are_final`).

        Args:
            change: the change because of which the update would have to be made again, as the beginning of the error.
            group: the flat group that changes; None: all of them.
        """
        if self.are_final and (self._of_group if group is None else group in self._of_group):
            raise PhaseError(f"{change}, but {_PROMISE}")

    def require_kept(self, use: str) -> None:
        """Raise PhaseError, on all ranks alike, if the store may have freed gradients whose update is done.

        Args:
            use: the use of a gradient for which the store must still have the gradient, as the beginning of a sentence.
        """
        if self.are_final:
            raise PhaseError(f"{use}, but {_PROMISE}")

    def withdraw(self, group: str) -> None:
        """Have the store undo the group's early update, if there is one, because its gradient or its rule changes."""
        early = self._of_group.get(group)
        if early is not None:
            self.undo(early)
            self.remove(group)

    def withdraw_all(self) -> None:
        """Have the store undo all early updates, because the states that they are computed from change."""
        for group in list(self._of_group):
            self.withdraw(group)

    def undo(self, early: EarlyUpdate) -> None:
        """Have the store undo an early update. The rank keeps the lease on the gradient, so it can update again."""
        if early.accepted.wait():
            self._leases.withdraw_updates(early.step, [early.update.group])
        self.withdrawn += 1
