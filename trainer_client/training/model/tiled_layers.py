"""Layers that compute with the tiles of their weight, one after the other, in place of their forward.

This module owns which layers can do so, and how. It must never gather: the hooks on the tiles do.

[Note: rounding] The rows of a Linear's weight are output features, so its outputs are those of the untiled layer but
for the order in which a matrix product of another shape adds up. The gradient of its input is a sum over tiles, each
rounded to the dtype of the computation. The rows of a Conv1D's weight (of transformers) are input features, so there
the output is a sum over tiles, in fp32, and rounded once. An Embedding copies, so its output and its gradient have the
bits of the untiled layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainer_client.errors import TiledParameterError
from trainer_client.training.model import cast_product
from trainer_client.training.model.released import ReleasedParameter
from trainer_client.training.model.stand_in import StandIn
from trainer_client.training.model.tile import Tile, TileWeight
from trainer_client.training.model.transforms import is_transformed, outside_of_transforms

# The attribute of a module that computes with tiles.
_LAYER = "_paramserver_tiled"

# A forward in tiles, whose argument has the name that it has in the class.
Forward = Callable[..., torch.Tensor]


class TiledLayer:
    """A module of the model whose weight, the parameter `fqn`, is in tiles.

    Attributes:
        module: the module. Its other parameters, as the bias, stay in the unit around it.
        tiles: its uses of the tiles, in the order of the rows.
    """

    def __init__(self, module: nn.Module, fqn: str, weights: Sequence[TileWeight]) -> None:
        self.module = module
        self.tiles = tuple(Tile(weight) for weight in weights)
        self._fqn = fqn
        self._whole: nn.Parameter = module.weight  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def computes_whole(self) -> bool:
        """Whether a use of the layer now computes with the whole weight, because `gathered` shows it.

        The whole weight may have been changed since it was shown, and it becomes the tiles' afterwards. Gradients are
        those of the tiles, so a use that trains computes with them.
        """
        return not isinstance(self._whole, ReleasedParameter) and not torch.is_grad_enabled()

    def used_tiles(self) -> Sequence[Tile]:
        """Return the tiles for a forward, which train if the parameter does.

        Raises:
            TiledParameterError: they would train within a transform of torch.func, which refuses their leaves.
        """
        if self._whole.requires_grad and torch.is_grad_enabled() and is_transformed():
            raise TiledParameterError(self._fqn, "a transform of torch.func")
        for tile in self.tiles:
            if tile.weight.parameter.requires_grad is not self._whole.requires_grad:
                # torch refuses this call within a transform.
                with outside_of_transforms():
                    tile.weight.parameter.requires_grad_(self._whole.requires_grad)
        return self.tiles

    def install(self) -> None:
        """Have the module compute with its tiles, until `remove`."""
        tiled, whole = _FORWARDS[_kind_of(self.module)](self), self.module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = (whole if self.computes_whole else tiled)(*args, **kwargs)
            return output

        # nn.Module finds its forward as an attribute of the object, so the class stays as it is.
        self.module.forward = StandIn(whole, forward)
        vars(self.module)[_LAYER] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        vars(self.module).pop("forward", None)
        vars(self.module).pop(_LAYER, None)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return None, because a copy of the module computes with a whole weight of its own."""


def tiled_layer_of(module: nn.Module) -> TiledLayer | None:
    """Return the tiles that a module computes with now; None if it computes with its whole weight."""
    layer: TiledLayer | None = vars(module).get(_LAYER)
    return None if layer is None or layer.computes_whole else layer


def why_not(module: nn.Module, name: str) -> str | None:
    """Return why a module cannot compute with tiles of its parameter `name`; None if it can."""
    kind = _kind_of(module)
    if kind is None:
        return f"a {type(module).__name__} has a forward of its own"
    if name != "weight":
        return f"it is the {name} of a {type(module).__name__}"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "a MultiheadAttention computes with it"
    if "forward" in vars(module):
        return f"the forward of this {type(module).__name__} was replaced"
    if isinstance(module, nn.Embedding):
        for option, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(module, option) != plain:
                return f"the Embedding has {option}"
    return None


