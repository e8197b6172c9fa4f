"""The choice of the model and the optimizer among the objects that one call of `prepare` gets.

This module owns the rules that say which objects can be trained together, and the errors for other objects. It must
never change an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_client.accelerate.optimizer import EngineOptimizer
from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError

_TOGETHER = "write `model, optimizer = accelerator.prepare(model, optimizer)`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The objects of which one call of `prepare` makes an engine.

    Attributes:
        objects: all objects of the call.
        model: the model to train.
        optimizer: the model's optimizer: one of torch, or a DummyOptim.
        scheduler: the schedule in the call: one of torch, or a DummyScheduler; None: there is none.
    """

    objects: Sequence[Any]
    model: nn.Module
    optimizer: Any
    scheduler: Any

    @classmethod
    def of(cls, objects: Sequence[Any], *, has_engine: bool) -> Selection | None:
        """Return the selection among `objects`; None if there is no optimizer among them.

        Args:
            has_engine: whether a model was prepared for training already.

        Raises:
            ConfigError: there are several optimizers, a second one after an earlier call, or not exactly one model to
                train.
        """
        optimizers = [one for one in objects if _is_optimizer(one)]
        if not optimizers:
            return None
        models = [one for one in objects if isinstance(one, nn.Module) and not isinstance(one, Engine) and _trains(one)]
        if has_engine:
            raise ConfigError(
                "prepare() got a second optimizer: one Accelerator trains one model, with one optimizer; call "
                "accelerator.free_memory() before another one"
            )
        if len(optimizers) > 1:
            raise ConfigError(
                f"prepare() got {len(optimizers)} optimizers: make one, with a parameter group for each set of "
                "hyper-parameters"
            )
        if not models:
            raise ConfigError(f"prepare() got an optimizer without its model: {_TOGETHER}, both in one call")
        if len(models) > 1:
            names = " and ".join(type(model).__name__ for model in models)
            raise ConfigError(
                f"prepare() got {len(models)} models with trainable parameters ({names}): one Accelerator trains one "
                "model. To train them all, make them submodules of one nn.Module; a model that is not trained is "
                "prepared by itself, or after model.requires_grad_(False)"
            )
        _check_parameters(models[0], optimizers[0])
        schedulers = [one for one in objects if isinstance(one, LRScheduler | DummyScheduler)]
        return cls(
            objects=objects,
            model=models[0],
            optimizer=optimizers[0],
            scheduler=schedulers[0] if schedulers else None,
        )

    def batch_size(self, parts: int) -> int | None:
        """Return the smallest batch size of the call's data loaders, divided by `parts`; None if no loader has one."""
        sizes = [one.batch_size for one in self.objects if isinstance(one, DataLoader) and one.batch_size]
        return max(1, min(sizes) // parts) if sizes else None

    def replaced(self, replacements: Mapping[int, Any]) -> tuple[Any, ...]:
        """Return the objects of the call in their order, with a replacement for each whose `id` `replacements` has."""
        return tuple(replacements.get(id(one), one) for one in self.objects)


def _is_optimizer(one: Any) -> bool:
    return isinstance(one, torch.optim.Optimizer | DummyOptim) and not isinstance(one, EngineOptimizer)


def _trains(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _check_parameters(model: nn.Module, optimizer: Any) -> None:
    """Raise ConfigError if the optimizer has a parameter that the model does not have."""
    known = {id(parameter) for parameter in model.parameters()}
    if strangers := [tensor for tensor in _parameters(optimizer) if id(tensor) not in known]:
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that are not those of the {type(model).__name__} that is "
            f"prepared with it, the first of shape {list(strangers[0].shape)}: make it from this model, as in "
            "torch.optim.AdamW(model.parameters())"
        )


def _parameters(optimizer: Any) -> Iterable[torch.Tensor]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return chain.from_iterable(group["params"] for group in optimizer.param_groups)
    # A DummyOptim keeps the object of parameters that it was given, which may be an iterator that can be used only
    # once. So its parameters are not read here, and the engine checks them.
    return ()
