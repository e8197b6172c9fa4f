"""The list of a model's parameters, and what autograd has to know when their values change.

This module owns the rule which parameters the store can hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.errors import ConfigError

# The name by which the module that torch.compile(module) returns has the module.
_COMPILED = "_orig_mod"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of the model, or a tile of one: some of its rows, which are a tensor of their own; see tile.py.

    Attributes:
        index: its number in the model's order, which includes frozen parameters. A tile has that of its parameter.
        fqn: its fully qualified name, as in `named_parameters()`. A tile has that of its parameter.
        tensor: the parameter itself. It keeps its shape while it is released, but has no memory then.
        shape: its shape.
        first: the first element of the tile in the flattened parameter; 0 for a parameter.
        tile_of: the parameter that this is a tile of; None if it is a parameter.
    """

    index: int
    fqn: str
    tensor: nn.Parameter
    shape: torch.Size
    first: int = 0
    tile_of: ModelParameter | None = None

    @property
    def whole(self) -> ModelParameter:
        """The parameter that this is a tile of, or this parameter itself."""
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
    """Have autograd refuse the backward of what was computed with the former values of the parameters.

    It refuses that by itself if a tensor is changed in place, as by torch's optimizers. But these values change in the
    store, and in flat buffers, which do not share the version counters of the parameters.
    """
    torch.autograd.graph.increment_version([parameter.tensor for parameter in parameters])
