"""The model's own calls that would not reach the store: all but `zero_grad` are refused.

They read, set or replace stale tensors.

This module owns the hooks on the model that refuse, and what stands in for its methods. It must never read or change a
parameter, except for copies of gathered ones.
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

# The method of a module that `to`, `half`, `cuda` and the like call for it and for each module in it.
_CONVERSION = "_apply"
# The method of the model that drops gradients.
_DROP = "zero_grad"

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class ModelRefusals:
    """The refusals of one model. A copy of the model refuses nothing."""

    def __init__(self, module: nn.Module, *, is_sharded: bool) -> None:
        """Refuse `load_state_dict`, conversions and, if parameters are sharded, `state_dict`, until `remove`."""
        self._parameters = {id(parameter) for parameter in module.parameters()}
        # The parameters that may be loaded, because their values go to the store afterwards.
        self._loadable: frozenset[int] = frozenset()
        self._allows_empty = False
        # torch allows no hook on a scripted module; that of the module around it notices a load of both.
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
        """Refuse nothing from now on."""
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

        torch calls this for the module, and then for each module in it, before it copies values into that.
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
    """Stand in for `module._apply`: return the module if `fn` would change no tensor of it, and refuse it if it would.

    torch would give the parameters other memory than the engine trains.

    Args:
        fn: converts a tensor, as `to`, `half` or `cuda` make it.
        recurse: whether the modules in the module are meant, too.

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
        device: the device of the values of all tensors, which may be released; None: each tensor is where it says.

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
