"""The conversion of parameter groups to rows of hyper-parameters, which go to the store with each step's gradients.

This module must never change a group, because the groups belong to the user and to torch's schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.errors import ConfigError
from trainer_client.optimizers.torch_optimizer import ParameterGroup, TorchOptimizer

# Flags of torch's optimizers that change what an update computes, so that they are refused. `foreach` and `fused` are
# not among them: they choose a kernel, and the store always runs the fused one.
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def check_settings(optimizer: TorchOptimizer, number: int, group: ParameterGroup) -> None:
    """Check the settings of parameter group `number`.

    Raises:
        ConfigError: the store's kernel for `optimizer` cannot compute with a setting of the group.
    """
    if flags := [flag for flag in _REFUSED_FLAGS if group.get(flag)]:
        raise ConfigError(f"{flags[0]}=True of parameter group {number} is not honoured by this version: remove it")
    if problem := optimizer.find_problem(group):
        raise ConfigError(f"parameter group {number} {problem}")


class HyperParameterTable:
    """The distinct sets of hyper-parameters (rows) of one step. Most parameters of a model share one row.

    A request to the store has the rows once, and names the row of each parameter by its index.

    Attributes:
        rows: the rows that `row_of` has made so far.

    Args:
        group_of: the number of the group of each parameter (index in the model) that is in a group.
        make_row: makes a row from the number of a group and an update count.
        update_counts: for each parameter of the model, the number of its updates, including the one under way.
    """

    def __init__(
        self,
        group_of: Mapping[int, int],
        make_row: Callable[[int, int], HyperParameters],
        update_counts: Sequence[int],
    ) -> None:
        self.rows: list[HyperParameters] = []
        self._group_of = group_of
        self._make_row = make_row
        self._update_counts = update_counts
        self._known: dict[tuple[int, int], int] = {}

    def row_of(self, parameter: int) -> int:
        """Return the index of the parameter's row in `rows`.

        Returns -1 for a parameter that is in no group, and so is not updated.
        """
        group = self._group_of.get(parameter)
        if group is None:
            return -1
        count = self._update_counts[parameter]
        number = self._known.setdefault((group, count), len(self.rows))
        if number == len(self.rows):
            self.rows.append(self._make_row(group, count))
        return number
