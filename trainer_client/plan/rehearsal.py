"""The rehearsal of a step: forward and backward over fake tensors, which yields the operations and the peak.

The rehearsal runs the real model with its hooks and autograd, on torch's FakeTensors, which have no values and no
memory. This module counts the bytes that real tensors would take. It must never run an operation on real values,
because probe.py does so to time the operations.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from trainer_client.errors import ConfigError
from trainer_client.plan.boundaries import OffloadRule, RehearsedBoundaries
from trainer_client.plan.heap import Heap
from trainer_client.plan.model import build
from trainer_client.training.step.precision import PrecisionPolicy, cast_floating_inputs

# The number of steps that a plan replays in the modelled heap. After them, the holes of the heap no longer change.
_STEPS_OF_A_HEAP = 3


@dataclass(frozen=True, slots=True)
class RehearsedTensor:
    """The shape, strides and dtype of a tensor among the arguments of an operation; it stands for the tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedCall:
    """One call of an operator, without values.

    Attributes:
        name: the operator and its overload, as `aten.addmm.default`.
        text: name and arguments as text; calls with the same text are equal.
        arguments: the positional and the named arguments, in which a RehearsedTensor stands for a tensor.
    """

    name: str = field(compare=False)
    text: str
    arguments: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Allocated:
    """An event of a rehearsal: the block of memory with this number and size was allocated."""

    block: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """An event of a rehearsal: the block of memory with this number was freed."""

    block: int


@dataclass(frozen=True, slots=True)
class GradientComputed:
    """An event of a rehearsal: the backward has computed the gradient of the parameter with this FQN."""

    fqn: str


