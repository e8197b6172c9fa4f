"""The optimizer as the training loop sees it: parameter groups and hyper-parameters, without state.

Owns the parameter groups, which torch's LR schedulers drive. The states and the arithmetic are the store's; must never
touch a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, overload

import torch
from torch.optim import AdamW

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.config import OptimizerSection
from trainer_client.errors import ConfigError
from trainer_client.parameters import ModelParameter

ParameterGroup: TypeAlias = dict[str, Any]
OptimizerArgument: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None

# They change what an update computes. (`foreach` and `fused` choose a kernel; the store's is the fused one.)
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


class StoreOptimizer(torch.optim.Optimizer):
    """Takes an AdamW's parameter groups over, the same dict objects: a scheduler made for the original drives them too.

    Raises:
        ConfigError: another class, a flag that the store's AdamW does not have, or groups that are not exactly the
            model's trainable parameters.
    """

    def __init__(self, original: torch.optim.Optimizer, parameters: Sequence[ModelParameter]) -> None:
        if type(original) is not AdamW:
            raise ConfigError(f"optimizer {type(original).__name__} is not honoured by this version: use AdamW")
        if original.state:
            raise ConfigError("the optimizer has made steps already: its states cannot be taken over; pass a fresh one")
        self._original = original
        self._update: Callable[[], None] | None = None
        super().__init__(original.param_groups, original.defaults)
        self._group_of = _assign_groups(self.param_groups, parameters)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Only `engine.step()` may call this."""
        if self._update is None or closure is not None:
            raise RuntimeError("the store runs the optimizer: call engine.step() instead of optimizer.step()")
        self._update()
        # Without gradients this updates nothing. It tells a scheduler that was made for the original that a step was
        # made, and runs the user's step hooks.
        self._original.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Only the engine knows when gradients are done with."""
        raise RuntimeError("gradients go to the store and are done with at engine.step(): remove optimizer.zero_grad()")

    @contextmanager
    def stepping_with(self, update: Callable[[], None]) -> Iterator[None]:
        """Within the context, `step` runs `update`."""
        self._update = update
        try:
            yield
        finally:
            self._update = None

    @property
    def state_kinds(self) -> tuple[pb.Kind, ...]:
        """The states that the optimizer keeps of a parameter."""
        return (pb.KIND_EXP_AVG, pb.KIND_EXP_AVG_SQ)

    def hyper_parameters(self, parameter: int, update_count: int) -> pb.ApplyGradientsRequest.HyperParameters:
        """Those of a parameter (index in the model) for its `update_count`-th update."""
        group = self._group_of[parameter]
        beta1, beta2 = group["betas"]
        return pb.ApplyGradientsRequest.HyperParameters(
            adamw=pb.AdamW(
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                update_count=update_count,
            )
        )

    def settings(self) -> list[ParameterGroup]:
        """What the groups hold besides parameters, for the client state."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.param_groups
        ]

    def load_settings(self, settings: Sequence[ParameterGroup]) -> None:
        if len(settings) != len(self.param_groups):
            raise ConfigError(
                f"the optimizer has {len(self.param_groups)} parameter groups, the job was left with {len(settings)}: "
                "pass the same groups"
            )
        for group, stored in zip(self.param_groups, settings, strict=True):
            group.update(stored)


def make_optimizer(
    argument: OptimizerArgument,
    section: OptimizerSection | None,
    model_parameters: Iterable[Any] | None,
    parameters: Sequence[ModelParameter],
) -> StoreOptimizer:
    """The optimizer of `initialize`: the client's instance, its callable, or the config's, in this order.

    Args:
        argument: a `torch.optim.AdamW`, or a callable from parameters to one.
        section: the config's `optimizer`.
        model_parameters: parameters or parameter groups to optimise; None: all trainable ones.
        parameters: the model's.
    """
    if isinstance(argument, torch.optim.Optimizer):
        if model_parameters is not None:
            raise ConfigError("model_parameters and an optimizer instance are both given: the optimizer has its groups")
        return StoreOptimizer(argument, parameters)
    chosen = [p.tensor for p in parameters if p.tensor.requires_grad] if model_parameters is None else model_parameters
    if argument is not None:
        return StoreOptimizer(argument(chosen), parameters)
    if section is None:
        raise ConfigError('no optimizer: write {"optimizer": {"type": "AdamW", "params": {"lr": ...}}}, or pass one')
    settings = section.params
    adamw = AdamW(
        chosen, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
    )
    return StoreOptimizer(adamw, parameters)


def _assign_groups(groups: Sequence[ParameterGroup], parameters: Sequence[ModelParameter]) -> dict[int, ParameterGroup]:
    """The group of each trainable parameter, by its index in the model."""
    for number, group in enumerate(groups):
        if flags := [flag for flag in _REFUSED_FLAGS if group.get(flag)]:
            raise ConfigError(f"AdamW({flags[0]}=True) of parameter group {number} is not honoured by this version")
    group_of = {id(tensor): group for group in groups for tensor in group["params"]}
    assigned = {}
    for parameter in parameters:
        group_or_none = group_of.pop(id(parameter.tensor), None)
        if not parameter.tensor.requires_grad:
            continue
        if group_or_none is None:
            raise ConfigError(
                f"parameter {parameter.fqn} is trainable but in no parameter group of the optimizer: "
                "add it, or freeze it with requires_grad_(False)"
            )
        assigned[parameter.index] = group_or_none
    if group_of:
        raise ConfigError(f"the optimizer has {len(group_of)} parameters that are not the model's: remove them")
    return assigned