def check_range(indices: torch.Tensor, rows: int, message: str) -> None:
    """Refuse indices of no row, as torch's own embedding does: on the CPU at once, elsewhere in stream order.

    Raises:
        IndexError: an index on the CPU is out of range. It has the message.
    """
    are_inside = ((indices >= 0) & (indices < rows)).all()
    if indices.device.type != "cpu":
        torch._assert_async(are_inside)
    elif not are_inside:
        raise IndexError(message)


def _kind_of(module: nn.Module) -> str | None:
    """Return the name of the class whose forward the module has, if that can be tiled."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "Linear"
    if forward is nn.Embedding.forward:
        return "Embedding"
    # transformers need not be installed, and if a module is of this class, its Python module is imported.
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return "Conv1D" if conv1d is not None and forward is conv1d.forward else None


def _linear(layer: TiledLayer) -> Forward:
    def forward(input: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = layer.module.bias  # type: ignore[assignment]
        cast = cast_product.cast_of(input, layer.dtype)
        return torch.cat(
            [
                tile.use(_apply_linear, input, cast, None if bias is None else bias[tile.weight.rows])
                for tile in layer.used_tiles()
            ],
            dim=-1,
        )

    return forward


def _apply_linear(
    weight: torch.Tensor, input: torch.Tensor, cast: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    return functional.linear(input, weight, bias) if cast is None else cast_product.linear(input, cast, weight, bias)


def _conv1d(layer: TiledLayer) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = x.split([tile.weight.last_row - tile.weight.first_row for tile in layer.tiles], dim=-1)
        total: torch.Tensor | None = None
        dtype = x.dtype
        for tile, part in zip(layer.used_tiles(), parts, strict=True):
            product = tile.use(_apply_conv1d, part, cast_product.cast_of(part, layer.dtype))
            dtype = product.dtype
            total = product.float() if total is None else total + product.float()
        assert total is not None, "a tiled weight has several tiles"
        bias: torch.Tensor = layer.module.bias  # type: ignore[assignment]
        return (total + bias.float()).to(dtype)

    return forward


def _apply_conv1d(weight: torch.Tensor, input: torch.Tensor, cast: torch.Tensor | None) -> torch.Tensor:
    return torch.matmul(input, weight) if cast is None else cast_product.linear(input, cast, weight.t())


def _embedding(layer: TiledLayer) -> Forward:
    def forward(input: torch.Tensor) -> torch.Tensor:
        tiles = layer.used_tiles()
        size = tiles[-1].weight.last_row
        check_range(input, size, f"index out of range in self: an Embedding has {size} rows")
        padding: int | None = layer.module.padding_idx  # type: ignore[assignment]
        output: torch.Tensor | None = None
        for tile in tiles:
            weight = tile.weight
            is_inside = (input >= weight.first_row) & (input < weight.last_row)
            local = torch.where(is_inside, input - weight.first_row, 0)
            in_tile = padding is not None and weight.first_row <= padding < weight.last_row
            local_padding = padding - weight.first_row if in_tile and padding is not None else None
            rows = tile.use(partial(_look_up, padding=local_padding), local)
            # The first tile gives a wrong row for each index of another tile. That tile's own row replaces it here, and
            # so the gradient of the wrong row is zero.
            output = rows if output is None else torch.where(is_inside.unsqueeze(-1), rows, output)
        assert output is not None, "a tiled weight has several tiles"
        return output

    return forward


def _look_up(weight: torch.Tensor, input: torch.Tensor, *, padding: int | None) -> torch.Tensor:
    return functional.embedding(input, weight, padding)


_FORWARDS: dict[str | None, Callable[[TiledLayer], Forward]] = {
    "Linear": _linear,
    "Conv1D": _conv1d,
    "Embedding": _embedding,
}
