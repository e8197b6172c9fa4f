"""The pickling of an engine's model: `torch.save`, `pickle` and `copy` make a plain model, without engine and store.

This module owns how the model's modules and parameters are pickled, and the storages of the tensors in their state
dicts. It must never change the model itself.

[Note: storages of parameters] The parameters of a flat group share the storage of its flat buffer. For one of these
parameters, `torch.save` would write the whole storage. `safetensors.torch.save_model` refuses tied parameters if none
of them fills its storage. So each saved tensor has a storage of its own, over the parameter's part of the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_client.errors import ReleasedParameterError
from trainer_client.training.model.availability import hide_status
from trainer_client.training.model.released import ReleasedParameter
from trainer_client.training.model.stand_in import StandIn, is_own_hook, only_for
from trainer_client.training.model.taken_gradients import own_class

# pickle and copy look for the method `__reduce_ex__` at the object first, and then at the object's class. So an
# attribute of this name replaces the method for one module or parameter alone.
_REDUCE = "__reduce_ex__"
# The types of devices on which DLPack can make a second tensor over a tensor's memory, with a storage of its own. On
# other devices the tensor is copied.
_WITH_DLPACK = frozenset({"cpu", "cuda"})


class PlainPickles:
    """Has `pickle`, `torch.save` and `copy` make a plain torch module of an engine's model, until `remove`."""

    def __init__(self, model: nn.Module, *, is_sharded: bool) -> None:
        """Have the modules and parameters of a model pickled as those of a plain model.

        Args:
            is_sharded: whether the parameters are released after each use. The state dicts of such a model have copies
                of parameters, which need no storages of their own.
        """
        self._modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
        self._parameters = dict(model.named_parameters())
        for module in self._modules:
            vars(module)[_REDUCE] = partial(_reduce_module, module)
        for fqn, parameter in self._parameters.items():
            vars(parameter)[_REDUCE] = partial(_reduce_parameter, parameter, fqn)
        hook = only_for(frozenset(self._modules), _give_own_storages)
        self._hooks = [] if is_sharded else [each.register_state_dict_post_hook(hook) for each in self._modules]

    def remove(self) -> None:
        """Have torch pickle the modules and parameters in its own way again; idempotent."""
        for owner in (*self._modules, *self._parameters.values()):
            vars(owner).pop(_REDUCE, None)
        for handle in self._hooks:
            handle.remove()


def _reduce_module(module: nn.Module, protocol: int) -> Any:
    """Return what pickle needs to make the module again, without the attributes and hooks of the engine."""
    reduced = type(module).__reduce_ex__(module, protocol)
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state: dict[str, Any] = {}
    for name, value in reduced[2].items():
        if isinstance(value, StandIn):
            if not value.is_of_class:
                state[name] = value.method
        elif name.endswith("_hooks") and isinstance(value, dict):
            state[name] = type(value)((key, hook) for key, hook in value.items() if not is_own_hook(hook))
        elif name != _REDUCE:
            state[name] = value
    return *reduced[:2], state, *reduced[3:]


def _reduce_parameter(parameter: nn.Parameter, fqn: str, protocol: int) -> Any:
    """Return what pickle needs to make the parameter again, as a plain one with its present values.

    Raises:
        ReleasedParameterError: the parameter has no values at the moment.
    """
    if isinstance(parameter, ReleasedParameter):
        raise ReleasedParameterError(fqn, "pickle")
    if (own := own_class(parameter)) is not nn.Parameter:
        return own.__reduce_ex__(parameter, protocol)
    plain = nn.Parameter(_with_own_storage(parameter.detach()), parameter.requires_grad)
    vars(plain).update({name: value for name, value in vars(parameter).items() if not _is_of_engine(name)})
    hide_status(plain)
    return plain.__reduce_ex__(protocol)


def _is_of_engine(name: str) -> bool:
    return name == _REDUCE or name.lstrip("_").startswith("paramserver_")


def _give_own_storages(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Mapping[str, Any]) -> None:
    """Give the parameters in a module's state dict storages of their own, over the same memory.

    Tied names share one storage, so that a file has their values once. torch also calls this hook for each module
    within the module, with a prefix. Such calls do nothing, because the call for the outermost module does it all.
    """
    if prefix:
        return
    known: dict[int, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(name)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
            if id(parameter) not in known:
                known[id(parameter)] = _with_own_storage(tensor)
            state_dict[name] = known[id(parameter)]


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory with a storage of its own size. If torch cannot make it, return `tensor`."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or tensor.device.type not in _WITH_DLPACK:
        return tensor
    alias: torch.Tensor = torch.from_dlpack(tensor)  # type: ignore[attr-defined]
    return alias
