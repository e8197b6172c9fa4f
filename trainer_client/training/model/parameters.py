"""The list of a model's parameters, and the note for autograd that their values have changed.

This module owns the rule which parameters the store can hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.errors import ConfigError

# torch.compile(module) returns a module that keeps the original module in the attribute of this name. A parameter with
# this name in its FQN is refused, because the model itself does not have that FQN.
_COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of the model, or a tile of one: some of its rows, which are a tensor of their own; see tile.py.

    Attributes:
        index: the number of the parameter in the model's order, frozen parameters included. A tile has the number of
            its parameter.
        fqn: the fully qualified name of the parameter, as in `named_parameters()`. A tile has the name of its
            parameter.
        tensor: the parameter itself, or the tensor of the tile. While it is released, it keeps its shape, but has no
            memory.
        shape: the shape of `tensor`.
        first: the first element of the tile in the flattened parameter; 0 for a parameter.
        tile_of: the parameter of which this is a tile; None if this is a whole parameter.
    """

    index: int
    fqn: str
    tensor: nn.Parameter
    shape: torch.Size
    first: int = 0
    tile_of: ModelParameter | None = None

    @property
    def whole(self) -> ModelParameter:
        """The parameter of which this is a tile, or this parameter itself."""
        return self.tile_of or self

    @property
    def is_last_tile(self) -> bool:
        """Whether this is a tile with the last row of its parameter."""
        return self.tile_of is not None and self.first + self.shape.numel() == self.tile_of.shape.numel()


def list_parameters(model: nn.Module) -> list[ModelParameter]:
    """Return the model's parameters in its order; a tied parameter appears once, with its first FQN.

    Raises:
        ConfigError: the store cannot hold a parameter, which the message names.
    """
    parameters = []
    for index, (fqn, tensor) in enumerate(model.named_parameters()):
        if _COMPILED in fqn.split("."):
            raise ConfigError(
                f"parameter {fqn} is one of a module that torch.compile(...) has returned, under a name that the model "
                "itself does not have, and the store would keep that name: pass the model itself to initialize(), and "
                "compile it in place, by engine.compile(), or by compile() of each block"
            )
        if not tensor.is_floating_point():
            raise ConfigError(f"parameter {fqn} has dtype {tensor.dtype}: only floating-point parameters are honoured")
        parameters.append(ModelParameter(index=index, fqn=fqn, tensor=tensor, shape=tensor.shape))
    return parameters


def note_new_values(parameters: Iterable[ModelParameter]) -> None:
    """Have autograd refuse the backward of a computation with the former values of the parameters.

    Autograd does so by itself if a parameter is changed in place, as torch's optimizers do. Here, the values change in
    the store and in flat buffers, which do not share the version counters of the parameters. So this function
    increments these counters.
    """
    torch.autograd.graph.increment_version([parameter.tensor for parameter in parameters])
