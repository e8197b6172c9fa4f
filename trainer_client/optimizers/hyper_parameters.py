"""Parameter groups as rows of hyper-parameters, which go to the store with the gradients of each step.

Must never change a group: they are the user's, and the schedulers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.errors import ConfigError
from trainer_client.optimizers.torch_optimizer import ParameterGroup, TorchOptimizer

# They change what an update computes. (`foreach` and `fused` choose a kernel; the store's is the fused one.)
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


def check_settings(optimizer: TorchOptimizer, number: int, group: ParameterGroup) -> None:
    """Raises ConfigError for settings of a group that the store's kernels do not have."""
    if flags := [flag for flag in _REFUSED_FLAGS if group.get(flag)]:
        raise ConfigError(f"{flags[0]}=True of parameter group {number} is not honoured by this version: remove it")
    if problem := optimizer.find_problem(group):
        raise ConfigError(f"parameter group {number} {problem}")


class HyperParameterTable:
    """The distinct rows of a step; most parameters of a model share one.

    Args:
        group_of: the group of each parameter (index in the model) that has one.
        make_row: from the number of a group and an update count.
        update_counts: of each parameter of the model, with the update under way.
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
        """The index of the parameter's row; -1 if it is in no group, and stays as it is."""
        group = self._group_of.get(parameter)
        if group is None:
            return -1
        count = self._update_counts[parameter]
        number = self._known.setdefault((group, count), len(self.rows))
        if number == len(self.rows):
            self.rows.append(self._make_row(group, count))
        return number
