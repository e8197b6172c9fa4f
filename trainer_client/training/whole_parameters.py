"""Whole parameters: a user has them within a context (`gathered`), in which one rank may change them.

This module owns these contexts, and which of them show a tiled parameter as a whole. It must never commit: the changed
values become a part of the next commit, which the engine makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from paramserver.contract.kinds import MASTER, PARAM, Kind
from trainer_client.errors import InPlaceChangeError
from trainer_client.training.access import Place, Places, StateAccess, StateChange, joined, split
from trainer_client.training.model.states import GroupStates
from trainer_client.training.model.units import Unit
from trainer_client.training.model.whole import hide_whole, show_whole
from trainer_client.training.ranks.collectives import Collectives


class WholeParameters:
    """Makes parameters of one engine whole within contexts, and hands over what a rank changes in them there.

    Args:
        units: the units of the model.
        access: has the places of the parameters, and hands changed states over to the store.
        collectives: the collectives of this rank.
    """

    def __init__(self, units: Sequence[Unit], access: StateAccess, collectives: Collectives) -> None:
        self._units = units
        self._access = access
        self._collectives = collectives
        # The number of open contexts of `gathered` that show a tiled parameter as a whole, by the id of its tensor. The
        # last of these contexts hides the whole again.
        self._shown: Counter[int] = Counter()

    @contextmanager
    def gathered(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Make parameters whole within the context, together with all other parameters of their units.

        All ranks must call this.
        """
        chosen = list(parameters)
        with ExitStack() as held:
            for unit in self._units_of(chosen):
                unit.hold()
                held.callback(unit.release_hold)
            for tensor in {id(tensor): tensor for tensor in chosen}.values():
                if (places := self._access.places_of(tensor))[0].parameter.tile_of is not None:
                    held.enter_context(self._showing(places))
            yield

    @contextmanager
    def _showing(self, places: Places) -> Iterator[None]:
        """Give a tiled parameter memory with all its values within the context, copied from its gathered tiles."""
        whole = places[0].parameter.whole
        if not self._shown[id(whole.tensor)]:
            show_whole(whole, torch.cat([place.parameter.tensor.detach() for place in places]))
        self._shown[id(whole.tensor)] += 1
        try:
            yield
        finally:
            self._shown[id(whole.tensor)] -= 1
            if not self._shown[id(whole.tensor)]:
                group = places[0].state.group
                hide_whole(whole, group.dtype, group.device)

    def require_unchanged(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check that the script has not changed parameters that were gathered for reading. Call this within `gathered`.

        There is nothing to check for parameters that are always whole on this rank, because a change of them counts.
        If a context around this one holds a unit as well, the end of that context checks the unit.

        Raises:
            InPlaceChangeError: a parameter was changed, and the change would be lost.
        """
        chosen = list(parameters)
        for unit in self._units_of(chosen):
            if unit.is_held_once:
                if (changed := unit.find_changed()) is not None:
                    raise InPlaceChangeError(changed.fqn)
                unit.require_undoubted()
        for tensor in chosen:
            places = self._access.places_of(tensor)
            if places[0].parameter.tile_of is not None and self._shown[id(tensor)] == 1:
                tiles = torch.cat([place.parameter.tensor.detach().reshape(-1) for place in places])
                if not torch.equal(tensor.detach().reshape(-1).view(torch.uint8), tiles.view(torch.uint8)):
                    raise InPlaceChangeError(places[0].parameter.fqn)

    @property
    def is_holding(self) -> bool:
        """Whether a context of `gathered` is open."""
        return any(unit.is_held for unit in self._units)

    def parameters_before(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of each parameter before a change, so that `hand_over_changed` can compare."""
        reader = _StateReader()
        return [
            joined([reader.part(place, PARAM) for place in self._access.places_of(tensor)]) for tensor in parameters
        ]

    @torch.no_grad()
    def hand_over_changed(
        self, parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor], modifier_rank: int, step: int
    ) -> None:
        """Hand over, on all ranks, the values that `modifier_rank` has written into whole parameters within `gathered`.

        All ranks must call this. The fp32 master weight of an element that was not changed stays as it is.

        Args:
            before: the result of `parameters_before`, called before the change.
        """
        changes = []
        masters = _StateReader()
        for tensor, old in zip(parameters, before, strict=True):
            places = self._access.places_of(tensor)
            whole = tensor.detach().contiguous()
            self._collectives.broadcast(whole, source=modifier_rank)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)
            for place, before_part in zip(places, split(old, places), strict=True):
                if place.parameter.tile_of is not None:
                    # A tile of a changed parameter gets the parameter's new rows, too, because it stays gathered if an
                    # outer context of `gathered` holds it.
                    rows = whole.reshape(-1)[place.parameter.first :][: place.parameter.shape.numel()]
                    place.parameter.tensor.detach().copy_(rows.view(place.parameter.shape))
                new = whole.reshape(-1)[place.part].cpu()
                changes.append(StateChange(place=place, kind=PARAM, values=new))
                if place.state.group.has_master:
                    master = torch.where(new == before_part, masters.part(place, MASTER), new.float())
                    changes.append(StateChange(place=place, kind=MASTER, values=master))
        self._access.hand_over(changes, step)
        for unit in self._units_of(parameters):
            # An outer context of `gathered` checks its units for changes by the script when it ends. It must not refuse
            # the change of this context, so each unit notes the new values as known.
            unit.note_values()

    def _units_of(self, parameters: Iterable[torch.Tensor]) -> list[Unit]:
        """Return the units of the parameters in the model's order, which is the same on every rank."""
        groups = {id(place.state.group) for tensor in parameters for place in self._access.places_of(tensor)}
        return [unit for unit in self._units if any(id(group) in groups for group in unit.groups)]


class _StateReader:
    """Reads this rank's parts of parameters from their flat groups, and keeps the partition that was read last.

    Parameters of one flat group mostly come one after the other, so the group's partition is read once for them all.
    """

    def __init__(self) -> None:
        self._state: GroupStates | None = None
        self._partition = torch.empty(0)

    def part(self, place: Place, kind: Kind) -> torch.Tensor:
        """Return this rank's part [n] of one kind of a parameter.

        The kind must be the same in all calls, because the reader does not note of which kind its partition is.
        """
        if self._state is not place.state:
            self._state, self._partition = place.state, place.state.read(kind)
        return self._partition[place.range].clone()
