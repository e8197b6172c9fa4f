"""The segments of a model that activation checkpoints enclose, which can compute the boundary that follows them again.

The inputs of a checkpointed segment are boundaries, and its output is the next boundary, if the model passes it on as
it is. This module owns what it has noted of the newest segment: the module, its inputs, and the states of the random
generators and of autocast. It must never hold the bytes of a boundary.

[Note: which modules are segments] A segment is a watched module whose forward, and nothing else, is enclosed by a
checkpoint: the checkpoint's function is the module, its `__call__` as torch has it, which is what transformers' blocks
enclose, or a partial of one of these. If a checkpoint encloses another function that calls the module, the function may
do more, such as set a flag of the module, so the module is no segment. A checkpoint within the module's forward may
enclose any function, because the whole forward runs again. A module in a reentrant checkpoint is no segment, because
torch does not show its functions, nor is one in a checkpoint with contexts of the user's. The checkpoint must have
saved all inputs with gradients, so that keeping a segment's inputs keeps no activation in memory that torch would free.

[Note: the same values] A segment runs again as torch.utils.checkpoint runs it. It runs with gradients, because torch
chooses other kernels without them. It runs within a checkpoint, so that it keeps nothing for a backward pass. And it
runs with the generators, autocast and default device of its first forward.

[Note: segments and ranks] Where a unit is gathered by all ranks together, all of them must run the same segments again.
So which modules are segments, and which boundaries they can compute, follows from the order of the model's calls and
from which tensors it passes on, never from sizes or times, which differ between ranks. For example, `hidden[:, :n]` is
another tensor than `hidden`, also on a rank whose `n` is the length of the batch, so that both have the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, get_device_states, noop_context_fn, set_device_states
from torch.utils.hooks import RemovableHandle

from trainer_client.base.device import CPU
from trainer_client.training.model.stand_in import only_for
from trainer_client.training.model.transforms import is_transformed
from trainer_client.training.step.boundary import Again, Key, Saved
from trainer_client.training.step.tensor_tree import TensorTree

# The functions by which a checkpoint may call the module that it encloses. Each of them makes the module a segment.
_CALLS = (nn.Module.__call__, nn.Module._wrapped_call_impl, nn.Module._call_impl)

# Identifies a tensor: the key of its bytes, its first element, its shape and its strides.
_Place = tuple[Key, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor of a segment, from which the tensor is made again when the segment runs again.

    Attributes:
        packed: the object that the owner of the boundaries keeps for the tensor, such as a view of a boundary.
        requires_grad: whether autograd follows it.
    """

    packed: Any
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What a forward depends on besides its inputs: random generators, autocast by type of device, default device."""

    device: torch.device
    cpu_state: torch.Tensor
    device_numbers: list[int]
    device_states: list[torch.Tensor]
    autocast: Mapping[str, tuple[bool, torch.dtype, bool]]
    default_device: torch.device

    @classmethod
    def now(cls, device: torch.device) -> _Surroundings:
        numbers, states = get_device_states(torch.empty(0, device=device))
        return cls(
            device=device,
            cpu_state=torch.get_rng_state(),
            device_numbers=numbers,
            device_states=states,
            autocast={
                kind: (
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                    torch.is_autocast_cache_enabled(),
                )
                for kind in {CPU, device.type}
            },
            default_device=torch.get_default_device(),
        )

    def restore(self, restored: ExitStack) -> None:
        """Set generators, autocast and default device as they were in the forward, until `restored` is closed."""
        restored.enter_context(torch.random.fork_rng(self.device_numbers, device_type=self.device.type))
        self.restore_generators()
        for kind, (enabled, dtype, caches) in self.autocast.items():
            restored.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=caches))
        if torch.get_default_device() != self.default_device:
            restored.enter_context(self.default_device)

    def restore_generators(self) -> None:
        """Set the random generators to their states at the beginning of the forward."""
        torch.set_rng_state(self.cpu_state)
        set_device_states(self.device_numbers, self.device_states, device_type=self.device.type)


@dataclass(slots=True, kw_only=True)
class Segment:
    """A forward of a segment, which can be run again.

    Attributes:
        module: the module that runs again.
        inputs: its positional and keyword arguments, with an Input in the place of each tensor.
        surroundings: the states of random generators and autocast, which the result depends on, too.
        outputs: its output tensors with their versions; None in the place of one that cannot be computed again.
    """

    module: nn.Module
    inputs: tuple[Any, Any]
    surroundings: _Surroundings
    outputs: list[tuple[weakref.ref[torch.Tensor], int] | None]


@dataclass(slots=True, kw_only=True)
class _Forward:
    """A forward under way of a watched module, which may turn out to be a segment.

    Attributes:
        tensors: its input tensors, with their versions.
    """

    module: nn.Module
    inputs: tuple[Any, Any]
    tensors: list[tuple[torch.Tensor, int]]
    surroundings: _Surroundings


@dataclass(slots=True, kw_only=True)
class _Checkpoints:
    """What torch's checkpoints have done since the forward of a watched module ended.

    Attributes:
        function: the function that the last checkpoint encloses; None: there was no checkpoint, or torch does not show
            it.
        caller: the forward of a watched module that has called the last checkpoint; None: no such forward.
        saved: the places of the tensors that the checkpoints have saved.
    """

    function: Any = None
    caller: _Forward | None = None
    saved: set[_Place] = field(default_factory=set)


class Segments:
    """Watches the forwards of modules, and returns for a boundary what computes it again; see `note_saved`.

    Attributes:
        is_watching: whether forwards are recorded as segments. If not, no boundary can be computed again.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        pack: Callable[[torch.Tensor], Any],
        key_of: Callable[[torch.Tensor], Key | None],
    ) -> None:
        """Begin without modules; `watch` adds them.

        Args:
            device: the device of the model.
            pack: returns the object that is kept for an input of a segment.
            key_of: returns the identity of the bytes of a tensor; None for one that can be no boundary.
        """
        self.is_watching = False
        self._device = device
        self._pack = pack
        self._key_of = key_of
        self._checkpoints = _Checkpoints()
        self._running: _Forward | None = None
        self._newest: Segment | None = None
        # `_repeated`: the segment that is being run again, with its inputs; None if no segment is. `_results`: the
        # output tensors of that segment once it has returned.
        self._repeated: tuple[Segment, tuple[Any, Any]] | None = None
        self._results: tuple[torch.Tensor, ...] = ()
        self._handles: list[RemovableHandle] = []

    @property
    def is_running_again(self) -> bool:
        """Whether a segment is being run again, in a forward whose graph has no backward."""
        return self._repeated is not None

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Find which forwards of these modules are segments, by hooks; see [Note: which modules are segments]."""
        watched = frozenset(modules)
        enter, leave = (torch.compiler.disable(only_for(watched, hook)) for hook in (self._enter, self._leave))
        for module in watched:
            # The pre-hook `enter` is called before the user's pre-hooks. These may change the inputs, and are called
            # again when the segment runs again, so the inputs are noted before they are changed.
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                module.register_forward_hook(leave),
            ]

    def note_saved(self, tensor: torch.Tensor, checkpoint: FrameType) -> Again | None:
        """Record a tensor that the checkpoint of a frame saves, and return a function that computes the tensor again.

        Return None if the tensor is no output of the newest segment, or if an input of that segment is to be computed
        again itself. A segment computes only one of its outputs again.
        """
        self._checkpoints.function, self._checkpoints.caller = _function_of(checkpoint), self._running
        segment, place = self._newest, self._place_of(tensor)
        if place is None:
            return None
        self._checkpoints.saved.add(place)
        if segment is None or (number := _number_of(tensor, segment)) is None:
            return None
        inputs = (kept for kept in _inputs_of(segment) if isinstance(kept.packed, Saved))
        if any(kept.packed.boundary.again is not None for kept in inputs):
            return None
        segment.outputs.clear()
        return partial(self._run, segment, number)

    def forget(self) -> None:
        """Forget the newest segment, because the forward is over, so that no later tensor is taken for its output."""
        self._checkpoints = _Checkpoints()
        self._running = self._newest = None

    def close(self) -> None:
        """Remove the hooks from all watched modules. Idempotent."""
        self.forget()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._repeated is not None and self._repeated[0].module is module:
            segment, inputs = self._repeated
            # In the first forward, `_enter` has noted the inputs after the hooks that torch calls before it. Now torch
            # has called these hooks again, so they may have changed the inputs a second time and drawn random numbers.
            # So the noted inputs are used, and the random generators are set back.
            segment.surroundings.restore_generators()
            return inputs
        if not self.is_watching or is_transformed():
            return None
        self._running = None
        # Parameters are not among the tensors whose version counters are noted, because the hooks would take reading
        # the version counter of a released parameter for a use of the parameter.
        tensors = [each for each in TensorTree.of((args, kwargs)).tensors if not isinstance(each, nn.Parameter)]
        # Tensors that were made in inference mode have no version counters to compare later. So a forward with such
        # inputs is not noted, and does not become a segment.
        if torch.is_grad_enabled() and not any(tensor.is_inference() for tensor in tensors):
            self._running = _Forward(
                module=module,
                inputs=(args, kwargs),
                tensors=[(tensor, tensor._version) for tensor in tensors],
                surroundings=_Surroundings.now(self._device),
            )
        return None

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._repeated is not None and self._repeated[0].module is module:
            self._results = tuple(tensor.detach() for tensor in TensorTree.of(output).tensors)
        if not self.is_watching or is_transformed():
            return
        running, self._running, self._newest = self._running, None, None
        checkpoints, self._checkpoints = self._checkpoints, _Checkpoints()
        if running is not None and running.module is module and self._is_segment(running, checkpoints):
            self._newest = self._segment_of(running, output)

    def _is_segment(self, forward: _Forward, checkpoints: _Checkpoints) -> bool:
        """Return whether a forward that has ended is one of a segment; see [Note: which modules are segments]."""
        function = checkpoints.function
        if function is None or not (checkpoints.caller is forward or _is_call_of(function, forward.module)):
            return False
        if any(tensor._version != version for tensor, version in forward.tensors):
            return False
        followed = (tensor for tensor, _ in forward.tensors if tensor.requires_grad and not tensor.is_leaf)
        return checkpoints.saved.issuperset(map(self._place_of, followed))

    def _segment_of(self, forward: _Forward, output: Any) -> Segment:
        """Return the record of a forward as a segment, which can compute each tensor of `output` that was no input."""
        given = {self._place_of(tensor) for tensor, _ in forward.tensors}
        tensors = TensorTree.of(output).tensors
        places = map(self._place_of, tensors)
        return Segment(
            module=forward.module,
            inputs=tree_map_only(torch.Tensor, self._keep, forward.inputs),
            surroundings=forward.surroundings,
            outputs=[
                None if place is None or place in given else (weakref.ref(tensor), tensor._version)
                for place, tensor in zip(places, tensors, strict=True)
            ],
        )

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | Input:
        return tensor if isinstance(tensor, nn.Parameter) else Input(self._pack(tensor), tensor.requires_grad)

    def _place_of(self, tensor: torch.Tensor) -> _Place | None:
        if (key := self._key_of(tensor)) is None:
            return None
        return key, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()

    def _run(self, segment: Segment, number: int, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Run a segment again, and return the output tensor of this number, detached.

        `unpack` returns the tensor for which `pack` has returned its argument. What the forward raises is passed on.
        """

        def tensor_of(kept: Input) -> torch.Tensor:
            return unpack(kept.packed).detach().requires_grad_(kept.requires_grad)

        args, kwargs = tree_map_only(Input, tensor_of, segment.inputs)
        self._repeated = segment, (args, kwargs)
        try:
            with ExitStack() as restored:
                segment.surroundings.restore(restored)
                restored.enter_context(torch.enable_grad())
                # The module's class may have a `__call__` of its own. That method ran before the hook that noted the
                # inputs, and must not change the inputs twice. So `nn.Module.__call__` is called instead of it.
                checkpoint(partial(nn.Module.__call__, segment.module, **kwargs), *args, use_reentrant=False)
            return self._results[number]
        finally:
            self._repeated, self._results = None, ()


