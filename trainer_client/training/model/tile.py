"""Tiles: rows of a parameter that is too large to be gathered as a whole, each row range a unit of its own.

This module owns the tensor of each tile and the way of its gradient. It must never know what a layer computes:
tiled_layers.py does.

[Note: tiles] A parameter of more than `paramserver.tiling.largest_tile` bytes is cut into ranges of rows. The parameter
keeps its name, and its object in the model keeps its shape and has no values. Each tile is a tensor that the model does
not list, in a flat group and a unit of its own; its shards are named by the whole parameter and their place in it, so
that the store, its exports and other layouts see the parameter and no tiles. The module that has the parameter computes
with one tile after the other, so that the hooks gather and release them one after the other, as they do with blocks.

[Note: the end of a tile's backward] The hooks know that the backward of a unit is over when the gradients of its inputs
are there. All tiles of a layer have the same input, whose gradient is there when the last tile has added its part. So
each tile gets views of its inputs of its own (`follow`). Autograd runs the nodes that were made last first, so the
gradient of such a view comes after those of the tile's weight, and before the backward of the tile before it begins. A
tile without an input that requires a gradient, as an embedding's, gets an empty one that does.

[Note: the leaf of each use] Autograd adds a leaf's gradients up and hands the sum over when the last one has come. For
a tied weight that is at the embedding, the end of the backward pass, and until then the whole gradient of the head
would stay in memory. So each use of a tile has a leaf of its own, which shares the tile's memory, and the gradient of
each use goes to the engine at once.

[Note: the gradient of the whole parameter] Within `gathered` a script may compute with the whole parameter, to which
autograd then adds the gradients of these uses. Each tile gets its rows of them, as it gets the gradient of any other
use, so that the script trains as it does without tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainer_client.errors import TiledParameterError
from trainer_client.training.model.released import ReleasedParameter


class TileWeight:
    """The rows [first_row, last_row) of a parameter, which has at least two dimensions.

    Attributes:
        parameter: the tensor of these rows. It is gathered and released as a parameter of the model is.
        on_gradient: called with `parameter` when a gradient of it is in its `.grad`; None: it stays there.
    """

    def __init__(self, whole: nn.Parameter, first_row: int, last_row: int) -> None:
        shape = (last_row - first_row, *whole.shape[1:])
        # A model on the meta device gets its values on the CPU.
        device = torch.device("cpu") if whole.is_meta else whole.device
        nan = torch.full((), torch.nan, dtype=whole.dtype, device=device)
        self.first_row = first_row
        self.last_row = last_row
        self.parameter = nn.Parameter(nan.expand(shape), requires_grad=whole.requires_grad)
        self.on_gradient: Callable[[torch.Tensor], None] | None = None

    @property
    def rows(self) -> slice:
        """The rows of the parameter that the tile has."""
        return slice(self.first_row, self.last_row)

    def take(self, gradient: torch.Tensor) -> None:
        """Hand a gradient of these rows to the engine; without one, add it to the `.grad` of the tile."""
        known = self.parameter.grad
        self.parameter.grad = gradient if known is None else known + gradient
        if self.on_gradient is not None:
            self.on_gradient(self.parameter)

    def leaf(self) -> torch.Tensor:
        """Return the tile as a tensor for one use; see [Note: the leaf of each use]. The tile has to be gathered."""
        if not (torch.is_grad_enabled() and self.parameter.requires_grad):
            return self.parameter
        leaf = self.parameter.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._take_from)
        return leaf

    def _take_from(self, leaf: torch.Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "autograd has just accumulated it"
        self.take(gradient)


def take_whole(fqn: str, tiles: Sequence[TileWeight], whole: torch.Tensor) -> None:
    """Hand the gradient of the whole parameter `fqn` to its tiles; see [Note: the gradient of the whole parameter].

    Raises:
        TiledParameterError: the parameter is not shown any more, so the gradient may be one of values that are gone.
    """
    gradient, whole.grad = whole.grad, None
    assert gradient is not None, "autograd has just accumulated it"
    if isinstance(whole, ReleasedParameter):
        raise TiledParameterError(fqn, "a backward pass outside of engine.gathered(...)")
    for tile in tiles:
        tile.take(gradient[tile.rows])


class Tile(nn.Module):
    """One use of a tile by a layer, as a module, so that the hooks surround it. It is no module of the model.

    Attributes:
        weight: the tile, which the layers of a tied weight share.
    """

    def __init__(self, weight: TileWeight) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, compute: Callable[..., torch.Tensor], token: torch.Tensor | None, *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `compute(weight, *inputs)`.

        Args:
            compute: a function of torch tensors.
            token: an empty tensor that requires a gradient; None: an input does.
            inputs: what `compute` gets besides the weight.
        """
        output = compute(self.weight.leaf(), *inputs)
        return output if token is None else _Follow.apply(output, token)  # type: ignore[no-untyped-call]

    def use(self, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor | None) -> torch.Tensor:
        """Call the module, so that the hooks notice the end of its backward; see [Note: the end of a tile's backward].

        All inputs that require a gradient have to be among `inputs`.
        """
        own = [_view(tensor) if tensor is not None and tensor.requires_grad else tensor for tensor in inputs]
        token = None
        trains = torch.is_grad_enabled() and self.weight.parameter.requires_grad
        if trains and not any(tensor is not None and tensor.requires_grad for tensor in own):
            device = next((tensor.device for tensor in own if tensor is not None), None)
            token = torch.empty(0, device=device, requires_grad=True).view(0)
        output: torch.Tensor = self(compute, token, *own)
        return output


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


class _Follow(torch.autograd.Function):
    """The identity of its first argument, by which the second one gets an empty gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, output: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_empty(0)
