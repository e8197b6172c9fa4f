"""The rehearsal of a step: forward and backward over tensors without memory, which yields the operations and the peak.

The model, its hooks and autograd are the real ones; only values are missing. This module owns the count of live bytes.
It must never run an operation on real values: probe.py times the operations.
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

# The number of steps after which the holes of the heap no longer change.
_STEPS_OF_A_HEAP = 3


@dataclass(frozen=True, slots=True)
class RehearsedTensor:
    """A tensor of an operation: its shape, strides and dtype."""

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
    """A block of this number and size was allocated in a pass."""

    block: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Freed:
    """The block of this number was freed."""

    block: int


@dataclass(frozen=True, slots=True)
class GradientComputed:
    """The gradient of the parameter with this FQN was computed."""

    fqn: str


Event: TypeAlias = Allocated | Freed | GradientComputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The operations and the memory of one micro-batch on a rank.

    Attributes:
        operations: how often each operation is called in forward and backward.
        flops: floating-point operations of the products of matrices, forward and backward.
        events: the changes of memory and the gradients, in their order.
        boundaries: the bytes of each boundary of an activation checkpoint that moves to the store, oldest first; empty
            if all stay on the device.
        saved_boundary_bytes: the bytes of all boundaries, if some may leave.
        again_boundary_bytes: the bytes of those that are freed in the forward and computed again in the backward.
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
            rule: gives the bytes of gradients.
            in_heap: whether the memory that malloc keeps (heap.py) is included, as it is after three steps; otherwise
                only live tensors are counted.
        """
        memory = Heap() if in_heap else LiveBytes()
        for step in range(_STEPS_OF_A_HEAP if in_heap else 1):
            self._replay(rule, memory, is_first=step == 0)
        return memory.peak

    def _replay(self, rule: GradientRule, memory: Heap | LiveBytes, *, is_first: bool) -> None:
        """Replay a step: a pass, and then the hand-over of the gradients."""
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
    """The gradients of one step, in the memory that a rule gives them."""

    def __init__(self, rule: GradientRule, memory: Heap | LiveBytes) -> None:
        self._rule = rule
        self._memory = memory
        self._waiting: dict[str, set[str]] = {}
        for fqn, group in rule.group_of.items():
            self._waiting.setdefault(group, set()).add(fqn)
        self._full: set[str] = set()
        self._partitions: set[str] = set()

    def take(self, fqn: str) -> None:
        """Add the gradient of a parameter to the gradients of its group."""
        group = self._rule.group_of.get(fqn)
        if group is None:
            return
        if group not in self._partitions:
            self._partitions.add(group)
            self._memory.allocate(("partition", group), self._rule.partition_bytes[group])
        # A gradient may come after the group was reduced, because blocks that are computed again may share a weight.
        if group not in self._full:
            self._full.add(group)
            self._memory.allocate(("full", group), self._rule.full_bytes[group])
        self._waiting[group].discard(fqn)
        if not self._waiting[group] and self._rule.is_reduced_at_once:
            self._full.discard(group)
            self._memory.free(("full", group))

    def hand_over(self, *, keep: bool) -> None:
        """Free all gradients, after copies of them were made if `keep` is true."""
        for group in self._full:
            self._memory.free(("full", group))
        for group, nbytes in self._rule.kept_bytes.items() if keep else ():
            self._memory.allocate(("kept", group), nbytes)
        for group in self._partitions:
            self._memory.free(("partition", group))


class LiveBytes:
    """The sum of blocks that are allocated, with the methods of Heap."""

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
        full_bytes: for each group, the bytes of the buffer for whole gradients, until the group is reduced; 0: there is
            no such buffer.
        partition_bytes: for each group, the bytes of this rank's part, which stays until the step ends.
        kept_bytes: for each group, the bytes of the copy that the trainer keeps, from the first step on, in case the
            daemon is restarted.
        is_reduced_at_once: whether a group's buffer is free as soon as all its gradients were computed.
    """

    group_of: Mapping[str, str]
    full_bytes: Mapping[str, int]
    partition_bytes: Mapping[str, int]
    kept_bytes: Mapping[str, int]
    is_reduced_at_once: bool


class _Live(TorchDispatchMode):
    """A torch mode that records the storages that are allocated and freed, and the calls of operators.

    It counts operations by torch's table itself. torch's FlopCounterMode hooks the modules, and these hooks keep the
    memory of checkpointed parts until the backward pass is over.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.events: list[Event] = []
        self.operations: Counter[RehearsedCall] = Counter()
        # The number of each storage that is alive, by its address.
        self._seen: dict[int, int] = {}
        self._numbers = itertools.count()

    def know(self, tensor: torch.Tensor) -> None:
        """Note a tensor whose bytes are not counted."""
        self._seen[tensor.untyped_storage()._cdata] = next(self._numbers)

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of a storage, which no other one gets; None if it is not counted."""
        return self._seen.get(storage._cdata)

    def note_gradient(self, fqn: str) -> None:
        """Note that a parameter's gradient was computed."""
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
    """Run forward and backward of one micro-batch without memory.

    Args:
        builder: builds the model.
        batch: returns the arguments of the model's forward.
        dtype: the dtype of the parameters and of floating-point arguments; None: their own.
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
    """Return the context of a forward on the CPU: autocast in a dtype, or an empty one if it is None."""
    return PrecisionPolicy(compute_dtype=None, autocast_dtype=dtype).autocast(torch.device("cpu"))


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace all parameters by ones of `dtype`; tied parameters stay tied.

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
    """Replace parameters and buffers that the builder has put on the meta device; tied ones stay tied."""
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
    """Remove each gradient as soon as it is computed, as the engine does."""

    def taken(fqn: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            parameter.grad = None
            live.note_gradient(fqn)

        return take

    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(taken(fqn))


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss in what a model's forward returned. It can raise ConfigError."""
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
