"""The plain state: what a file of the model has besides the stored parameters, such as names of tied ones and buffers.

It also has the configs of adapters, and the parameters without elements, of which the store has no bytes.

Each commit carries the plain state in its client state, so that a step can be exported from the store alone. This
module must never keep a copy of a buffer, because each commit has the values at the moment of the commit.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainer_client.training.model.parameters import ModelParameter

# The most bytes of the model's buffers in the client state of a commit. A client state may have 2 MiB of text
# (paramserver/rpc/convert.py), and also has the user's values. A model with more bytes of buffers keeps the larger ones
# in slabs; see large_buffers.py.
MAX_BUFFER_BYTES = 256 << 10
# The end of the name that torch gives a module's extra state in a state dict.
_EXTRA_STATE = "_extra_state"


class PlainState:
    """Makes the plain state of one model for each commit: names of tied parameters, buffers and configs of adapters.

    Args:
        model: the model.
        parameters: all parameters of the model, each with the name under which the store has it.
        in_slabs: the names of the buffers that have a slab of their own; see large_buffers.py.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[ModelParameter], in_slabs: Container[str] = frozenset()
    ) -> None:
        self._model = model
        self._in_slabs = in_slabs
        parameters = tuple(parameters)
        self._empty = {p.fqn: torch.empty(p.shape, dtype=p.tensor.dtype) for p in parameters if not p.shape.numel()}
        stored = {id(parameter.tensor): parameter.fqn for parameter in parameters}
        known = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._aliases: dict[str, str] = {}
        self._buffers: list[str] = []
        # The names of the entries of the model's state dict that are no parameters and no buffers: a module adds them
        # by itself, for example by `get_extra_state`.
        self._foreign: list[str] = []
        self._adapters = _adapter_configs(model)
        for name, entry in model.state_dict(keep_vars=True).items():
            fqn = stored.get(id(entry))
            if fqn is None:
                (self._buffers if name in known else self._foreign).append(name)
            elif fqn != name:
                self._aliases[name] = fqn

    @property
    def names(self) -> list[str]:
        """The names of entries of a plain state dict that are no parameters: buffers, and entries that modules add."""
        return [*self._buffers, *self._foreign]

    def larger_buffers(self, committed: Container[str]) -> dict[str, torch.Tensor]:
        """Return the buffers that are too large for the client state of a commit, by name and not copied.

        LargeBuffers stores them in a slab, and a checkpoint writes them beside the buffers of the commit.

        Quantized and meta tensors are left out, because they have no plain bytes.

        Args:
            committed: the names of the buffers that the commit has.
        """
        buffers = {name: self._model.get_buffer(name).detach() for name in self._buffers if name not in committed}
        return {name: buffer for name, buffer in buffers.items() if not buffer.is_quantized and not buffer.is_meta}

    def to_commit(self) -> dict[str, Any]:
        """Return the plain state for the client state of a commit.

        Returns:
            "aliases": for each further name of a tied parameter, the name under which the store has the parameter;
            "buffers": the values of buffers, by name, in the order of the state dict as long as they fit into
            MAX_BUFFER_BYTES together; "left_out": the names of all other entries of the state dict that are not
            parameters and have no slab; "adapters": the configs of peft's adapters in JSON, by name; "empty": the
            parameters without elements, by name, in the model's order.
        """
        buffers: dict[str, torch.Tensor] = {}
        left_out = list(self._foreign)
        room = MAX_BUFFER_BYTES
        for name in self._buffers:
            if name in self._in_slabs:
                continue
            buffer = self._model.get_buffer(name)
            if buffer.nbytes <= room:
                buffers[name] = buffer.detach()
                room -= buffer.nbytes
            else:
                left_out.append(name)
        return {
            "aliases": self._aliases,
            "buffers": buffers,
            "left_out": left_out,
            "adapters": self._adapters,
            "empty": self._empty,
        }


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a `get_extra_state`, by the names of their extra states in the model's state dict.

    If the model has a module under several names, the module is in the result once for each name.
    """
    return {
        f"{fqn}.{_EXTRA_STATE}" if fqn else _EXTRA_STATE: module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _adapter_configs(model: nn.Module) -> dict[str, str]:
    """Return the configs of the adapters of a model of peft, as `save_pretrained` of peft writes them."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return {}
    # A set in a config of peft is written as a sorted list, as peft does. The enumerations in a config are strings, so
    # json can write them.
    return {
        name: json.dumps({**config.to_dict(), "inference_mode": True}, default=sorted, indent=2, sort_keys=True)
        for name, config in configs.items()
        if hasattr(config, "to_dict")
    }
