"""Building a model without its memory: what constructors compute is written down, and done later, a tensor at a time.

Owns the recipes. Must never hold a tensor's values: while a `Recorder` is active, what constructors make is on the meta
device, which has shapes and no bytes.

[Note: recipes] A recipe belongs to a storage, since views share what is written through any of them, and hangs at the
meta storage itself: it lives as long as a parameter, buffer or view needs it, and nobody keeps a table. It lists the
operations that wrote the storage, each with the recipes of what it read and how far they had come by then. To replay
one is to collect what it depends on and to run that in the order of construction. An operation that overwrites all of a
storage makes what it held before irrelevant, so that the default initialisation which a model's own one replaces is
never computed.

[Note: random numbers] Each random operation is replayed with a generator of its own, seeded by the recorder's seed and
the operation's number in the construction. The values of a tensor are therefore the same whoever replays it, in
whatever order, and whatever else is replayed: on every rank of any world size. They are always drawn on the CPU, whose
generator is the same everywhere. They are not those that construction without a recorder draws from one sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client.errors import DeferredInitError

_ATTRIBUTE = "paramserver_recipe"

_CPU = torch.device("cpu")
_META = torch.device("meta")

_aten = torch.ops.aten

# They make memory and write nothing: a storage without operations is replayed as zeros.
_ALLOCATIONS = frozenset(
    (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided)
)  # fmt: skip
# They give every element of `self` a value that does not depend on the one that it had.
_OVERWRITES = frozenset(
    (
        _aten.zero_,
        _aten.fill_,
        _aten.copy_,
        _aten.normal_,
        _aten.uniform_,
        _aten.random_,
        _aten.bernoulli_,
        _aten.exponential_,
        _aten.log_normal_,
        _aten.cauchy_,
        _aten.geometric_,
    )
)
# What they are for is the value.
_NEEDS_VALUE = frozenset((_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero))  # These bypass the dispatcher.
_CONVERSIONS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__))
_POSES = {torch.Tensor.is_meta.__get__: False, torch.Tensor.device.__get__: _CPU}  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Recipe:
    """Of one storage."""

    recorder: Recorder
    nbytes: int
    writes: list[Operation] = field(default_factory=list)

    def needed(self, steps: int) -> list[Operation]:
        """The first `steps` operations without those that a later one of them made irrelevant."""
        for index in range(steps - 1, -1, -1):
            if self.writes[index].overwrites:
                return self.writes[index:steps]
        return self.writes[:steps]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """An argument or a result that is on the meta device: which storage, and which part of it."""

    recipe: Recipe
    steps: int  # operations that had written the storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRef:
    """An argument that was there before; it must not change until it is used."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Attributes:
    number: in the construction; operations are replayed in this order.
    inputs: what its result depends on and is on the meta device.
    outputs: what it made, in the order of its tensor results; None for a result that is one of its arguments.
    overwrites: it writes one storage, all of it, whatever was there.
    """

    number: int
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: tuple[TensorRef, ...]
    outputs: tuple[TensorRef | None, ...]
    is_random: bool
    overwrites: bool

    def refs(self) -> Iterator[TensorRef]:
        """What it uses and makes."""
        yield from (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorRef))
        yield from (ref for ref in self.outputs if ref is not None)


class Recorder:
    """A context in which tensors are made on the meta device, with recipes. They say that they are on the CPU: nobody
    shall leave an initialisation out because there is no memory yet, as some functions of torch.nn.init do.

    An operation that needs a value (`.item()`, `bool(tensor)`, a shape that depends on data) gets it: the recipe is
    replayed at once, and its memory is given back. That costs time for large tensors (trunc_normal_ looks at what it
    drew), and nothing else.

    Args:
        seed: of all random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._is_fixed = False
        self._operations = 0
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Recording(self))
        self._modes.enter_context(_Posing(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def is_fixed(self) -> bool:
        """Whether the construction went by random numbers of this seed, so that there can be no other."""
        return self._is_fixed

    def reseed(self, seed: int) -> None:
        assert not self._is_fixed
        self._seed = seed

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of the construction without memory, and writes it down."""
        arguments = _tensors((args, kwargs))
        if arguments and not any(recipe_of(tensor) for tensor in arguments):
            return func(*args, **kwargs)  # torch.tensor, torch.from_numpy, and what was there before
        written = _written(func, args, kwargs)
        if func.overloadpacket in _NEEDS_VALUE or any(recipe_of(tensor) is None for tensor in written):
            return self.evaluate(func, args, kwargs)
        # Before it runs: it may be what gives an argument its values.
        refs = tree_map(lambda leaf: self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        try:
            result = _run_on_meta(func, args, kwargs)
        except RuntimeError as error:
            if not _fails_for_meta_only(error):
                raise
            if written:
                raise DeferredInitError(
                    f"{func} writes where a value says, which zero.Init cannot put off: replace it by an operation on "
                    "whole tensors (torch.where), or do it after initialize()"
                ) from error
            return self.evaluate(func, args, kwargs)
        self._record(func, refs, result, written, arguments)
        return result

    def _record(
        self, func: Any, refs: Any, result: Any, written: list[torch.Tensor], arguments: list[torch.Tensor]
    ) -> None:
        known = {tensor.untyped_storage()._cdata for tensor in arguments if recipe_of(tensor)}
        made = [None if t.untyped_storage()._cdata in known else self._new_ref(t) for t in _tensors(result)]
        new = [ref for ref in made if ref is not None]
        if func.overloadpacket in _ALLOCATIONS or not (written or new):
            return  # memory without values, or a view
        args, kwargs = refs
        overwrites = func.overloadpacket in _OVERWRITES and _is_whole(written[0])
        read = (args[1:], kwargs) if overwrites else refs
        operation = Operation(
            number=self._operations,
            function=func,
            args=args,
            kwargs=kwargs,
            inputs=tuple(leaf for leaf in tree_leaves(read) if isinstance(leaf, TensorRef)),
            outputs=tuple(made),
            is_random=torch.Tag.nondeterministic_seeded in func.tags,
            overwrites=overwrites or not written,
        )
        self._operations += 1
        refs_written = [*map(_ref_to, written), *new]
        for recipe in {id(ref.recipe): ref.recipe for ref in refs_written}.values():
            recipe.writes.append(operation)

    def _ref(self, tensor: torch.Tensor) -> TensorRef | GivenRef:
        return _ref_to(tensor) if recipe_of(tensor) else GivenRef(tensor, tensor._version)

    def _new_ref(self, tensor: torch.Tensor) -> TensorRef:
        storage = tensor.untyped_storage()
        setattr(storage, _ATTRIBUTE, Recipe(self, storage.nbytes()))
        return _ref_to(tensor)

    def evaluate(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an operation on values, now."""
        refs = [_ref_to(tensor) for tensor in _tensors((args, kwargs)) if recipe_of(tensor)]
        self._is_fixed |= any(operation.is_random for operation in _slice(refs))

        def value(leaf: Any) -> Any:
            return replay(leaf) if isinstance(leaf, torch.Tensor) and recipe_of(leaf) else leaf

        with _disable_current_modes():
            return func(*tree_map(value, args), **tree_map(value, kwargs))


class _Recording(TorchDispatchMode):
    """Every operation comes through here, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._recorder.dispatch(func, args, kwargs or {})


class _Posing(TorchFunctionMode):
    """Tensors with a recipe say where they will be, and give their values to Python."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _POSES and recipe_of(args[0]):
            return _POSES[func]
        if func in _CONVERSIONS and recipe_of(args[0]):
            return self._recorder.evaluate(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """The recipe of the storage that `tensor` shows; None if it was not made under a recorder."""
    with torch._C.DisableTorchFunction():
        recipe: Recipe | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if tensor.is_meta else None
        return recipe


@torch.no_grad()
def replay(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that has a recipe: new memory on the CPU, of its shape, strides and dtype.

    What is not initialised by the recipe is zero.
    """
    ref = _ref_to(tensor)
    storages: dict[int, torch.UntypedStorage] = {}
    operations = _slice([ref])
    last_use = {id(ref.recipe): len(operations)}
    for index, operation in enumerate(operations):
        for used in operation.refs():
            last_use[id(used.recipe)] = max(index, last_use.get(id(used.recipe), 0))
    state = torch.default_generator.get_state()
    try:
        for index, operation in enumerate(operations):
            _run(operation, ref.recipe.recorder.seed, storages)
            for used in operation.refs():
                if last_use[id(used.recipe)] == index:
                    storages.pop(id(used.recipe), None)
    finally:
        torch.default_generator.set_state(state)
    return ref.within(_storage_of(ref, storages))


def _run(operation: Operation, seed: int, storages: dict[int, torch.UntypedStorage]) -> None:
    def value(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return leaf.within(_storage_of(leaf, storages))
        if isinstance(leaf, GivenRef):
            if leaf.tensor._version != leaf.version:
                raise DeferredInitError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} that {operation.function} read under zero.Init was "
                    "changed later: leave it as it is until initialize() returns"
                )
            return leaf.tensor
        if isinstance(leaf, torch.device):
            return _CPU
        return None if isinstance(leaf, torch.Generator) else leaf

    if operation.is_random:
        digest = hashlib.sha256(f"{seed}/{operation.number}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    leaves = tree_leaves((operation.args, operation.kwargs))
    result = operation.function(*tree_map(value, operation.args), **tree_map(value, operation.kwargs))
    given = {leaf.tensor.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, GivenRef)}
    for ref, tensor in zip(operation.outputs, _tensors(result), strict=True):
        if ref is None:
            continue
        storage = tensor.untyped_storage()
        same_layout = (tuple(tensor.stride()), tensor.storage_offset()) == (ref.stride, ref.offset)
        if same_layout and storage._cdata not in given:
            storages[id(ref.recipe)] = storage
        else:
            ref.within(_storage_of(ref, storages)).copy_(tensor)


def _storage_of(ref: TensorRef, storages: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
    key = id(ref.recipe)
    if key not in storages:
        storages[key] = torch.zeros(ref.recipe.nbytes, dtype=torch.uint8).untyped_storage()
    return storages[key]


def _slice(refs: Iterable[TensorRef]) -> list[Operation]:
    """The operations that `refs` depend on, in the order of construction."""
    operations: dict[int, Operation] = {}
    seen: set[tuple[int, int]] = set()
    waiting = list(refs)
    while waiting:
        ref = waiting.pop()
        if (id(ref.recipe), ref.steps) in seen:
            continue
        seen.add((id(ref.recipe), ref.steps))
        for operation in ref.recipe.needed(ref.steps):
            if operation.number not in operations:
                operations[operation.number] = operation
                waiting.extend(operation.inputs)
    return [operations[number] for number in sorted(operations)]


def _ref_to(tensor: torch.Tensor) -> TensorRef:
    recipe = recipe_of(tensor)
    assert recipe is not None
    return TensorRef(
        recipe=recipe,
        steps=len(recipe.writes),
        dtype=tensor.dtype,
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def _run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
        return None if isinstance(leaf, torch.Generator) else leaf

    kwargs = tree_map(moved, kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs["device"] = _META
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return func(*tree_map(moved, args), **kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return written


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _fails_for_meta_only(error: Exception) -> bool:
    """Whether an operation may succeed with values: there is no kernel for shapes alone, or they depend on values."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
