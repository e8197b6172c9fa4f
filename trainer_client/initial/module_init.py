"""Initial values of a model that was built on torch.device("meta"): nobody wrote down how they come about, so the
model's own functions are asked, for one module at a time.

Must never give memory to more than one module's own tensors, nor take a value that no function has set.

[Note: which functions] What a plain construction runs: the constructor's `module.reset_parameters()`, which torch's
layers have, then the enclosing transformers model's `_init_weights(module)`, which knows its layers and their buffers.
`param_init_fn(module)`, FSDP's, replaces both. Random numbers are seeded by the module's FQN: they are the same on
every rank, whatever else is initialised there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from trainer_client.errors import ConfigError
from trainer_client.recorder import ROOT_NAME

ParamInitFn: TypeAlias = Callable[[nn.Module], None]


class ModuleInit:
    """Args:
    model: what becomes of its parameters meanwhile does not matter.
    param_init_fn: initialises the parameters and buffers that a module itself has, in place.
    seed: of all random numbers; the same on every rank.
    """

    def __init__(self, model: nn.Module, param_init_fn: ParamInitFn | None, seed: int) -> None:
        self._model = model
        self._param_init_fn = param_init_fn
        self._seed = seed

    @torch.no_grad()
    def tensors_of(self, fqn: str) -> Mapping[str, torch.Tensor]:
        """The initial values of the parameters and buffers that a module itself has, by their names in it; on the CPU.

        Raises:
            ConfigError: no function sets them.
        """
        module = self._model.get_submodule(fqn)
        parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        buffers = {name: tensor for name, tensor in module._buffers.items() if tensor is not None}
        fresh: dict[str, torch.Tensor] = {}
        digest = hashlib.sha256(f"{self._seed}/{fqn}".encode()).digest()
        state = torch.default_generator.get_state()
        try:
            for name, parameter in parameters.items():
                # In its place, for it may be in the store already.
                module._parameters[name] = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
            for name, buffer in buffers.items():
                module._buffers[name] = _unset(buffer) if buffer.is_meta else buffer.clone()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._run(fqn, module)
            for name in (*parameters, *buffers):
                # Looked up anew: the function may have put another tensor there.
                fresh[name] = getattr(module, name).detach()
        except RuntimeError as error:
            error.add_note(f"while {self._described(fqn, module)} was initialised")
            raise
        finally:
            torch.default_generator.set_state(state)
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        if unset := [name for name, tensor in fresh.items() if _is_unset(tensor)]:
            raise ConfigError(
                f"{', '.join(unset)} of {self._described(fqn, module)} was built on the meta device, and no function "
                "of the model sets it: give the module a reset_parameters(), pass initialize(param_init_fn=...), or "
                "build the model under trainer_client.zero.Init()"
            )
        return fresh

    def _run(self, fqn: str, module: nn.Module) -> None:
        if self._param_init_fn is not None:
            self._param_init_fn(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        initialise = self._enclosing_init_weights(fqn)
        if initialise is not None:
            initialise(module)

    def _enclosing_init_weights(self, fqn: str) -> Callable[[nn.Module], None] | None:
        """`_init_weights` of the innermost transformers model around a module."""
        found = None
        module = self._model
        for name in ("", *fqn.split(".")):
            module = module.get_submodule(name)
            candidate = getattr(module, "_init_weights", None)
            found = candidate if callable(candidate) else found
        return found

    def _described(self, fqn: str, module: nn.Module) -> str:
        return f"module {fqn or ROOT_NAME} ({type(module).__name__})"


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of a tensor's shape that tells whether it was written."""
    return torch.full(tensor.shape, _marker(tensor.dtype), dtype=tensor.dtype)


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == _marker(tensor.dtype)).any())


def _marker(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return False
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
