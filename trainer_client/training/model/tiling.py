"""Which parameters of a model are cut into tiles, and where; see tile.py [Note: tiles].

This module owns the choice, and the layers that compute with tiles. It must never gather or touch values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from paramserver.contract.sizes import shown_size
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.training.model.causal_loss import CausalLoss
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.reduction_dtypes import MARK, marked_dtype
from trainer_client.training.model.tile import TileWeight
from trainer_client.training.model.tiled_layers import TiledLayer, why_not
from trainer_client.training.model.unit_policy import UnitSpec

log = logging.getLogger(__name__)

# If the size of tiles is `auto`, a tile has at most 1 / AUTO_SHARE of the host budget. So the tiles that a rank has
# leased, the tiles that are fetched ahead, the optimizer's buffers and the other units fit into the budget together.
AUTO_SHARE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledParameter:
    """A parameter that is cut into tiles.

    Attributes:
        parameter: the whole parameter.
        weights: the parameter's tiles, in the order of their rows.
        layers: the modules of the model that compute with the parameter; several for a tied weight.
    """

    parameter: ModelParameter
    weights: tuple[TileWeight, ...]
    layers: tuple[TiledLayer, ...]

    def units(self) -> Iterator[UnitSpec]:
        """Yield a unit for each tile of the parameter, so that each tile is gathered and released by itself."""
        whole = self.parameter
        row = whole.shape[1:].numel()
        for number, weight in enumerate(self.weights):
            tile = ModelParameter(
                index=whole.index,
                fqn=whole.fqn,
                tensor=weight.parameter,
                shape=weight.parameter.shape,
                first=weight.first_row * row,
                tile_of=whole,
            )
            uses = tuple(layer.tiles[number] for layer in self.layers)
            yield UnitSpec(
                fqn=f"{whole.fqn}[{weight.first_row}:{weight.last_row}]",
                module=uses[0],
                parameters=(tile,),
                tile=weight,
                other_uses=uses[1:],
            )


class Tiling:
    """The tiles of one model: which parameters are cut, and the layers that compute with the tiles.

    Attributes:
        parameters: the parameters that are cut into tiles.
    """

    def __init__(self, parameters: Iterable[TiledParameter] = ()) -> None:
        self.parameters = tuple(parameters)
        self._loss: CausalLoss | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        parameters: Sequence[ModelParameter],
        config: TrainingConfig,
        dtype_of: Callable[[ModelParameter], torch.dtype],
        *,
        host_bytes: int,
        is_loud: bool,
    ) -> Tiling:
        """Return a Tiling with the tiles of those of `parameters` that the config asks to cut.

        Args:
            dtype_of: returns the dtype in which the model computes with a parameter.
            host_bytes: the smallest host budget among the stores of the run. It gives the largest tile with `auto`.
            is_loud: whether a warning is logged about large parameters that stay whole.

        Raises:
            ConfigError: the config asks for tiles, and all parameters stay whole, because its stage is below 3.
        """
        section = config.paramserver.tiling
        if section.largest_tile is None:
            return cls()
        if config.zero_optimization.stage < 3:
            raise ConfigError(
                "paramserver.tiling.largest_tile cuts layers that are gathered for their use, and at "
                f"zero_optimization.stage {config.zero_optimization.stage} all parameters stay whole: set the stage to "
                "3, or largest_tile to null"
            )
        largest = host_bytes // AUTO_SHARE if section.largest_tile == "auto" else int(section.largest_tile)
        users: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, tensor in module.named_parameters(recurse=False):
                users.setdefault(id(tensor), []).append((module, name))
        tiled, stay = [], []
        for parameter in parameters:
            row_bytes = parameter.shape[1:].numel() * dtype_of(parameter).itemsize
            if len(parameter.shape) < 2 or parameter.shape[0] * row_bytes <= largest:
                continue
            reason = _why_whole(parameter, users[id(parameter.tensor)], section.exclude)
            bounds = cut_rows(parameter.shape[0], parameter.shape[1:].numel(), largest // row_bytes)
            if reason is None and len(bounds) > 1:
                tiled.append(_tiled(parameter, [module for module, _ in users[id(parameter.tensor)]], bounds))
            elif reason is not None:
                stay.append(f"{parameter.fqn} ({shown_size(parameter.shape[0] * row_bytes)}: {reason})")
        if stay and is_loud:
            log.warning(
                "larger than paramserver.tiling.largest_tile (%s), and gathered as a whole nevertheless: %s",
                shown_size(largest),
                "; ".join(stay),
            )
        return cls(tiled)

    def cut(self, specs: Iterable[UnitSpec]) -> list[UnitSpec]:
        """Return the units, without tiled parameters, each followed by a unit for each tile of its tiled parameters."""
        tiled = {each.parameter.index: each for each in self.parameters}
        units: list[UnitSpec] = []
        for spec in specs:
            kept = tuple(parameter for parameter in spec.parameters if parameter.index not in tiled)
            units.append(UnitSpec(fqn=spec.fqn, module=spec.module, parameters=kept))
            for parameter in spec.parameters:
                if parameter.index in tiled:
                    units += tiled[parameter.index].units()
        return units

    def install(self, model: nn.Module, loss_tokens: int | None) -> None:
        """Have the layers compute with tiles, and the loss in chunks of `loss_tokens` tokens, until `remove`.

        Raises:
            ConfigError: the loss of this model cannot be computed in chunks.
        """
        for tiled in self.parameters:
            for layer in tiled.layers:
                layer.install()
        if loss_tokens is not None:
            self._loss = CausalLoss(model, loss_tokens)

    def remove(self) -> None:
        """Give the layers their own forwards back, and the model its own loss."""
        if self._loss is not None:
            self._loss.remove()
            self._loss = None
        for tiled in self.parameters:
            for layer in tiled.layers:
                layer.remove()


def cut_rows(rows: int, row_numel: int, most_rows: int) -> list[tuple[int, int]]:
    """Return the bounds [first, last) of tiles of about equal size.

    Each tile but the last has a multiple of ELEMENT_ALIGNMENT elements, because shards are cut there.

        cut_rows(10, row_numel=16, most_rows=4) == [(0, 4), (4, 8), (8, 10)]

    Args:
        row_numel: the elements of a row.
        most_rows: the most rows of a tile. A tile has more rows only if it needs them for such a multiple.
    """
    quantum = ELEMENT_ALIGNMENT // math.gcd(row_numel, ELEMENT_ALIGNMENT)
    tiles = -(-rows // max(most_rows // quantum * quantum, quantum))
    size = -(-rows // tiles // quantum) * quantum
    return [(first, min(first + size, rows)) for first in range(0, rows, size)]


def _why_whole(parameter: ModelParameter, users: Iterable[tuple[nn.Module, str]], exclude: Iterable[str]) -> str | None:
    """Return why a parameter cannot or must not be cut into tiles; None if it can be cut."""
    if any(fnmatchcase(parameter.fqn, pattern) for pattern in exclude):
        return "excluded"
    if parameter.tensor._backward_hooks or parameter.tensor._post_accumulate_grad_hooks:
        return "it has hooks on its gradient"
    return next((reason for module, name in users if (reason := why_not(module, name)) is not None), None)


def _tiled(
    parameter: ModelParameter, modules: Iterable[nn.Module], bounds: Iterable[tuple[int, int]]
) -> TiledParameter:
    weights = tuple(TileWeight(parameter.tensor, first, last) for first, last in bounds)
    if (dtype := marked_dtype(parameter.tensor)) is not None:
        for weight in weights:
            setattr(weight.parameter, MARK, dtype)
    return TiledParameter(
        parameter=parameter,
        weights=weights,
        layers=tuple(TiledLayer(module, parameter.fqn, weights) for module in modules),
    )
