"""Models without memory: the operations of constructors are recorded, and run later for one tensor at a time.

This module owns the recipes. It must never hold a tensor's values: while a `RecipeRecorder` is active, constructors
make their tensors on the meta device, where a tensor has a shape and no bytes.

[Note: recipes] A recipe is the list of operations that wrote a storage. For each tensor that an operation read, the
operation refers to the tensor's recipe, and to the number of operations that this recipe had at the time. A recipe
belongs to a storage and not to a tensor, because views of a storage share what is written through any of them. It is an
attribute of the meta storage, so it lives as long as a parameter, buffer or view that needs it, and no table is kept.
To replay a recipe, all operations that it depends on are collected and run in the order of construction. If an
operation overwrites a whole storage, the operations before it are not needed. So if a model overwrites the default
initialisation of a layer by its own one, the default one is never computed.

[Note: random numbers] Each random operation is replayed with a random seed of its own, which follows from the
recorder's seed and the operation's number in the construction. A tensor's values therefore depend neither on the rank
that replays it, nor on the order of replays, nor on the world size. Random numbers are always drawn on the CPU, whose
generator gives the same numbers on every machine. A construction without a recorder gives other values, because all its
operations draw from one sequence of random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainer_client.errors import DeferredInitError

_ATTRIBUTE = "paramserver_recipe"

_CPU = torch.device("cpu")
_META = torch.device("meta")

_aten = torch.ops.aten

# Operations that allocate memory and write nothing. The recorder does not record them: the replay of a storage without
# recorded operations makes zeros.
_ALLOCATIONS = frozenset(
    (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided)
)  # fmt: skip
# Operations that give every element of `self` a new value that does not depend on the old one. When one of them is
# recorded for a whole storage, the operations before it are not needed to replay the storage.
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
# Operations that return a tensor's values to Python. They cannot be deferred, so the recorder computes the values at
# once.
_NEEDS_VALUE = frozenset((_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero))
# Methods that return a tensor's values to Python without passing torch's dispatcher, where operations are recorded. So
# the recorder catches these methods themselves.
_CONVERSIONS = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__))
# The values of attributes that a tensor with a recipe shows to the model's constructor as if the tensor were on the
# CPU, although it is on the meta device.
_POSES = {torch.Tensor.is_meta.__get__: False, torch.Tensor.device.__get__: _CPU}  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Recipe:
    """The recipe of one storage; see [Note: recipes].

    Attributes:
        recorder: the recorder that made the recipe.
        nbytes: size of the storage in bytes.
        writes: the operations that wrote the storage, in the order of construction.
    """

    recorder: RecipeRecorder
    nbytes: int
    writes: list[Operation] = field(default_factory=list)

    def needed(self, steps: int) -> list[Operation]:
        """Return the operations that give the storage the content that it has after its first `steps` operations.

        Operations before the last one that overwrites the whole storage are left out, because they have no effect.
        """
        for index in range(steps - 1, -1, -1):
            if self.writes[index].overwrites:
                return self.writes[index:steps]
        return self.writes[:steps]


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A reference to a tensor with a recipe that a recorded operation reads, writes or makes.

    Attributes:
        recipe: the recipe of the tensor's storage.
        steps: how many operations had written the storage when the reference was made.
        dtype: the tensor's dtype.
        size: the tensor's shape.
        stride: the tensor's strides, in elements.
        offset: the index of the tensor's first element in the storage.
    """

    recipe: Recipe
    steps: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRef:
    """A reference to an argument that has values, because it was made outside of the recorder.

    The argument must not change before the operation is replayed.

    Attributes:
        tensor: the argument.
        version: torch's version counter of the tensor when the operation was recorded.
    """

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A recorded operation.

    Attributes:
        number: the number of the operation in the construction; operations are replayed in this order.
        function: the operator of torch.
        args: the positional arguments, with a TensorRef or GivenRef in place of each tensor.
        kwargs: the keyword arguments, with references in the same way.
        inputs: the arguments on the meta device that the result depends on.
        outputs: the tensor results in order; None for a result that shares memory with an argument.
        is_random: whether the operation draws random numbers.
        overwrites: whether the operation gives every element of the storage that it writes a value that does not depend
            on the old one.
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
        """Yield the TensorRefs of all arguments that the operation uses, and of the results that it makes."""
        yield from (leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorRef))
        yield from (ref for ref in self.outputs if ref is not None)


