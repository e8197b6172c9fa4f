"""The arguments of forward for a rehearsal: a language model's, or those that a function of the user returns.

This module must never run the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from trainer_client.errors import ConfigError
from trainer_client.plan.model import import_named

Batch = Callable[[int, int], Mapping[str, torch.Tensor]]


def make_batch(model: nn.Module, inputs: str | None) -> Batch:
    """Return a function of (samples, tokens) that makes the arguments for a rehearsed forward of the model.

    Args:
        inputs: MODULE:CALLABLE, the user's function of (samples, tokens); None for a language model.

    Raises:
        ConfigError: there is no such function, or the model takes other arguments than input_ids and labels.
    """
    if inputs is not None:
        try:
            found: Batch = import_named(inputs)
        except ConfigError as error:
            raise ConfigError(f"--inputs {error}") from None
        if not callable(found):
            raise ConfigError(f"--inputs {inputs} is a {type(found).__name__}: name a function of (samples, tokens)")
        return lambda samples, tokens: _made(found, inputs, samples, tokens)
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names or "labels" not in names:
        raise ConfigError(
            f"the forward of {type(model).__name__} does not take input_ids and labels: give --inputs MODULE:CALLABLE, "
            "a function of (samples, tokens) that returns its arguments by name"
        )

    words = getattr(getattr(model, "config", None), "vocab_size", 1)

    def language(samples: int, tokens: int) -> Mapping[str, torch.Tensor]:
        # The tokens of a planned input differ from one another, so that a pass reads many rows of an embedding, as in
        # training.
        ids = torch.arange(samples * tokens).reshape(samples, tokens) % words
        return {"input_ids": ids, "labels": ids}

    return language


def _made(function: Batch, inputs: str, samples: int, tokens: int) -> Mapping[str, torch.Tensor]:
    """Return the arguments of forward that the user's function returns. It can raise ConfigError."""
    try:
        made = function(samples, tokens)
    except Exception as error:
        raise ConfigError(f"--inputs {inputs} has raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Mapping) or not all(isinstance(one, torch.Tensor) for one in made.values()):
        raise ConfigError(
            f"--inputs {inputs} returns no mapping of names to tensors: return forward's arguments by name"
        )
    return made
