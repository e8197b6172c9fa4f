"""The optimizers of a training loop that the store runs, and the reasons why it refuses others.

To add an optimizer, add a module of its name with a RECORD to this folder;
paramserver/contract/optimizers/registry.py says what else it needs.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, TypeAlias

import torch

from paramserver.contract.optimizers import registry as contract
from trainer_client.errors import ConfigError
from trainer_client.optimizers.torch_optimizer import OptimizerSection, TorchOptimizer, class_that_runs


def _record(name: str) -> TorchOptimizer:
    found: TorchOptimizer = import_module(f"trainer_client.optimizers.{name}").RECORD
    return found


_RECORDS = tuple(_record(name) for name in contract.OPTIMIZERS)
OPTIMIZERS = {record.name: record for record in _RECORDS}

# The type of the config's section `optimizer`: the section of any of these optimizers. The section's key `type` says
# which optimizer it is.
if TYPE_CHECKING:
    AnyOptimizerSection: TypeAlias = OptimizerSection
else:
    AnyOptimizerSection = reduce(or_, (record.section for record in OPTIMIZERS.values()))

# The records (TorchOptimizer) by all names that a config can write, in lower case, because DeepSpeed ignores the case.
_BY_NAME = {name.lower(): record for record in _RECORDS for name in (record.name, *record.other_names)}

# Optimizers that are not elementwise, so that the store cannot run them, by their names in lower case without the
# prefix "fused". The names are listed and not the classes, because most of the classes are not installed.
_NOT_ELEMENTWISE = frozenset(
    {"adafactor", "adamuon", "galore", "lamb", "lars", "lbfgs", "lion8bit", "muon", "onebitlamb", "shampoo", "soap"}
    | {"sparseadam"}
)
_COMPRESSED = frozenset({"onebitadam", "zerooneadam"})
_MUP = {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}


def find_record(optimizer: torch.optim.Optimizer) -> TorchOptimizer:
    """Return the record (a TorchOptimizer) with which the trainer has the store run an optimizer of this class.

    Raises:
        ConfigError: the store does not run the optimizer. A subclass of an optimizer that the store runs is refused,
            too, because it may compute something else, unless it was declared by `runs_as`.
    """
    for record in OPTIMIZERS.values():
        if class_that_runs(optimizer) is record.torch_class:
            return record
    raise ConfigError(f"optimizer {why_refused(type(optimizer).__name__)}")


def canonical_name(name: str) -> str:
    """Return the name in OPTIMIZERS of an optimizer that the config names in DeepSpeed's way.

    A name that the store does not know is returned as it is.
    """
    record = _BY_NAME.get(name.lower())
    return name if record is None else record.name


def why_refused(name: str) -> str:
    """Return a sentence that tells a user why the store does not run an optimizer that is not in OPTIMIZERS."""
    *names, last = OPTIMIZERS
    instead = f"use {', '.join(names)} or {last}"
    plain = name.lower().removeprefix("fused")
    if plain in _NOT_ELEMENTWISE:
        return (
            f"{name} is not elementwise: it needs whole parameters or their gradients' sparsity, and a store updates "
            f"ranges of parameters; {instead}"
        )
    if plain in _COMPRESSED:
        return (
            f"{name} exchanges compressed moments between ranks, and a store updates with whole gradients; use AdamW, "
            "and set communication_data_type to send less"
        )
    if plain in _MUP:
        return (
            f"{name} computes the rates of parameter groups from the model's widths; pass parameter groups with these "
            f"rates to initialize(), and use {_MUP[plain]}"
        )
    return f"{name} is none of the optimizers that the store runs; {instead}"
