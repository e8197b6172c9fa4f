"""Layers whose forward is replaced by one that computes with the tiles of their weight, one after the other.

This module owns which layers can do so, and how. It must never gather: the hooks on the tiles do.

[Note: rounding] The rows of a Linear's weight are output features. So the outputs are those of the untiled layer, up to
the order of additions, which may differ in a matrix product of another shape. The gradient of a Linear's input is a sum
over tiles, and each summand is rounded to the dtype of the computation. The rows of the weight of a Conv1D (of
transformers) are input features. So the output of a Conv1D is a sum over tiles, which is added up in fp32 and rounded
once. An Embedding copies rows, so its output and its gradient are bit-identical to those of the untiled layer.
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

# The name of the attribute in which a module keeps the TiledLayer with whose tiles it computes.
_LAYER = "_paramserver_tiled"

# The forward of a module that computes with tiles of its weight. Its argument has the same name as in the forward of
# the module's class, so callers may pass it by name.
Forward = Callable[..., torch.Tensor]


class TiledLayer:
    """A module of the model whose weight, the parameter `fqn`, is in tiles.

    Attributes:
        module: the module. Its other parameters, such as the bias, stay in the unit around the module.
        tiles: the module's uses of the tiles, in the order of the rows.
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
        """Whether a use of the layer now computes with the whole weight, because a context of `gathered` is open.

        A script may have changed the whole weight in the context, and the tiles get its values only at the end of the
        context. But a use that trains computes with the tiles, because the gradients go to the tiles.
        """
        return not isinstance(self._whole, ReleasedParameter) and not torch.is_grad_enabled()

    def used_tiles(self) -> Sequence[Tile]:
        """Return the tiles for a forward. A tile requires a gradient if the whole parameter does.

        Raises:
            TiledParameterError: the layer would train within a transform of torch.func, which refuses the tiles'
                leaves.
        """
        if self._whole.requires_grad and torch.is_grad_enabled() and is_transformed():
            raise TiledParameterError(self._fqn, "a transform of torch.func")
        for tile in self.tiles:
            if tile.weight.parameter.requires_grad is not self._whole.requires_grad:
                # torch refuses `requires_grad_` within a transform of torch.func, so the transform is left for this
                # call.
                with outside_of_transforms():
                    tile.weight.parameter.requires_grad_(self._whole.requires_grad)
        return self.tiles

    def install(self) -> None:
        """Replace the module's forward by one that computes with the tiles of its weight, until `remove`."""
        tiled, whole = _FORWARDS[_kind_of(self.module)](self), self.module.forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            output: torch.Tensor = (whole if self.computes_whole else tiled)(*args, **kwargs)
            return output

        # The new forward is an attribute of the module itself, where nn.Module finds it before the forward of the
        # class. So the class, and other modules of the class, stay as they are.
        self.module.forward = StandIn(whole, forward)
        vars(self.module)[_LAYER] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        vars(self.module).pop("forward", None)
        vars(self.module).pop(_LAYER, None)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return None, so that a copy of the module has no tiles. It computes with a whole weight of its own."""


def tiled_layer_of(module: nn.Module) -> TiledLayer | None:
    """Return the TiledLayer with whose tiles a module computes; None if the module's weight is not cut into tiles."""
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
    """Refuse indices outside of [0, rows), as torch's own embedding does.

    On the CPU the check is made at once. On an accelerator it is queued on the stream, and fails there with the
    device's own error.

    Raises:
        IndexError: an index on the CPU is out of range. The error has the text `message`.
    """
    are_inside = ((indices >= 0) & (indices < rows)).all()
    if indices.device.type != "cpu":
        torch._assert_async(are_inside)
    elif not are_inside:
        raise IndexError(message)


def _kind_of(module: nn.Module) -> str | None:
    """Return the name of the class whose forward the module has; None if that forward cannot compute with tiles."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "Linear"
    if forward is nn.Embedding.forward:
        return "Embedding"
    # transformers may not be installed, so this function does not import it to find the class Conv1D. If a module is of
    # this class, Python has imported the class's Python module already.
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
            # In the output of the first tile, the row of each index that belongs to another tile is wrong. The row from
            # the index's own tile replaces it, so the gradient of the wrong row is zero.
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
