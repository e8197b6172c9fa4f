"""DeepSpeed's functions for the states of single parameters. Each is a method of the engine that has the parameter.

All that are named `full` are collectives, and so are all that set states (they make a commit of their own); see
`Engine.get_full` and `Engine.set_full` for what is returned and raised.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer_client.access import owner_of
from trainer_client.engine import Engine
from trainer_client.errors import ConfigError

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The whole fp32 weight."""
    return _engine(param).get_full(param, "master")


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, fp32, between backward and step; None without one."""
    return _engine(param).get_full(param, "grad")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A whole state of the optimizer, fp32, by torch's name."""
    return _engine(param).get_full(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes the weight, between two steps."""
    _engine(param).set_full(param, "master", value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes the gradient, between backward and step."""
    _engine(param).set_full(param, "grad", value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Changes a state of the optimizer, between two steps."""
    _engine(param).set_full(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the fp32 weight, flattened."""
    return _engine(param).get_local(param, "master")


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the gradient, flattened."""
    return _engine(param).get_local(param, "grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of a state of the optimizer, flattened."""
    return _engine(param).get_local(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes this rank's part of the weight, between two steps; every rank calls it."""
    _engine(param).set_local(param, "master", value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Changes this rank's part of the gradient, between backward and step."""
    _engine(param).set_local(param, "grad", value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Changes this rank's part of a state of the optimizer, between two steps; every rank calls it."""
    _engine(param).set_local(param, optim_state_key, value)


def _engine(param: nn.Parameter) -> Engine:
    engine = owner_of(param)
    if not isinstance(engine, Engine):
        raise ConfigError(f"a parameter of shape {list(param.shape)} has no engine: pass its model to initialize()")
    return engine
