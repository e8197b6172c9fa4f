"""The list of a model's parameters. This module owns the rule which parameters the store can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of the model.

    Attributes:
        index: its number in the model's order, which includes frozen parameters.
        fqn: its fully qualified name, as in `named_parameters()`.
        tensor: the parameter itself. It keeps its shape while it is released, but has no memory then.
        shape: its shape.
    """

    index: int
    fqn: str
    tensor: nn.Parameter
    shape: torch.Size


def list_parameters(model: nn.Module) -> list[ModelParameter]:
    """Return the model's parameters in its order; a tied parameter appears once, with its first FQN.

    Raises:
        ConfigError: the store cannot hold a parameter, which the message names.
    """
    parameters = []
    for index, (fqn, tensor) in enumerate(model.named_parameters()):
        if not tensor.is_floating_point():
            raise ConfigError(f"parameter {fqn} has dtype {tensor.dtype}: only floating-point parameters are honoured")
        parameters.append(ModelParameter(index=index, fqn=fqn, tensor=tensor, shape=tensor.shape))
    return parameters
