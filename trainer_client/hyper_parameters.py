"""The hyper-parameters of one step as the wire has them: distinct rows, and which parameter uses which."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paramserver.v1 import parameter_store_pb2 as pb

HyperParameters = pb.ApplyGradientsRequest.HyperParameters


class HyperParameterTable:
    """The distinct hyper-parameters of a step; most parameters of a model share one row.

    Args:
        lookup: from (index of the parameter in the model, its update count) to its hyper-parameters.
        update_counts: by parameter, this step included.
    """

    def __init__(self, lookup: Callable[[int, int], HyperParameters], update_counts: Sequence[int]) -> None:
        self.rows: list[HyperParameters] = []
        self._lookup = lookup
        self._update_counts = update_counts
        self._known: dict[bytes, int] = {}

    def row_of(self, parameter: int) -> int:
        row = self._lookup(parameter, self._update_counts[parameter])
        number = self._known.setdefault(row.SerializeToString(deterministic=True), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number
