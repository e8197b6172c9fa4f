"""An update that the store has begun with before the step is made; see updates.py [Note: early updates]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.transport.channel import Pending
from trainer_client.transport.rank_store import GroupUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyUpdate:
    """Attributes:
    step: that it is for.
    rows: the hyper-parameters of each shard; None for one that stays as it is.
    accepted: the store's word that it has taken the gradient; False: its daemon was restarted since.
    undo: has the store undo it.
    """

    step: int
    update: GroupUpdate
    rows: Sequence[HyperParameters | None]
    accepted: Pending[bool]
    undo: Callable[[EarlyUpdate], None]

    def withdraw(self) -> None:
        """Undoes it: the gradient may change again."""
        self.undo(self)

    def is_as(self, update: GroupUpdate, rows: Sequence[HyperParameters | None]) -> bool:
        """Whether it is what the step turned out to be."""
        same = self.update.scale == update.scale and self.update.clip_value == update.clip_value
        return same and self.rows == rows
