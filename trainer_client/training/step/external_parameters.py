"""Which units own the external parameters of which units, as far as is known.

This module owns what the user has registered and what was seen in the step under way. It must never gather a unit: the
hooks do.

[Note: external parameters] When a unit's forward hands torch a released parameter of another unit, that parameter is
external to the first unit. The other unit, its owner, is gathered at once, and held as long as the first unit's forward
needs it, and again as long as its backward does. A unit that returns its parameters, or views of them, to its caller is
held for the caller in the same way. The owners are remembered until the step ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torch import nn

from trainer_client.errors import ConfigError
from trainer_client.training.model.units import Unit


class ExternalParameters:
    """For each unit, the indices of the units that own its external parameters, so that the hooks gather these, too."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """Begin without known owners.

        Args:
            units: all units, the root first.
        """
        self._units = units
        self._seen: list[set[int]] = [set() for _ in units]
        self._registered: list[set[int]] = [set() for _ in units]

    def register(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Make the unit of `parameter` an owner for the unit of `module` from now on.

        Raises:
            ConfigError: the module or the parameter is not part of the model.
        """
        owner = next((u for u in self._units for group in u.groups if group.contains(parameter)), None)
        if owner is None:
            tiles = (tile for unit in self._units if unit.tile for group in unit.groups for tile in group.parameters)
            if (tile := next((tile for tile in tiles if tile.whole.tensor is parameter), None)) is not None:
                raise ConfigError(
                    f"parameter {tile.fqn} is never whole, because paramserver.tiling cuts it into tiles, so it cannot "
                    "be registered as an external parameter: add its name to paramserver.tiling.exclude"
                )
            raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} is not of this engine's model")
        # The list of units begins with the root, whose modules are all modules of the model. So the search for the unit
        # of a module begins at the end of the list.
        user_unit = next((u for u in reversed(self._units) if module in set(u.module.modules())), None)
        if user_unit is None:
            raise ConfigError(f"a {type(module).__name__} is not a module of this engine's model")
        if user_unit is not owner:
            self._registered[user_unit.index].add(owner.index)

    def note(self, user_unit: Unit, owners: Iterable[int]) -> None:
        """Take note that `user_unit` uses parameters of these owners in this step."""
        self._seen[user_unit.index].update(owners)

    def registered(self, user_unit: Unit) -> Set[int]:
        """Return the owners that the user has registered for a unit with `register`."""
        return self._registered[user_unit.index]

    def seen(self, user_unit: Unit) -> Set[int]:
        """Return the owners whose parameters the unit was seen to use in this step."""
        return self._seen[user_unit.index]

    def owners_of(self, user_unit: Unit) -> set[int]:
        """Return the owners that the user has registered for a unit, and those that the step has used so far."""
        return self._seen[user_unit.index] | self._registered[user_unit.index]

    def end_step(self) -> None:
        """Forget the owners that were seen in the step. Those that the user has registered stay."""
        for owners in self._seen:
            owners.clear()
