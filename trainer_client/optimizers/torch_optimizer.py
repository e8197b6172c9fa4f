"""The record of an optimizer for the trainer: its class, its section of the config, and the conversion of its groups.

The keys of a section have the names and defaults of torch's class. If DeepSpeed gives a name or a default another
meaning, the section has DeepSpeed's meaning, or the key has no default and must be written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from pydantic import Field

from paramserver.contract.optimizers.optimizer import HyperParameters
from trainer_client.section import Section

ParameterGroup: TypeAlias = dict[str, Any]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class ArgumentsSection(Section):
    """The hyper-parameters of an optimizer: the config's section `optimizer.params`."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class."""
        return self.model_dump()


class OptimizerSection(Section):
    """The config's section `optimizer`. Each optimizer has its own subclass, whose `type` is the optimizer's name."""

    type: str
    params: ArgumentsSection


def _never_refused(_: ParameterGroup) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer of a training loop that the store runs.

    Attributes:
        torch_class: the exact class. A subclass counts as another optimizer, because it may compute something else.
        section: the class of the config's section `optimizer`.
        to_row: returns the hyper-parameters of one update of a parameter. Its arguments are the parameter's group, the
            optimizer's defaults, and the number of the parameter's updates including this one.
        find_problem: returns why the store's kernel cannot run a group's settings, as the end of a sentence that begins
            with "parameter group N"; None if it can.
    """

    torch_class: type[torch.optim.Optimizer]
    section: type[OptimizerSection]
    to_row: Callable[[ParameterGroup, Mapping[str, Any], int], HyperParameters]
    find_problem: Callable[[ParameterGroup], str | None] = _never_refused

    @property
    def name(self) -> str:
        """The name of the optimizer in the config and in messages."""
        return self.torch_class.__name__