class RecipeRecorder:
    """A context in which tensors are made on the meta device and get recipes.

    The attributes `device` and `is_meta` of such tensors have the values of a CPU tensor, because some functions of
    torch.nn.init skip tensors on the meta device. If an operation needs a value (`.item()`, `bool(tensor)`, a shape
    that depends on data), the recipe is replayed at once and the memory is freed again. That only costs time, which is
    noticeable for large tensors (for example, trunc_normal_ reads the values that it has drawn).

    Attributes:
        active: the recorder whose context is open; None: there is none, or it is suspended. While one is active, no
            second recorder can be entered.

    Args:
        seed: the seed of all random numbers.
    """

    active: ClassVar[RecipeRecorder | None] = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._is_fixed = False
        self._has_random = False
        self._operations = 0
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        assert RecipeRecorder.active is None
        self._modes.enter_context(_Recording(self))
        self._modes.enter_context(_Posing(self))
        RecipeRecorder.active = self
        return self

    def __exit__(self, *_: object) -> None:
        RecipeRecorder.active = None
        self._modes.close()

    @staticmethod
    @contextmanager
    def suspended() -> Iterator[None]:
        """Record nothing within this context, so that tensors get values, also if a recorder's context is open."""
        active, RecipeRecorder.active = RecipeRecorder.active, None
        try:
            yield
        finally:
            RecipeRecorder.active = active

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def has_random(self) -> bool:
        """Whether an operation was recorded that draws random numbers, and so uses the seed."""
        return self._has_random

    @property
    def is_fixed(self) -> bool:
        """Whether random values of this seed were used already, so that the seed cannot be changed any more."""
        return self._is_fixed

    def reseed(self, seed: int) -> None:
        assert not self._is_fixed
        self._seed = seed

    def fix(self) -> None:
        """Note that random values of this seed are used, so that the seed cannot be changed any more."""
        self._is_fixed = True

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the construction on the meta device, record it, and return its result."""
        arguments = _tensors((args, kwargs))
        if arguments and not any(recipe_of(tensor) for tensor in arguments):
            # An operation that uses only tensors with values, such as torch.tensor and torch.from_numpy make, is run on
            # them, and not recorded.
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if func.overloadpacket in _NEEDS_VALUE or any(recipe_of(tensor) is None for tensor in written):
            return self.evaluate(func, args, kwargs)
        # The references to the arguments, from which the operation is replayed, are made before the operation runs: a
        # reference has the number of writes to its recipe, and the operation may write to an argument.
        refs = tree_map(lambda leaf: self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        try:
            result = _run_on_meta(func, args, kwargs)
        except RuntimeError as error:
            if not _fails_for_meta_only(error):
                raise
            if written:
                raise DeferredInitError(
                    f"{func} writes to elements that values of a tensor select, which zero.Init cannot defer: replace "
                    "it by an operation on whole tensors (torch.where), or do it after initialize()"
                ) from None
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
            # An operation that has only allocated memory or made a view has written nothing, so it is not recorded.
            return
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
        self._has_random |= operation.is_random
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
        """Run an operation at once, on the replayed values of its arguments, and return its result."""
        refs = [_ref_to(tensor) for tensor in _tensors((args, kwargs)) if recipe_of(tensor)]
        self._is_fixed |= any(operation.is_random for operation in _slice(refs))

        def value(leaf: Any) -> Any:
            return replay(leaf) if isinstance(leaf, torch.Tensor) and recipe_of(leaf) else leaf

        with _disable_current_modes():
            return func(*tree_map(value, args), **tree_map(value, kwargs))


class _Recording(TorchDispatchMode):
    """The torch dispatch mode that passes every operation of a constructor to `RecipeRecorder.dispatch`."""

    def __init__(self, recorder: RecipeRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if RecipeRecorder.active is not self._recorder:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._recorder.dispatch(func, args, kwargs or {})


class _Posing(TorchFunctionMode):
    """The torch function mode in which a tensor with a recipe looks like a CPU tensor to constructors.

    If Python code needs a value of the tensor, as `tensor.item()` does, the mode replays the tensor's recipe.
    """

    def __init__(self, recorder: RecipeRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if RecipeRecorder.active is not self._recorder:
            return func(*args, **(kwargs or {}))
        if func in _POSES and recipe_of(args[0]):
            return _POSES[func]
        if func in _CONVERSIONS and recipe_of(args[0]):
            return self._recorder.evaluate(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """Return the recipe of the tensor's storage; None if no recorder was active when the tensor was made."""
    with torch._C.DisableTorchFunction():
        recipe: Recipe | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None) if tensor.is_meta else None
        return recipe


def replay_buffers(modules: Iterable[nn.Module]) -> None:
    """Replace the modules' own buffers that have recipes by tensors with their values. Children are not changed.

    Modules that share a buffer share its values, too.
    """
    # For each buffer with a recipe, by its id: the buffer and its replayed values. The buffer is kept, because a new
    # tensor could get the id of a buffer that was freed, and would then be taken for it.
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and recipe_of(buffer) is not None:
                if id(buffer) not in known:
                    known[id(buffer)] = buffer, replay(buffer)
                module._buffers[name] = known[id(buffer)][1]


@torch.no_grad()
def replay(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the values of a tensor with a recipe, and return them in a new CPU tensor.

    The new tensor has the shape, strides and dtype of `tensor`. Elements that the recipe does not initialise are zero.
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


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a digest (63 bits) of a tensor's recipe, so that ranks can compare how they made the tensor.

    Equal recipes have equal digests, also if the seeds of their recorders differ. The digest does not depend on the
    values of tensors that were made outside of the recorder.
    """

    def shown(leaf: Any) -> str:
        if isinstance(leaf, TensorRef):
            return f"{leaf.dtype} {leaf.size} {leaf.stride} {leaf.offset} after {leaf.steps}"
        if isinstance(leaf, GivenRef):
            return f"{leaf.tensor.dtype} {tuple(leaf.tensor.shape)}"
        return repr(leaf) if isinstance(leaf, bool | int | float | str | torch.dtype) else type(leaf).__name__

    digest = hashlib.sha256()
    for operation in _slice([_ref_to(tensor)]):
        number = operation.number if operation.is_random else None
        arguments = [shown(leaf) for leaf in tree_leaves((operation.args, operation.kwargs))]
        digest.update(f"{number} {operation.function} {arguments}\n".encode())
    return int.from_bytes(digest.digest()[:8]) >> 1


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
    """Return all operations whose results the tensors of `refs` depend on, in the order of construction."""
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
    """Return those of the arguments `args` and `kwargs` that the operator `func` writes to."""
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
    """Return whether an operation failed only because its arguments have no values, so that it may succeed with values.

    In that case, torch has no meta kernel for the operation, or the shape of its result depends on values.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()
