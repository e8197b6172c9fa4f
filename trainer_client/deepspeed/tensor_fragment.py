"""DeepSpeed's functions that read or set the states of single parameters.

Each function calls a method of the engine that has the parameter; see `Engine.get_full`, `Engine.set_full`,
`Engine.get_local` and `Engine.set_local` for what is returned and raised. All functions with `full` in their name are
collectives. All functions that set weights or optimizer states are collectives, too, because each of them makes a
commit of its own. For a parameter that was never trained, the functions that read return None, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError
from trainer_client.training.model.owners import owner_of

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
    "safe_update_full_grad_vectorized",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole fp32 weight of a parameter."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_full(param, "master")


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole fp32 gradient of a parameter, between backward and step; None if there is no gradient."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_full(param, "grad")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole fp32 optimizer state of a parameter, given by torch's name of the state, as "exp_avg"."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_full(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole weight of a parameter, between two steps."""
    _engine(param).set_full(param, "master", value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient of a parameter, between backward and step."""
    _engine(param).set_full(param, "grad", value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole optimizer state of a parameter, between two steps."""
    _engine(param).set_full(param, optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the flattened fp32 weight of a parameter."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_local(param, "master")


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the flattened gradient of a parameter."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_local(param, "grad")


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a flattened optimizer state of a parameter."""
    engine = _trainer_of(param)
    return None if engine is None else engine.get_local(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of a parameter's weight, between two steps. All ranks must call this."""
    _engine(param).set_local(param, "master", value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of a parameter's gradient, between backward and step."""
    _engine(param).set_local(param, "grad", value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a parameter's optimizer state, between two steps. All ranks must call this."""
    _engine(param).set_local(param, optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each parameter's whole gradient by `update_func(gradient, parameter)`, between backward and step.

    A parameter without a gradient is left out.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _trainer_of(param: nn.Parameter) -> Engine | None:
    """Return the engine that trains the parameter, or has trained it; None if it was never trained."""
    engine = _engine(param)
    return engine if engine.is_trained(param) else None


def _engine(param: nn.Parameter) -> Engine:
    engine = owner_of(param)
    if not isinstance(engine, Engine):
        raise ConfigError(f"a parameter of shape {list(param.shape)} has no engine: pass its model to initialize()")
    return engine
