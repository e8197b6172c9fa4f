"""The parameters of a model, by name. Owns which ones can be kept in the store at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer_client.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of the model.

    Attributes:
        index: in the model's order, frozen parameters included.
        shape: of the whole parameter (`tensor` keeps its shape too, but not always its memory).
    """

    index: int
    fqn: str
    tensor: nn.Parameter
    shape: torch.Size


def list_parameters(model: nn.Module) -> list[ModelParameter]:
    """The model's parameters in its order; a tied one appears once, under its first FQN.

    Raises:
        ConfigError: names a parameter that the store cannot hold.
    """
    parameters = []
    for index, (fqn, tensor) in enumerate(model.named_parameters()):
        if not tensor.is_floating_point():
            raise ConfigError(f"parameter {fqn} has dtype {tensor.dtype}: only floating-point parameters are honoured")
        parameters.append(ModelParameter(index=index, fqn=fqn, tensor=tensor, shape=tensor.shape))
    return parameters
