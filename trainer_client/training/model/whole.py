"""A parameter of the model whose tiles are units of their own: it keeps its name and shape, and has no values.

This module owns the `.data` of such a parameter. It must never touch the `.data` of a tile.
"""

from __future__ import annotations

from functools import partial

import torch

from trainer_client.errors import TiledParameterError
from trainer_client.training.model.availability import part_of, show_part
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.released import release, restore


@torch.no_grad()
def hide_whole(parameter: ModelParameter, dtype: torch.dtype, device: torch.device) -> None:
    """Free a tiled parameter's memory. A function of torch that needs its values or its gradient raises from now on.

    Args:
        parameter: the whole parameter.
        dtype, device: the dtype and the device of its tiles, which the parameter gets, too.
    """
    restore(parameter.tensor)
    parameter.tensor.data = torch.full((), torch.nan, dtype=dtype, device=device).expand(parameter.shape)
    # A tiled layer computes with its tiles, each a leaf of autograd's graph, so autograd gives the whole parameter no
    # gradient. A hook on the gradient of the whole parameter is therefore refused.
    release(parameter.tensor, partial(_refuse, parameter.fqn), has_gradient=False)
    show_part(parameter.tensor, part_of(0, dtype))


@torch.no_grad()
def show_whole(parameter: ModelParameter, values: torch.Tensor) -> None:
    """Give a tiled parameter the memory of `values`, which have its shape, until `hide_whole`."""
    restore(parameter.tensor)
    parameter.tensor.data = values


def _refuse(fqn: str, function: str) -> None:
    raise TiledParameterError(fqn, function)
