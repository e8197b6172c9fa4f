"""The loss of a causal language model of transformers, computed in chunks of tokens, on an unchanged model.

This module owns the functions that take the place of the head's forward and of the loss function while the model
trains. It must never compute the loss itself: chunked_loss.py does.

[Note: how the logits stay away] A causal language model of transformers calls its head and passes the result and the
labels to `self.loss_function`. While it trains with labels, the head here returns a tensor without elements instead,
and the loss function computes the loss from the hidden states that the head was given. If the model changes the logits
in between, or does not call the loss function, that is an error, because the loss would be another one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from trainer_client.errors import ConfigError
from trainer_client.training.model.chunked_loss import IGNORE_INDEX, chunked_cross_entropy
from trainer_client.training.model.stand_in import StandIn, only_for

_KEY = "paramserver.tiling.loss_tokens"
# The name of the loss function of transformers that is replaced.
_LOSS = "ForCausalLMLoss"


class CausalLoss:
    """The chunked loss of one model, from construction until `remove`.

    Args:
        model: a model that is, or has, one causal language model of transformers.
        tokens: of how many tokens logits are made at once.

    Raises:
        ConfigError: the model has no such model or several, or its loss or its head is another one.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._tokens = tokens
        self._model = _find(model)
        self._head: nn.Module = self._model.get_output_embeddings()
        # The hidden states and the tensor that the head has returned in their place, while a forward is under way.
        self._deferred: tuple[torch.Tensor, torch.Tensor] | None = None
        self._defers = False
        self._was_computed = False
        self._head_forward: Callable[..., torch.Tensor] = self._head.forward
        self._had_forward = "forward" in vars(self._head)
        self._loss_function: Callable[..., torch.Tensor] = self._model.loss_function
        self._had_loss_function = "_loss_function" in vars(self._model)
        self._parameters = inspect.signature(self._model.forward)
        self._head.forward = StandIn(self._head_forward, self._defer_logits)
        self._model.loss_function = StandIn(self._loss_function, self._compute)
        self._handles: list[RemovableHandle] = [
            self._model.register_forward_pre_hook(only_for((self._model,), self._begin), with_kwargs=True),
            self._model.register_forward_hook(only_for((self._model,), self._end), always_call=True),
        ]

    def remove(self) -> None:
        """Give the model its own head and loss function back."""
        for handle in self._handles:
            handle.remove()
        if self._had_forward:
            self._head.forward = self._head_forward
        else:
            vars(self._head).pop("forward", None)
        if self._had_loss_function:
            self._model.loss_function = self._loss_function
        else:
            vars(self._model).pop("_loss_function", None)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = self._parameters.bind_partial(*args, **kwargs).arguments
        self._defers = module.training and given.get("labels") is not None
        self._was_computed = False

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        was_deferred = self._deferred is not None and not self._was_computed
        self._deferred, self._defers = None, False
        if not was_deferred:
            return
        why = (
            f"{_KEY}: a {type(module).__name__} computes its loss without its loss_function: set the key to null, or "
            "call trainer_client.chunked_cross_entropy yourself"
        )
        # Most losses of a model's own fail, because there are no logits, and torch calls this hook meanwhile.
        if (error := sys.exception()) is not None:
            error.add_note(why)
        else:
            raise ConfigError(why)

    def _defer_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Stand in for the head's forward."""
        if not self._defers:
            return self._head_forward(hidden)
        logits = hidden.new_empty((*hidden.shape[:-1], 0))
        self._deferred = (hidden, logits)
        return logits

    def _compute(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand in for the model's loss function, with the arguments of ForCausalLMLoss."""
        if self._deferred is None:
            return self._loss_function(logits, labels, *args, **kwargs)
        hidden, expected = self._deferred
        if logits is not expected:
            raise ConfigError(
                f"{_KEY}: a {type(self._model).__name__} changes the logits between its head and its loss, so the loss "
                "cannot be computed from the hidden states: set the key to null"
            )
        self._was_computed = True
        return self._chunked(hidden, labels, *args, **kwargs)

    def _chunked(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            # The model predicts the token after each one.
            assert labels is not None, "the forward was given labels"
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = chunked_cross_entropy(
            hidden,
            self._head,
            shift_labels,
            tokens=self._tokens,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        if num_items_in_batch is None:
            return loss
        count = num_items_in_batch
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)


def _find(model: nn.Module) -> Any:
    """Return the causal language model in a model."""
    found: list[tuple[Any, nn.Module]] = []
    for module in model.modules():
        # Wrappers, such as those of PEFT, have the attributes of the model within them, but no class that has them.
        if not (hasattr(type(module), "loss_function") and hasattr(type(module), "get_output_embeddings")):
            continue
        loss: Any = module.loss_function
        find_head: Any = module.get_output_embeddings
        if getattr(loss, "__name__", "") == _LOSS and callable(find_head) and (head := find_head()) is not None:
            found.append((module, head))
    if len(found) != 1:
        raise ConfigError(
            f"{_KEY} is for a model with one causal language model of transformers whose loss is {_LOSS}, and this "
            f"model has {len(found)}: set the key to null, or call trainer_client.chunked_cross_entropy yourself"
        )
    module, head = found[0]
    if type(head).forward is not nn.Linear.forward:
        raise ConfigError(f"{_KEY}: the head of this model is a {type(head).__name__}, not a Linear: set it to null")
    return module