def _function_of(checkpoint: FrameType) -> Any:
    """Return the function that a checkpoint of torch encloses; None if it is reentrant, or has contexts of the user's.

    Args:
        checkpoint: a frame of torch's checkpoints. One of its callers is the function of torch that has the arguments
            `fn` and `context_fn`. If a version of torch gives these arguments other names, no module is a segment.
    """
    frame: FrameType | None = checkpoint
    while frame is not None and frame.f_code.co_filename == checkpoint.f_code.co_filename:
        names = frame.f_locals
        if "fn" in names and "context_fn" in names:
            return names["fn"] if names["context_fn"] is noop_context_fn else None
        frame = frame.f_back
    return None


def _is_call_of(function: Any, module: nn.Module) -> bool:
    """Return whether a function calls the module and does nothing else."""
    while isinstance(function, partial):
        if function.args:
            return function.args[0] is module and function.func in _CALLS
        function = function.func
    if function is module:
        return type(module).__call__ is nn.Module.__call__
    return getattr(function, "__self__", None) is module and getattr(function, "__func__", None) in _CALLS


def _number_of(tensor: torch.Tensor, segment: Segment) -> int | None:
    """Return which of the segment's outputs a tensor is, counted from 0; None if it is none, or was changed since."""
    for number, output in enumerate(segment.outputs):
        if output is not None and output[0]() is tensor and output[1] == tensor._version:
            return number
    return None


def _inputs_of(segment: Segment) -> list[Input]:
    found: list[Input] = []
    tree_map_only(Input, found.append, segment.inputs)
    return found
