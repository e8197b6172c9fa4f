"""The record of an optimizer for the trainer: its class, its section of the config, and the conversion of its groups.

If DeepSpeed has a class for the optimizer, the keys of the section have the names and defaults of that class, otherwise
those of torch's class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import torch
from pydantic import Field

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.base.section import Section, is_honoured
from trainer_client.base.standing import Refused, WithoutEffect

ParameterGroup: TypeAlias = dict[str, Any]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

_KERNEL = "the store always runs its own kernel, which gives the bits of torch's fused one"
_NOT_IN_KERNEL = "the store's kernel does not have it"

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)
# For each class that `runs_as` has declared, the class of torch whose update it computes.
_RUNS_AS: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {}


def runs_as(base: type[torch.optim.Optimizer]) -> Callable[[type[_Optimizer]], type[_Optimizer]]:
    """Return a decorator for a subclass of `base` that only takes other arguments, so that the store runs it as `base`.

    A subclass of the decorated class is treated as another optimizer.
    """

    def declare(cls: type[_Optimizer]) -> type[_Optimizer]:
        _RUNS_AS[cls] = base
        return cls

    return declare


def class_that_runs(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class whose update an optimizer computes: its own class, unless `runs_as` has declared another one."""
    return _RUNS_AS.get(type(optimizer), type(optimizer))


class ArgumentsSection(Section):
    """The hyper-parameters of an optimizer: the config's section `optimizer.params`."""

    set_grad_none: Annotated[
        bool, WithoutEffect(why="gradients are always freed after a step"), Field(description="free gradients")
    ] = True
    fp32_optimizer_states: Annotated[
        bool,
        WithoutEffect(why="optimizer states are always fp32 in the store"),
        Field(description="keep optimizer states in fp32"),
    ] = True
    max_grad_norm: Annotated[
        float,
        WithoutEffect(why="gradient_clipping says it"),
        Field(description="limit of the gradient's norm; an error unless `gradient_clipping` is the same"),
    ] = 0.0

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class: the keys that are honoured."""
        return self.model_dump(include={name for name, field in type(self).model_fields.items() if is_honoured(field)})

    def group_settings(self) -> dict[str, Any]:
        """Return the settings to set in the parameter groups, because the class does not take them as arguments."""
        return {}


class TorchArgumentsSection(ArgumentsSection):
    """The hyper-parameters of one of torch's optimizers, whose classes also have flags such as `foreach`."""

    fused: Annotated[bool | None, WithoutEffect(why=_KERNEL), Field(description="torch's fused kernel")] = None
    foreach: Annotated[bool | None, WithoutEffect(why=_KERNEL), Field(description="torch's foreach kernel")] = None
    maximize: Annotated[
        bool,
        Refused(why=_NOT_IN_KERNEL, instead="negate the loss"),
        Field(description="maximize instead of minimize"),
    ] = False
    capturable: Annotated[
        bool,
        Refused(why=_NOT_IN_KERNEL, instead="remove it; steps are not captured in CUDA graphs"),
        Field(description="capture updates in CUDA graphs"),
    ] = False
    differentiable: Annotated[
        bool,
        Refused(why=_NOT_IN_KERNEL, instead="remove it; backward passes do not go through updates"),
        Field(description="compute gradients of updates"),
    ] = False


class OptimizerSection(Section):
    """The config's section `optimizer`. Each optimizer has its own subclass, whose `type` is the optimizer's name."""

    type: str
    params: ArgumentsSection
    legacy_fusion: Annotated[bool, WithoutEffect(why=_KERNEL), Field(description="an older kernel for fp16")] = False
    torch_adam: Annotated[
        bool,
        WithoutEffect(why="DeepSpeed reads it in `optimizer.params` only"),
        Field(description="torch's kernel, written in the wrong section"),
    ] = False


def _never_refused(_: ParameterGroup) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """The record of an optimizer that the store runs: what the trainer needs to make it and to send its updates.

    Attributes:
        torch_class: the exact class. A subclass is treated as another optimizer, because it may compute something else.
        section: the class of the config's section `optimizer`.
        to_row: returns the hyper-parameters of one update of a parameter. Its arguments are the parameter's group, the
            optimizer's defaults, and the number of the parameter's updates including this one.
        other_names: names of DeepSpeed's classes of the same optimizer, which the config may write instead.
        find_problem: returns why the store's kernel cannot run a group's settings, as the end of a sentence that begins
            with "parameter group N"; None if it can.
    """

    torch_class: type[torch.optim.Optimizer]
    section: type[OptimizerSection]
    to_row: Callable[[ParameterGroup, Mapping[str, Any], int], HyperParameters]
    other_names: tuple[str, ...] = ()
    find_problem: Callable[[ParameterGroup], str | None] = _never_refused

    @property
    def name(self) -> str:
        """The name of the optimizer in the config and in messages."""
        return self.torch_class.__name__