Event: TypeAlias = Allocated | Freed | GradientComputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The operations and the memory of one micro-batch on a rank.

    Attributes:
        operations: how often each operation is called in forward and backward.
        flops: floating-point operations of the products of matrices, forward and backward.
        events: the allocations, the frees and the computed gradients, in the order in which they happened.
        boundaries: the bytes of each boundary of an activation checkpoint that moves to the store, oldest first; empty
            if all stay on the device.
        saved_boundary_bytes: the bytes of all boundaries; 0 if none may leave the device.
        again_boundary_bytes: the bytes of the boundaries that are freed in the forward and computed again in the
            backward.
    """

    operations: Mapping[RehearsedCall, int]
    flops: int
    events: Sequence[Event]
    boundaries: Sequence[int] = ()
    saved_boundary_bytes: int = 0
    again_boundary_bytes: int = 0

    def peak_bytes(self, rule: GradientRule, *, in_heap: bool) -> int:
        """Return the most bytes of activations, temporary results and gradients at once.

        Args:
            rule: gives the bytes that gradients take.
            in_heap: whether the memory that malloc keeps after it was freed (heap.py) is included, as it is after three
                steps. If false, only live tensors are counted.
        """
        memory = Heap() if in_heap else LiveBytes()
        for step in range(_STEPS_OF_A_HEAP if in_heap else 1):
            self._replay(rule, memory, is_first=step == 0)
        return memory.peak

    def _replay(self, rule: GradientRule, memory: Heap | LiveBytes, *, is_first: bool) -> None:
        """Allocate and free in `memory` what a step does: forward, backward, and the hand-over of the gradients."""
        gradients = _Gradients(rule, memory)
        live: set[int] = set()
        for event in self.events:
            match event:
                case Allocated(block, nbytes):
                    memory.allocate(block, nbytes)
                    live.add(block)
                case Freed(block):
                    memory.free(block)
                    live.discard(block)
                case GradientComputed(fqn):
                    gradients.take(fqn)
        for block in live:
            memory.free(block)
        gradients.hand_over(keep=is_first)


class _Gradients:
    """Allocates and frees the gradients of one rehearsed step in a Heap or LiveBytes, with the sizes of a rule."""

    def __init__(self, rule: GradientRule, memory: Heap | LiveBytes) -> None:
        self._rule = rule
        self._memory = memory
        self._waiting: dict[str, set[str]] = {}
        for fqn, group in rule.group_of.items():
            self._waiting.setdefault(group, set()).add(fqn)
        self._full: set[str] = set()
        self._partitions: set[str] = set()

    def take(self, fqn: str) -> None:
        """Allocate the buffers of the parameter's group for its gradient, unless they are allocated already.

        If the rule says so, the buffer of whole gradients is freed once the group has all of its gradients.
        """
        group = self._rule.group_of.get(fqn)
        if group is None:
            return
        if group not in self._partitions:
            self._partitions.add(group)
            self._memory.allocate(("partition", group), self._rule.partition_bytes[group])
        # The backward may compute a gradient after its group was reduced and the group's buffer was freed, because
        # blocks that are computed again may share a weight. The buffer is then allocated once more.
        if group not in self._full:
            self._full.add(group)
            self._memory.allocate(("full", group), self._rule.full_bytes[group])
        self._waiting[group].discard(fqn)
        if not self._waiting[group] and self._rule.is_reduced_at_once:
            self._full.discard(group)
            self._memory.free(("full", group))

    def hand_over(self, *, keep: bool) -> None:
        """Free all gradients, as at the end of a step, when the trainer hands them over to the store.

        If `keep` is true, the copies that the trainer keeps of them are allocated before the originals are freed.
        """
        for group in self._full:
            self._memory.free(("full", group))
        for group, nbytes in self._rule.kept_bytes.items() if keep else ():
            self._memory.allocate(("kept", group), nbytes)
        for group in self._partitions:
            self._memory.free(("partition", group))


class LiveBytes:
    """Counts the bytes of live blocks, and their peak, without a model of malloc. It has the methods of Heap."""

    def __init__(self) -> None:
        self.peak = self._now = 0
        self._blocks: dict[Hashable, int] = {}

    def allocate(self, name: Hashable, nbytes: int) -> None:
        """Add the bytes of a block to the sum."""
        self._blocks[name] = nbytes
        self._now += nbytes
        self.peak = max(self.peak, self._now)

    def free(self, name: Hashable) -> None:
        """Subtract the bytes of a block from the sum."""
        self._now -= self._blocks.pop(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRule:
    """The rule that gives the bytes of gradients on a rank's device during a backward pass.

    Attributes:
        group_of: for the FQN of each trained parameter, the name of its flat group.
        full_bytes: for each group, the bytes of the buffer for whole gradients, which exists until the group is
            reduced; 0: there is no such buffer.
        partition_bytes: for each group, the bytes of this rank's part of the gradient, which stays until the step ends.
        kept_bytes: for each group, the bytes of the copy of the gradient that the trainer keeps, from the end of the
            first step on, in case the daemon is restarted.
        is_reduced_at_once: whether a group's buffer is freed as soon as all gradients of the group were computed.
    """

    group_of: Mapping[str, str]
    full_bytes: Mapping[str, int]
    partition_bytes: Mapping[str, int]
    kept_bytes: Mapping[str, int]
    is_reduced_at_once: bool


class _Live(TorchDispatchMode):
    """A torch mode that records the storages that are allocated and freed, and the calls of operators.

    It counts floating-point operations by torch's table (`flop_registry`). torch's FlopCounterMode is not used, because
    it hooks the modules, and its hooks keep the memory of checkpointed parts until the backward pass is over.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.events: list[Event] = []
        self.operations: Counter[RehearsedCall] = Counter()
        # For each storage that is alive, by its address: the number that stands for the storage in the events. An
        # address alone does not identify a storage, because a later storage may get the same address.
        self._seen: dict[int, int] = {}
        self._numbers = itertools.count()

    def know(self, tensor: torch.Tensor) -> None:
        """Give a number to the storage of a tensor that exists before the forward, and do not count its bytes."""
        self._seen[tensor.untyped_storage()._cdata] = next(self._numbers)

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, which no other storage gets; None for a storage that was not seen."""
        return self._seen.get(storage._cdata)

    def note_gradient(self, fqn: str) -> None:
        """Add the event that the backward has computed the gradient of the parameter called `fqn`."""
        self.events.append(GradientComputed(fqn))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (count := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self.flops += int(count(*args, **kwargs, out_val=result))
        if not func.is_view and func.namespace != "prim":
            self.operations[_operation(func, args, kwargs)] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen or not nbytes:
            return
        block = self._seen[key] = next(self._numbers)
        self.events.append(Allocated(block, nbytes))
        weakref.finalize(storage, self._forget, key, block)

    def _forget(self, key: int, block: int) -> None:
        self._seen.pop(key, None)
        self.events.append(Freed(block))


def rehearse(
    builder: Callable[[], nn.Module],
    batch: Callable[[nn.Module], Mapping[str, torch.Tensor]],
    dtype: torch.dtype | None,
    offload: OffloadRule | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> Rehearsal:
    """Run forward and backward of one micro-batch on tensors without memory, and return what they would do.

    Args:
        builder: builds the model.
        batch: returns the arguments of the model's forward.
        dtype: the dtype to which parameters and floating-point arguments are converted; None: each keeps its own.
        offload: decides which boundaries of activation checkpoints leave the device; None: all stay.
        autocast_dtype: the dtype of `torch.autocast` around the forward; None: there is none.

    Raises:
        ConfigError: the model cannot be run without values, or returns no loss.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(builder, torch.device("cpu"))
        _leave_meta(model)
        if dtype is not None:
            _convert(model, dtype)
        model.train()
        inputs = dict(batch(model))
        if dtype is not None:
            inputs = cast_floating_inputs(inputs, dtype)
        live = _Live()
        for tensor in (*model.parameters(), *model.buffers(), *inputs.values()):
            live.know(tensor)
        _install(model, live)
        boundaries = None if offload is None else RehearsedBoundaries(offload, live.number_of, model)
        try:
            with live:
                with nullcontext() if boundaries is None else boundaries.saving(), _autocast(autocast_dtype):
                    output = model(**inputs)
                loss = _loss_of(output)
                del output
                loss.backward()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the model's forward and backward cannot be run without values ({type(error).__name__}: {error}): "
                "give other arguments of forward by --inputs, or leave out what depends on values"
            ) from error
        del loss
    return Rehearsal(
        operations=dict(live.operations),
        flops=live.flops,
        events=tuple(live.events),
        boundaries=() if boundaries is None else tuple(boundaries.moved),
        saved_boundary_bytes=0 if boundaries is None else boundaries.saved_bytes,
        again_boundary_bytes=0 if boundaries is None else boundaries.again_bytes,
    )


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return the context in which a forward is rehearsed: autocast in `dtype`, or no autocast if it is None."""
    return PrecisionPolicy(compute_dtype=None, autocast_dtype=dtype).autocast(torch.device("cpu"))


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all parameters by parameters of `dtype`; tied parameters stay tied.

    `Module.to` cannot convert tensors without memory.
    """
    converted: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in converted:
                values = torch.empty_like(parameter, dtype=dtype)
                converted[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(module, name, converted[id(parameter)])


def _leave_meta(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake tensors of the CPU. Tied parameters and buffers stay tied."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in moved:
                    values = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
                held[name] = moved[id(tensor)]  # type: ignore[assignment]


def _install(model: nn.Module, live: _Live) -> None:
    """Install hooks that note each gradient when it is computed and remove it, as the engine does."""

    def taken(fqn: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None
            live.note_gradient(fqn)

        return take

    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(taken(fqn))


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss from the output of a model's forward. It can raise ConfigError."""
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise ConfigError(f"the model returns a {type(output).__name__} without a loss: give --inputs with labels")
    return loss if loss.dim() == 0 else loss.float().mean()


def _operation(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RehearsedCall:
    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return RehearsedTensor(tuple(map(int, value.shape)), tuple(map(int, value.stride())), value.dtype)
        return value

    described = tree_map(describe, (args, kwargs))
    return RehearsedCall(name=str(function), text=f"{function}{described!r}", arguments=described)
