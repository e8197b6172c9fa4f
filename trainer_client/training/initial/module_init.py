"""Initial values of a model that was built on torch.device("meta"), made by the model's own functions.

Such a model has no recipes, so the functions that initialise it run again, for one module at a time. This module must
never give memory to more than one module's own tensors, nor use a value that no function has set.

[Note: which functions] The functions are those that a plain construction runs: first `module.reset_parameters()`, which
torch's layers have, then `_init_weights(module)` of the enclosing transformers model, which initialises layers and
buffers. If `param_init_fn` is given (as in FSDP), `param_init_fn(module)` replaces both. The random seed follows from
the module's FQN, so the values are the same on every rank, even if the ranks initialise different modules.

[Note: markers] Before the functions run, each element of a tensor is set to a marker. An element that still has the
marker afterwards was not set. NaN is the marker of floating-point tensors. Functions may set integers and booleans to
any value, the marker included. So if an element still has the marker, the functions run once more over another marker:
an element was not set if it has the first marker after the first run and the second marker after the second run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from trainer_client.base.recorder import ROOT_NAME
from trainer_client.errors import ConfigError

ParamInitFn: TypeAlias = Callable[[nn.Module], None]


class ModuleInit:
    """Makes the initial values of a model on the meta device, for one of its modules at a time.

    Args:
        model: the model. The values of its parameters are not used, so they may be moved to the store before a module
            is initialised.
        param_init_fn: initialises in place the parameters and buffers that a module itself has; None: the model's own
            functions initialise them.
        seed: the seed of all random numbers, the same on every rank.
    """

    def __init__(self, model: nn.Module, param_init_fn: ParamInitFn | None, seed: int) -> None:
        self._model = model
        self._param_init_fn = param_init_fn
        self._seed = seed
        # The dtypes in which the parameters were built, by the ids of the parameters. They are kept, because the engine
        # gives a parameter its compute dtype later, and initial values are made in the dtype in which it was built.
        self._dtypes = {id(parameter): parameter.dtype for parameter in model.parameters()}

    @torch.no_grad()
    def tensors_of(self, fqn: str) -> Mapping[str, torch.Tensor]:
        """Return the initial values of a module's own parameters and buffers, by their names in the module.

        The values are on the CPU.

        Raises:
            ConfigError: no function sets some of the parameters or buffers.
        """
        module = self._model.get_submodule(fqn)
        fresh, marked = self._run_over(fqn, module, again=False)
        if left := [name for name in marked if _has_marker(fresh[name], again=False).any()]:
            second, _ = self._run_over(fqn, module, again=True)
            left = [
                name
                for name in left
                if (_has_marker(fresh[name], again=False) & _has_marker(second[name], again=True)).any()
            ]
        if left:
            raise ConfigError(
                f"{', '.join(left)} of {self._described(fqn, module)} was built on the meta device, and no function "
                "of the model sets it: give the module a reset_parameters(), pass initialize(param_init_fn=...), or "
                "build the model under trainer_client.zero.Init()"
            )
        return fresh

    def _run_over(self, fqn: str, module: nn.Module, *, again: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Run the module's functions over the first markers, or the second ones if `again`; see [Note: markers].

        Returns:
            The module's own parameters and buffers after the run, by name, and the names of those that had markers
            before the run.
        """
        parameters = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        buffers = {name: tensor for name, tensor in module._buffers.items() if tensor is not None}
        digest = hashlib.sha256(f"{self._seed}/{fqn}".encode()).digest()
        state = torch.default_generator.get_state()
        try:
            for name, parameter in parameters.items():
                # The functions that initialise the module get a fresh parameter to fill, because the module's own
                # parameter may have no memory any more.
                unset = _unset(parameter, self._dtypes[id(parameter)], again=again)
                module._parameters[name] = nn.Parameter(unset, requires_grad=parameter.requires_grad)
            for name, buffer in buffers.items():
                module._buffers[name] = _unset(buffer, buffer.dtype, again=again) if buffer.is_meta else buffer.clone()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._run(fqn, module)
            # The values are read from the module's attributes again, because the initialising function may have
            # assigned other tensors to them.
            fresh = {name: getattr(module, name).detach() for name in (*parameters, *buffers)}
        except RuntimeError as error:
            error.add_note(f"while {self._described(fqn, module)} was initialised")
            raise
        finally:
            torch.default_generator.set_state(state)
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        return fresh, [*parameters, *(name for name, buffer in buffers.items() if buffer.is_meta)]

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
        """Return `_init_weights` of the module `fqn`, or of the innermost module around it that has this method."""
        found = None
        module = self._model
        for name in ("", *fqn.split(".")):
            module = module.get_submodule(name)
            candidate = getattr(module, "_init_weights", None)
            found = candidate if callable(candidate) else found
        return found

    def _described(self, fqn: str, module: nn.Module) -> str:
        return f"module {fqn or ROOT_NAME} ({type(module).__name__})"


def _unset(tensor: torch.Tensor, dtype: torch.dtype, *, again: bool) -> torch.Tensor:
    """Return a CPU tensor with the shape of `tensor`, each element the first marker, or the second one if `again`."""
    return torch.full(tensor.shape, _marker(dtype, again=again), dtype=dtype)


def _has_marker(tensor: torch.Tensor, *, again: bool) -> torch.Tensor:
    """Return a boolean tensor, True where an element has the first marker, or the second one if `again`."""
    if tensor.dtype.is_floating_point or tensor.is_complex():
        return tensor.isnan()
    return tensor == _marker(tensor.dtype, again=again)


def _marker(dtype: torch.dtype, *, again: bool) -> float | int | bool:
    if dtype is torch.bool:
        return again
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return torch.iinfo(dtype).max if again else torch.iinfo(dtype).min
