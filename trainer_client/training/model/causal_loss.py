"""The loss of a causal language model of transformers, computed in chunks of tokens, without a change of the model.

This module owns the functions that replace the head's forward and the loss function while the model trains. It must
never compute the loss itself: chunked_loss.py does.

[Note: how the logits stay away] A causal language model of transformers calls its head and passes the result and the
labels to `self.loss_function`. While the model trains with labels, the replaced head returns a tensor without elements
instead of logits. The replaced loss function then computes the loss from the hidden states that the head was given. If
the model changes the logits before the loss, or does not call the loss function, an error is raised, because the loss
would be wrong.
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
# The name of the loss function in transformers that this module replaces by one that computes in chunks of tokens.
_LOSS = "ForCausalLMLoss"


class CausalLoss:
    """Has one causal language model compute its loss in chunks of tokens, from construction until `remove`.

    `Tiling.install` makes this object. See [Note: how the logits stay away].

    Args:
        model: a causal language model of transformers, or a model that contains one.
        tokens: of how many tokens logits are made at once.

    Raises:
        ConfigError: the model contains no causal language model or several, or its loss is not ForCausalLMLoss, or its
            head is no Linear.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._tokens = tokens
        self._model = _find(model)
        self._head: nn.Module = self._model.get_output_embeddings()
        # While a forward is under way: the hidden states that the head was given, and the tensor without elements that
        # the head has returned for them.
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
        # A model that computes its loss without its `loss_function` mostly fails, because the head has returned no
        # logits. torch calls this hook while that error is raised, so the hook adds its hint to the error as a note.
        if (error := sys.exception()) is not None:
            error.add_note(why)
        else:
            raise ConfigError(why)

    def _defer_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a tensor without elements in place of the head's logits, and keep `hidden` for `_compute`.

        The model calls this function as the head's forward. Without labels, it returns the head's logits.
        """
        if not self._defers:
            return self._head_forward(hidden)
        logits = hidden.new_empty((*hidden.shape[:-1], 0))
        self._deferred = (hidden, logits)
        return logits

    def _compute(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the hidden states that `_defer_logits` has kept.

        The model calls this function as its `loss_function`, with the arguments of ForCausalLMLoss. If no logits were
        left out, the model's own loss function computes the loss.
        """
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
            # A causal language model predicts the next token, so the label of a token is the token after it.
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
    """Return the causal language model that `model` is or contains; ConfigError if there is none or several."""
    found: list[tuple[Any, nn.Module]] = []
    for module in model.modules():
        # The attributes are looked up in the module's class and not in the module: an object that wraps a model, such
        # as PEFT's, passes on the attributes of the model within it, and is no causal language model itself.
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
