"""Methods of the model that would bypass the store: `load_state_dict`, `state_dict`, conversions and `zero_grad`.

They would read, set or replace tensors that the engine does not train. All of them but `zero_grad` are refused, and
`zero_grad` drops the engine's gradients.

This module owns the hooks on the model that refuse calls, and the functions that replace its methods. It must never
read or change a parameter, except for copies of gathered parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_client.training.model.released import ReleasedParameter
from trainer_client.training.model.stand_in import StandIn, only_for

# The name of the method that `to`, `half`, `cuda` and similar methods of a module call for the module and for each
# module in it. The engine replaces this method in each module, so all these conversions are refused.
_CONVERSION = "_apply"
# The name of the model's method that drops its gradients. It is replaced by one that drops the gradients of the engine.
_DROP = "zero_grad"

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ModelRefusals:
    """Has methods of one model raise an error while an engine trains it, such as `load_state_dict` and `half`.

    A copy of the model refuses nothing.
    """

    def __init__(self, module: nn.Module, *, is_sharded: bool) -> None:
        """Refuse `load_state_dict`, conversions and, if parameters are sharded, `state_dict`, until `remove`."""
        self._parameters = {id(parameter) for parameter in module.parameters()}
        # The ids of the parameters that `load_state_dict` may load now. Outside of `allow_load` there are none, because
        # a value that is loaded into the model alone would not reach the store.
        self._loadable: frozenset[int] = frozenset()
        self._allows_empty = False
        # torch allows no hook on a scripted module, so scripted modules get none. The hook of the module around a
        # scripted module refuses a load of both.
        self._modules = [each for each in module.modules() if not isinstance(each, torch.jit.ScriptModule)]
        for each in self._modules:
            vars(each)[_CONVERSION] = StandIn(each._apply, partial(refuse_conversion, each))
        refuse_load = only_for(frozenset(self._modules), self._refuse_load)
        self._of_load = [each.register_load_state_dict_pre_hook(refuse_load) for each in self._modules]
        self._of_reading: list[RemovableHandle] = []
        if is_sharded:
            refuse_state_dict = only_for((module,), self._refuse_state_dict)
            self._of_reading.append(module.register_state_dict_pre_hook(refuse_state_dict))
            self._of_reading.append(module.register_state_dict_post_hook(only_for((module,), copy_gathered)))

    def replace_zero_grad(self, model: nn.Module, drop: Callable[..., None]) -> None:
        """Have `drop` called in the place of the model's `zero_grad`, because the engine has the gradients."""
        if model in self._modules:
            vars(model)[_DROP] = StandIn(model.zero_grad, drop)

    def remove(self) -> None:
        """Let all methods of the model be called from now on, because the engine has no use of the model any more."""
        self.allow_changes()
        for handle in self._of_reading:
            handle.remove()

    def allow_changes(self) -> None:
        """Let the modules be loaded and converted from now on, because the engine trains them no more. Idempotent."""
        for handle in self._of_load:
            handle.remove()
        for module in self._modules:
            vars(module).pop(_CONVERSION, None)
            vars(module).pop(_DROP, None)
        self._modules.clear()

    @contextmanager
    def allow_empty(self) -> Iterator[None]:
        """Let the model's `state_dict` be called within the context although parameters are released."""
        self._allows_empty = True
        try:
            yield
        finally:
            self._allows_empty = False

    @contextmanager
    def allow_load(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let `load_state_dict` of the model and of its modules load these parameters within the context."""
        former, self._loadable = self._loadable, frozenset(map(id, parameters))
        try:
            yield
        finally:
            self._loadable = former

    def _refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse `module.state_dict()`, because the weights are in the store, unless all of them are gathered."""
        if not self._allows_empty and has_released(module):
            raise RuntimeError(
                "the model's weights are in the store: call engine.full_state_dict() instead of state_dict(), or call "
                "it within gathered() of all parameters"
            )

    def _refuse_load(
        self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Refuse `module.load_state_dict()`, because the weights that are trained are those in the store.

        torch calls this hook for the module and then for each module in it, each time before it copies values into that
        module.
        """
        named = module.named_parameters(prefix.removesuffix("."), remove_duplicate=False)
        loaded = {id(parameter) for name, parameter in named if name in state_dict} & self._parameters
        if not loaded <= self._loadable:
            raise RuntimeError(
                "the model's weights are in the store: call engine.load_state_dict() instead of the model's, load them "
                "before initialize(), or on the rank modifier_rank within gathered() of all parameters that are loaded"
            )
        if loaded and metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True): the engine's parameters keep their memory; leave it out")


def refuse_conversion(module: ModuleT, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleT:
    """Take the place of `module._apply`: return the module if `fn` would change no tensor of it, else raise an error.

    The error is needed, because torch would give the parameters other memory than the engine trains.

    Args:
        fn: converts a tensor, as `to`, `half` or `cuda` make it.
        recurse: whether the tensors of the modules within the module are checked, too.

    Raises:
        RuntimeError: `fn` gives tensors another device or dtype than the config has given them.
    """
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    if (conversion := find_conversion(fn, tensors)) is not None:
        before, after = conversion
        raise RuntimeError(
            f"the engine's tensors cannot be converted from {before} to {after}: the dtype follows from bf16.enabled "
            "and fp16.enabled of the config, and the device from the rank; remove the call, or convert a copy "
            "(copy.deepcopy, at stage 3 within engine.gathered())"
        )
    return module


def find_conversion(
    fn: Callable[[torch.Tensor], torch.Tensor], tensors: Iterable[torch.Tensor], device: torch.device | None = None
) -> tuple[str, str] | None:
    """Return the first conversion that `fn` would make of tensors, without converting one of them.

    Args:
        fn: converts a tensor, as `to`, `half` or `cuda` of a module make it.
        device: the device on which the values of all tensors are or will be, also of released ones; None: the device of
            each tensor itself.

    Returns:
        Two texts for an error, which say what the tensor is and what it would become, such as "torch.float32 on cpu"
        and "torch.float16 on cpu"; None if `fn` would convert no tensor.
    """
    for tensor in tensors:
        probe = torch.empty(0, dtype=tensor.dtype, device=device or tensor.device)
        converted = fn(probe)
        if (converted.dtype, converted.device) != (probe.dtype, probe.device):
            return f"{probe.dtype} on {probe.device}", f"{converted.dtype} on {converted.device}"
    return None


def has_released(module: nn.Module) -> bool:
    """Return whether some parameters of a module have no values at the moment."""
    return any(isinstance(parameter, ReleasedParameter) for parameter in module.parameters())


def without_released(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of variables as one of tensors, in which a released parameter has no elements."""
    return {
        name: torch.empty(0, dtype=value.dtype, device=value.device)
        if isinstance(value, ReleasedParameter)
        else value.detach().clone()
        if isinstance(value, nn.Parameter)
        else value
        for name, value in state_dict.items()
    }


def copy_gathered(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """Replace the parameters in a state dict by copies, because gathered memory is freed. Tied names share a copy."""
    copies: dict[int, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
            if id(parameter) not in copies:
                copies[id(parameter)] = tensor.clone()
            state_dict[prefix + name] = copies[id(parameter)]
