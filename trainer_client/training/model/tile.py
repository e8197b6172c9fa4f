"""Tiles: rows of a parameter that is too large to be gathered as a whole, each row range a unit of its own.

This module owns the tensor of each tile, and hands its gradients to the engine. It must never know what a layer
computes: tiled_layers.py does.

[Note: tiles] A parameter of more than `paramserver.tiling.largest_tile` bytes is cut into ranges of rows. The parameter
keeps its name. Its object in the model keeps its shape, and has no values. Each tile is a tensor that the model does
not list, in a flat group and a unit of its own. The shards of a tile have the name of the whole parameter and their
place in it, so the store, its exports and other layouts see the parameter and no tiles. The module that has the
parameter computes with one tile after the other, so the hooks gather and release the tiles one after the other, as they
do with blocks.

[Note: the end of a tile's backward] The hooks know that the backward of a unit is over when the gradients of the unit's
inputs are there. All tiles of a layer have the same input, whose gradient is there only when the last tile has added
its part. So each tile gets its own views of its inputs (`Tile.use`). Autograd runs the nodes that were made last first.
So the gradient of such a view comes after that of the tile's weight, and before autograd begins with the next tile. A
tile whose inputs require no gradient, as those of an embedding, gets an empty input that requires one.

[Note: the leaf of each use] Autograd adds up the gradients of all uses of a leaf, and hands the sum over when the last
gradient has come. For a weight that the head shares with the embedding, the last gradient is that of the embedding, at
the end of the backward pass. Until then the whole gradient of the head would stay in memory. So each use of a tile has
a leaf of its own, which shares the tile's memory, and the gradient of each use goes to the engine at once.

[Note: the gradient of the whole parameter] Within `gathered` a script may compute with the whole parameter. Autograd
then adds the gradients of these uses to the whole parameter's `.grad`. Each tile gets its rows of this gradient, so
that the script trains as it does without tiles.
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
        on_gradient: called with `parameter` when a gradient is in its `.grad`; None: the gradient stays in `.grad`.
    """

    def __init__(self, whole: nn.Parameter, first_row: int, last_row: int) -> None:
        shape = (last_row - first_row, *whole.shape[1:])
        # The tiles of a parameter on the meta device are on the CPU, because the parameter gets its initial values
        # there.
        device = torch.device("cpu") if whole.is_meta else whole.device
        nan = torch.full((), torch.nan, dtype=whole.dtype, device=device)
        self.first_row = first_row
        self.last_row = last_row
        self.parameter = nn.Parameter(nan.expand(shape), requires_grad=whole.requires_grad)
        self.on_gradient: Callable[[torch.Tensor], None] | None = None

    @property
    def rows(self) -> slice:
        """The slice [first_row, last_row), which selects the tile from the parameter."""
        return slice(self.first_row, self.last_row)

    def take(self, gradient: torch.Tensor) -> None:
        """Add a gradient of these rows to the tile's `.grad`, and hand that to the engine, if `on_gradient` is set."""
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
        TiledParameterError: the context of `gathered` has ended, so the gradient may belong to values that have been
            replaced.
    """
    gradient, whole.grad = whole.grad, None
    assert gradient is not None, "autograd has just accumulated it"
    if isinstance(whole, ReleasedParameter):
        raise TiledParameterError(fqn, "a backward pass outside of engine.gathered(...)")
    for tile in tiles:
        tile.take(gradient[tile.rows])


class Tile(nn.Module):
    """One use of a tile by a layer, as a module of its own, so that the hooks of units can be registered on it.

    It is not in the list of the model's modules.

    Attributes:
        weight: the tile. All layers that share a tied weight share the tile, too.
    """

    def __init__(self, weight: TileWeight) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, compute: Callable[..., torch.Tensor], token: torch.Tensor | None, *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `compute(weight, *inputs)`. `use` calls this, and the hooks of the tile's unit run around it.

        Args:
            compute: a function of torch tensors.
            token: an empty tensor that requires a gradient; None: one of `inputs` requires a gradient.
            inputs: the arguments of `compute` after the weight.
        """
        output = compute(self.weight.leaf(), *inputs)
        return output if token is None else _Follow.apply(output, token)  # type: ignore[no-untyped-call]

    def use(self, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor | None) -> torch.Tensor:
        """Return `compute(weight, *inputs)` by a call of this module; see [Note: the end of a tile's backward].

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
    """The autograd function that returns its first argument, and gives its second one, the token, an empty gradient.

    The hooks know by the gradient of the token that the tile's backward is over.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, output: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_empty(0)
