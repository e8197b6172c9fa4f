"""The optimizers of a training loop that the store runs, and the reasons why it refuses others.

To add an optimizer, add a module with its record to this folder and an entry to the tuple below; its other half goes
into paramserver/contract/optimizers/registry.py.
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

# The section of any of these optimizers. Its key `type` says which optimizer it is.
if TYPE_CHECKING:
    AnyOptimizerSection: TypeAlias = OptimizerSection
else:
    AnyOptimizerSection = reduce(or_, (record.section for record in OPTIMIZERS.values()))

# The names of optimizers that are not elementwise, in lower case and without the prefix "fused". Most of these classes
# are not installed.
_NOT_ELEMENTWISE = frozenset(
    {"adafactor", "adamuon", "galore", "lamb", "lars", "lbfgs", "lion8bit", "muon", "onebitadam", "onebitlamb"}
    | {"shampoo", "soap", "sparseadam", "zerooneadam"}
)


def find_record(optimizer: torch.optim.Optimizer) -> TorchOptimizer:
    """Return the record of an optimizer's class.

    Raises:
        ConfigError: the store does not run the optimizer. A subclass of an optimizer that the store runs is refused,
            too, because it may compute something else.
    """
    for record in OPTIMIZERS.values():
        if type(optimizer) is record.torch_class:
            return record
    raise ConfigError(f"optimizer {why_refused(type(optimizer).__name__)}")


def why_refused(name: str) -> str:
    """Return a sentence that tells a user why the store does not run an optimizer that is not in OPTIMIZERS."""
    *names, last = OPTIMIZERS
    instead = f"use {', '.join(names)} or {last}"
    if name.lower().removeprefix("fused") in _NOT_ELEMENTWISE:
        return (
            f"{name} is not elementwise: it needs whole parameters or their gradients' sparsity, and a store updates "
            f"ranges of parameters; {instead}"
        )
    return f"{name} is none of the optimizers that the store runs; {instead}"
