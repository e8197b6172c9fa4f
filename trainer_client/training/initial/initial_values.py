"""The initial values of a new job, from one of four sources: the model's memory, a recipe, the modules, or files.

This module owns each parameter's source. It must never hold more values than this rank's partition of one flat group
and one whole parameter. It frees the model's own memory group by group, as soon as the group's partition is in the
store. (The journal keeps partitions that this rank cannot make again, until they are committed, if they are small
enough.)
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from paramserver.contract.kinds import Kind
from paramserver.contract.progress_bars import byte_bars
from trainer_client.errors import ConfigError
from trainer_client.training.initial.deferred_init import RecipeRecorder, fingerprint, recipe_of, replay, replay_buffers
from trainer_client.training.initial.loading import FileTensor, Found, Weights
from trainer_client.training.initial.module_init import ModuleInit, ParamInitFn
from trainer_client.training.model.availability import ZeroParamStatus, show_status
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.states import GroupStates
from trainer_client.training.ranks.collectives import Collectives

log = logging.getLogger(__name__)

# The warning about parameters whose recipes differ between ranks names at most so many parameters.
_SHOWN = 3


class Origin(enum.IntEnum):
    """How the script has built a parameter on one rank, which decides where the initial values come from."""

    GIVEN = 0
    """The parameter has values."""

    RECORDED = 1
    """The parameter is on the meta device and has a recipe (built within `zero.Init`)."""

    META = 2
    """The parameter is on the meta device and has no recipe."""


class InitialSource(Protocol):
    """The interface of a source of one parameter's initial values: its own memory, a recipe, a module or a file.

    Attributes:
        is_lasting: whether this rank can call `fill` again by itself after the model's own memory was freed.
        fills_ranges: whether `fill` can make the values of a range without making all values of the parameter.
    """

    is_lasting: bool
    fills_ranges: bool

    def fill(self, target: torch.Tensor, offset: int) -> None:
        """Fill `target` [n], fp32 on the CPU, with elements [offset, offset + n) of the flattened parameter.

        n may be 0. All ranks must call this for every parameter, in the same order, because the call may communicate.
        """


class InitialValues:
    """The initial values of a model: finds the source of each parameter, and stages the values as step 0.

    Args:
        model: the model. When the constructor returns, its buffers have values. A parameter that was on the meta device
            is now on the CPU, and is NaN, without memory for its elements.
        parameters: the model's parameters, in the model's order.
        collectives: the collectives of this rank.
        param_init_fn: see ModuleInit.
        weights: values from files. They have precedence over all other sources.
        strict_weights: see Weights.match.
        are_rounded: whether master weights begin with values that are rounded to the dtype of the forward.

    Raises:
        ConfigError: the ranks built the model differently, the model does not fit the files, or no function sets the
            values of a buffer on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[ModelParameter],
        collectives: Collectives,
        *,
        param_init_fn: ParamInitFn | None = None,
        weights: Weights | None = None,
        strict_weights: bool = True,
        are_rounded: bool = False,
    ) -> None:
        """Find each parameter's source, and fill the buffers. All ranks must call this."""
        self._model = model
        self._collectives = collectives
        self._are_rounded = are_rounded
        self._origins = self._agree_on_origins(parameters)
        self._agree_on_seeds(parameters)
        keys = {id(p.tensor): p.index for p in parameters}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        state = model.state_dict(keep_vars=True)
        names = [(name, entry) for name, entry in state.items() if id(entry) in keys or name in buffers]
        found = weights.match(names, keys, strict=strict_weights) if weights else Found(parameters={}, buffers={})
        recorded = {p.index: p.tensor.data for p in parameters if self._origins[p.index] is Origin.RECORDED}
        self._differing = self._compare_recipes(parameters, recorded)
        for parameter in parameters:
            if parameter.tensor.is_meta:
                _materialize_as_nan(parameter.tensor)
        seed = torch.tensor([torch.initial_seed() & (2**63 - 1)])
        self._module_init = ModuleInit(model, param_init_fn, int(collectives.gather_rows(seed)[0]))
        self._fill_buffers(found)
        self._sources = [self._source(p, found, recorded.get(p.index)) for p in parameters]
        # The tiled parameter that is being staged tile by tile, if its source can make its values only as a whole: its
        # index and all its values, which are kept for the next tile. None if no such parameter is being staged.
        self._staged: tuple[int, torch.Tensor] | None = None

    def stage(self, states: Sequence[GroupStates]) -> None:
        """Stage this rank's partitions as step 0, and free the model's own memory. All ranks must call this."""
        itemsize = torch.float32.itemsize
        total_bytes = sum(state.group.slot_table.numel for state in states) * itemsize
        done_bytes = 0
        with byte_bars(is_shown=self._collectives.rank == 0, is_transient=False) as show:
            for state in states:
                group = state.group
                values = partial(self._values, group)
                # The journal keeps what this rank may have to hand over again after a restart of the daemon. If all
                # sources of a group's values are lasting, the journal keeps a call that makes the values again.
                # Otherwise it keeps the values, because `take_over` frees the model's memory, from which they come.
                is_lasting = all(self._sources[parameter.index].is_lasting for parameter in group.parameters)
                state.hand_over(values(), step=0, again=partial(self._values_again, group) if is_lasting else None)
                state.refill()
                group.take_over()
                done_bytes += group.slot_table.numel * itemsize
                show("initial weights", done_bytes, total_bytes)

    def _values(self, group: FlatGroup) -> Mapping[Kind, torch.Tensor]:
        return dict.fromkeys(group.weight_kinds, self.partition(group))

    def _values_again(self, group: FlatGroup) -> Mapping[Kind, torch.Tensor]:
        """Return what `_values` returns, for a store that needs the values of a group once more.

        The whole values of a tiled parameter, which `_values` keeps for its further tiles, are freed.
        """
        try:
            return self._values(group)
        finally:
            self._staged = None

    @torch.no_grad()
    def partition(self, group: FlatGroup) -> torch.Tensor:
        """Return this rank's partition of a flat group, padded with zeros, fp32 [partition_numel] on the CPU.

        If `are_rounded` is set, the values are rounded to the group's dtype. All ranks must call this.
        """
        partition = torch.zeros(group.slot_table.partition_numel, dtype=torch.float32)
        shards = {shard.slot: shard for shard in group.shards}
        for slot, parameter in enumerate(group.parameters):
            shard = shards.get(slot)
            first, count, offset = (shard.partition_offset, shard.numel, shard.offset) if shard else (0, 0, 0)
            target = partition[first : first + count]
            if parameter.tile_of is None or self._sources[parameter.index].fills_ranges:
                self._sources[parameter.index].fill(target, offset)
            else:
                target.copy_(self._whole_of_tile(parameter)[offset : offset + count])
        return partition.to(group.dtype).float() if self._are_rounded else partition

    def _whole_of_tile(self, tile: ModelParameter) -> torch.Tensor:
        """Return all values of the parameter that `tile` is a part of. All ranks must call this.

        The values are made once, and kept until the parameter's last tile is staged.
        """
        if self._staged is None or self._staged[0] != tile.index:
            self._staged = None
            self._staged = (tile.index, self.whole(tile.whole))
        values = self._staged[1]
        if tile.is_last_tile:
            self._staged = None
        return values

    def whole(self, parameter: ModelParameter) -> torch.Tensor:
        """Return all values of a parameter, flattened, fp32 on the CPU. All ranks must call this."""
        values = torch.empty(parameter.shape.numel(), dtype=torch.float32)
        self._sources[parameter.index].fill(values, 0)
        return values

    def _agree_on_origins(self, parameters: Sequence[ModelParameter]) -> list[Origin]:
        """Return the origin that each parameter has on rank 0. All ranks must call this.

        If rank 0 has values of a parameter, its origin on the other ranks does not matter, because they get rank 0's
        values.

        Raises:
            ConfigError: a parameter has no values on rank 0, and another origin on another rank.
        """
        mine = torch.tensor([_origin(p.tensor) for p in parameters], dtype=torch.int64)
        agreed = self._collectives.gather_rows(mine)[0]
        differs = (agreed != mine) & (agreed != Origin.GIVEN)
        where = self._collectives.any_rank(differs.tolist())
        if any(where):
            fqn = parameters[where.index(True)].fqn
            raise ConfigError(
                f"parameter {fqn} is on the meta device on rank 0, and was built in another way on another rank: build "
                "the model alike on every rank, or with values on rank 0"
            )
        return [Origin(value) for value in agreed.tolist()]

    def _agree_on_seeds(self, parameters: Sequence[ModelParameter]) -> None:
        """Give all ranks the seeds of rank 0's recorders.

        Raises:
            ConfigError: the seeds differ, and a constructor has already used random values of one of them.
        """
        tensors = [p.tensor for p in parameters if self._origins[p.index] is Origin.RECORDED]
        recorders: dict[int, RecipeRecorder] = {}
        for tensor in (*tensors, *self._model.buffers()):
            if recipe := recipe_of(tensor):
                recorders.setdefault(id(recipe.recorder), recipe.recorder)
        counts = self._collectives.gather_rows(torch.tensor([len(recorders)]))
        if counts.unique().numel() != 1:
            raise ConfigError("the ranks have built the model in different numbers of zero.Init contexts")
        for recorder in recorders.values():
            seeds = self._collectives.gather_rows(torch.tensor([recorder.seed]))[:, 0].tolist()
            (fixed,) = self._collectives.any_rank([recorder.is_fixed])
            if len(set(seeds)) == 1:
                continue
            if fixed:
                raise ConfigError(
                    f"the ranks have built the model from different random numbers (seeds {seeds}), and its "
                    "constructor has already used their values: pass the same seed to zero.Init(seed=...) on every rank"
                )
            recorder.reseed(seeds[0])

    def _compare_recipes(
        self, parameters: Sequence[ModelParameter], recorded: Mapping[int, torch.Tensor]
    ) -> frozenset[int]:
        """Return the indexes of the parameters whose recipes differ between the ranks. All ranks must call this.

        Recipes differ, for example, if a constructor initialises a parameter on rank 0 alone, or has drawn more random
        numbers on one rank before.
        """
        if self._collectives.world_size == 1 or not recorded:
            return frozenset()
        mine = torch.tensor([fingerprint(tensor) for tensor in recorded.values()], dtype=torch.int64)
        rows = self._collectives.gather_rows(mine, "the comparison of the ranks' recipes")
        differs = (rows != rows[0]).any(dim=0).tolist()
        found = [index for index, is_different in zip(recorded, differs, strict=True) if is_different]
        if found and self._collectives.rank == 0:
            names = ", ".join(parameters[index].fqn for index in found[:_SHOWN])
            log.warning(
                "the ranks have initialised %d parameters in different ways within zero.Init (%s%s): the values of "
                "rank 0 count",
                *(len(found), names, ", ..." if len(found) > _SHOWN else ""),
            )
        return frozenset(found)

    @torch.no_grad()
    def _fill_buffers(self, found: Found) -> None:
        """Give values to all buffers on the meta device, and to tensors with a recipe that are plain attributes."""
        # While the context of zero.Init in which the model was built is open, the model's buffers are on the meta
        # device, with recorded operations in place of values. So these operations are replayed first.
        replay_buffers(self._model.modules())
        known: dict[int, torch.Tensor] = {}
        from_files = {id(self._model.get_buffer(name)) for name in found.buffers}
        for fqn, module in self._model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if not buffer.is_meta:
                    continue
                if id(buffer) not in known:
                    if id(buffer) in from_files:
                        known[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
                    else:
                        known[id(buffer)] = self._module_init.tensors_of(fqn)[name]
                setattr(module, name, known[id(buffer)])
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and recipe_of(value):
                    setattr(module, name, replay(value))
        for name, stored in found.buffers.items():
            self._load_buffer(name, stored)

    def _load_buffer(self, name: str, stored: FileTensor) -> None:
        """Read a buffer from its file on rank 0, and broadcast it. All ranks must call this."""
        buffer = self._model.get_buffer(name)
        values = torch.empty(buffer.numel(), dtype=buffer.dtype)
        if self._collectives.rank == 0:
            stored.read_into(values, 0, buffer.dtype)
        values = values.to(self._collectives.device)
        self._collectives.broadcast(values)
        buffer.copy_(values.view_as(buffer))

    def _source(self, parameter: ModelParameter, found: Found, recorded: torch.Tensor | None) -> InitialSource:
        stored = found.parameters.get(parameter.index)
        if stored is not None:
            return _FromFile(stored, parameter.tensor.dtype)
        if recorded is not None and parameter.index in self._differing:
            return _FromRecipeOfRank0(recorded, self._collectives)
        if recorded is not None:
            return _FromRecipe(recorded)
        if self._origins[parameter.index] is Origin.META:
            return _FromModule(self._module_init, parameter)
        return _FromRank0(parameter, self._collectives)


class _FromRank0:
    is_lasting = False

    def __init__(self, parameter: ModelParameter, collectives: Collectives) -> None:
        self._parameter = parameter
        self._collectives = collectives
        self.fills_ranges = collectives.world_size == 1

    def fill(self, target: torch.Tensor, offset: int) -> None:
        collectives, tensor = self._collectives, self._parameter.tensor
        if collectives.rank == 0:
            values = tensor.detach().reshape(-1)
        else:
            values = torch.empty(self._parameter.shape.numel(), dtype=tensor.dtype)
        if collectives.world_size > 1:
            values = values.to(collectives.device)
            collectives.broadcast(values)
        target.copy_(values[offset : offset + target.numel()])


class _FromRecipe:
    is_lasting = True
    fills_ranges = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def fill(self, target: torch.Tensor, offset: int) -> None:
        if target.numel():
            target.copy_(replay(self._tensor).reshape(-1)[offset : offset + target.numel()])


class _FromRecipeOfRank0:
    is_lasting = False
    fills_ranges = False

    def __init__(self, tensor: torch.Tensor, collectives: Collectives) -> None:
        self._tensor = tensor
        self._collectives = collectives

    def fill(self, target: torch.Tensor, offset: int) -> None:
        if self._collectives.rank == 0:
            values = replay(self._tensor).reshape(-1)
        else:
            values = torch.empty(self._tensor.numel(), dtype=self._tensor.dtype)
        values = values.to(self._collectives.device)
        self._collectives.broadcast(values)
        target.copy_(values[offset : offset + target.numel()])


class _FromModule:
    is_lasting = True
    fills_ranges = False

    def __init__(self, module_init: ModuleInit, parameter: ModelParameter) -> None:
        self._module_init = module_init
        self._fqn, _, self._name = parameter.fqn.rpartition(".")

    def fill(self, target: torch.Tensor, offset: int) -> None:
        if target.numel():
            values = self._module_init.tensors_of(self._fqn)[self._name]
            target.copy_(values.reshape(-1)[offset : offset + target.numel()])


class _FromFile:
    is_lasting = True
    fills_ranges = True

    def __init__(self, stored: FileTensor, dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype

    def fill(self, target: torch.Tensor, offset: int) -> None:
        # Values from a file are rounded to the parameter's own dtype before they are converted to the dtype of
        # `target`, so that they are those that load_state_dict would load.
        self._stored.read_into(target, offset, self._dtype)


def _origin(tensor: torch.Tensor) -> Origin:
    if not tensor.is_meta:
        return Origin.GIVEN
    return Origin.RECORDED if recipe_of(tensor) else Origin.META


def _materialize_as_nan(parameter: nn.Parameter) -> None:
    """Move a parameter from the meta device to the CPU, with NaN for all elements. The object stays the same."""
    nan = torch.full((1,), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
    other = nn.Parameter(nan, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    show_status(other, ZeroParamStatus.AVAILABLE)
    # The parameter on the meta device is swapped with one that has memory, because torch does not allow to assign
    # `.data` from another device to a meta tensor.
    torch.utils.swap_tensors(parameter, other)
