"""Changes that the script makes to parameters in place, where a rank always has them (stages 0 to 2).

torch's optimizers update the values that are in a parameter's memory, and so do updates here. A change that the script
has made to a parameter since the last step (a clamp, a mask, an average, a tensor that was assigned to `.data`) counts
in the next step: the change is found by its bytes, the ranks agree on it, it is put into the store, and then the update
is made. This module must never commit.

[Note: masters] Beside a parameter of 16 bits there is an fp32 master weight. An element of the parameter that is not
the rounded element of the master weight was changed, and becomes the master weight; all other elements keep their
master weight.

[Note: one change for all ranks] Each rank stores only its part of the parameters, so all ranks must make the same
change. Changes that differ between ranks are an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from trainer_client.errors import ConfigError
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.ranks.collectives import Collectives


class InPlaceChanges:
    """Finds the parameters of one engine that the script has changed in place since the last step.

    Args:
        states: the states of all groups.
    """

    def __init__(self, states: Sequence[PlacedStates], collectives: Collectives) -> None:
        self._states = [state for state in states if state.is_always_there]
        self._collectives = collectives

    def note(self) -> None:
        """Remember the parameters' bytes, to find later changes. Call this when control goes back to the script."""
        for state in self._states:
            state.note_parameters()

    def find_own(self) -> bool:
        """Return whether the script has changed parameters on this rank. It can raise ConfigError."""
        return any(self._changed())

    def find(self) -> list[PlacedStates]:
        """Return the states of the groups that the script has changed on any rank. All ranks must call this.

        Raises:
            ConfigError: the ranks have changed a parameter in different ways; on all ranks.
        """
        changed = self._changed()
        if changed and self._collectives.world_size > 1:
            changed = self._collectives.any_rank(changed, "a look at changed parameters")
        found = [state for state, is_changed in zip(self._states, changed, strict=True) if is_changed]
        if found and self._collectives.world_size > 1:
            self._require_agreement(found)
        return found

    def _changed(self) -> list[bool]:
        """Return for each group whose parameters are always on this rank whether the script has changed some here."""
        answers = [state.find_changes() for state in self._states]
        if on_device := [answer for answer in answers if isinstance(answer, torch.Tensor)]:
            told = iter(torch.stack(on_device).tolist())
            return [next(told) if isinstance(answer, torch.Tensor) else any(answer) for answer in answers]
        return [any(answer) for answer in answers]

    def _require_agreement(self, states: Sequence[PlacedStates]) -> None:
        """Raise ConfigError unless all ranks have the same values in these groups. All ranks must call this."""
        mine = [digest for state in states for digest in state.group.digests_of_each()]
        names = [parameter.fqn for state in states for parameter in state.group.parameters]
        of_ranks = [json.loads(each) for each in self._collectives.gather_bytes(json.dumps(mine).encode())]
        differing = [name for name, *digests in zip(names, *of_ranks, strict=True) if len(set(digests)) > 1]
        if differing:
            raise ConfigError(
                f"parameter {differing[0]} was changed in place, and has not the same values on all ranks: make the "
                "same change on each rank, or change it on one rank between two steps, within "
                f'`with engine.gathered([engine.module.get_parameter("{differing[0]}")], modifier_rank=0), '
                "torch.no_grad():`, which gives it to all"
            )
