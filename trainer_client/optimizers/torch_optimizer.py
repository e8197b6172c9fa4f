"""The record of an optimizer on the trainer's side: its class, its section of the config, and the row of its groups.

The sections have the names and defaults of torch's class. Where DeepSpeed means something else by a name or a default,
the section has DeepSpeed's meaning, or the key must be written.
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
    """The hyper-parameters of an optimizer, as the config has them under `optimizer.params`."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class."""
        return self.model_dump()


class OptimizerSection(Section):
    """The config's `optimizer`. Each optimizer has a section of its own, whose `type` is the name of its class."""

    type: str
    params: ArgumentsSection


def _never_refused(_: ParameterGroup) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptimizer:
    """An optimizer of a training loop that the store runs.

    Attributes:
        torch_class: a subclass is another optimizer, because it may compute something else.
        section: the config's.
        to_row: makes the row of a parameter's update from its group, the optimizer's defaults and the number of the
            parameter's updates with this one.
        find_problem: what the store's kernel cannot do of a group's settings, to be read after "parameter group N";
            None: nothing.
    """

    torch_class: type[torch.optim.Optimizer]
    section: type[OptimizerSection]
    to_row: Callable[[ParameterGroup, Mapping[str, Any], int], HyperParameters]
    find_problem: Callable[[ParameterGroup], str | None] = _never_refused

    @property
    def name(self) -> str:
        """The name that the config and the messages have for the optimizer."""
        return self.torch_class.__name__
