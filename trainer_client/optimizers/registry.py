"""The optimizers that the store runs for a training loop, and why it does not run others.

A new optimizer is a module beside this one with its record, and an entry in the tuple below;
paramserver/contract/optimizers/registry.py has its other half.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

import torch

from trainer_client.errors import ConfigError
from trainer_client.optimizers.adagrad import ADAGRAD
from trainer_client.optimizers.adam import ADAM
from trainer_client.optimizers.adamw import ADAMW
from trainer_client.optimizers.lion import LION
from trainer_client.optimizers.sgd import SGD
from trainer_client.optimizers.torch_optimizer import OptimizerSection, TorchOptimizer

_RECORDS = (
    ADAMW,
    ADAM,
    SGD,
    LION,
    ADAGRAD,
)
OPTIMIZERS = {record.name: record for record in _RECORDS}

# The section of one of them; `type` tells which one.
if TYPE_CHECKING:
    AnyOptimizerSection: TypeAlias = OptimizerSection
else:
    AnyOptimizerSection = reduce(or_, (record.section for record in OPTIMIZERS.values()))

# Names in lower case, without what implementations put around the name. Most of these classes are not installed.
_NOT_ELEMENTWISE = frozenset(
    {"adafactor", "adamuon", "galore", "lamb", "lars", "lbfgs", "lion8bit", "muon", "onebitadam", "onebitlamb"}
    | {"shampoo", "soap", "sparseadam", "zerooneadam"}
)


def find_record(optimizer: torch.optim.Optimizer) -> TorchOptimizer:
    """Return the record of an instance's class.

    Raises:
        ConfigError: the store does not run the optimizer. Subclasses of its optimizers are refused, too, because they
            may compute something else.
    """
    for record in OPTIMIZERS.values():
        if type(optimizer) is record.torch_class:
            return record
    raise ConfigError(f"optimizer {why_refused(type(optimizer).__name__)}")


def why_refused(name: str) -> str:
    """Return a sentence that tells a user why the store does not run an optimizer, which is none of OPTIMIZERS."""
    *names, last = OPTIMIZERS
    instead = f"use {', '.join(names)} or {last}"
    if name.lower().removeprefix("fused") in _NOT_ELEMENTWISE:
        return (
            f"{name} is not elementwise: it needs whole parameters or their gradients' sparsity, and a store updates "
            f"ranges of parameters; {instead}"
        )
    return f"{name} is none of the optimizers that the store runs; {instead}"
