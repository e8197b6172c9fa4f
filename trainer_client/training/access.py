"""Access to the states of single parameters, by name, wherever they live: reading, and changes between two steps.

This module owns the places of parameters: which part of which flat group has a parameter's values. It must never
commit: a change becomes a part of the next commit, which the engine makes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from paramserver.contract.kinds import Kind, kind_name
from trainer_client.errors import ConfigError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.plain_state import modules_with_extra_state
from trainer_client.training.model.slot_table import ShardRange
from trainer_client.training.model.states import GroupStates
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.gradients import Gradients
from trainer_client.training.step.precision import LossScaler

log = logging.getLogger(__name__)

ParameterKey: TypeAlias = nn.Parameter | str
"""A parameter, or its FQN (any of its FQNs if it is tied)."""

# The kinds of state that a user can name in `get_full` and similar methods, besides the optimizer's states.
_PARAM, _MASTER, _GRAD = "param", "master", "grad"


class StateDictNames(NamedTuple):
    """The result of `load_state_dict`: how the given names differ from those of the model."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """The part of a parameter that this rank has, with its position in the parameter; `shards` returns such parts.

    Attributes:
        shape: the shape of the whole parameter.
        offset: where the part begins, in elements of the flattened parameter.
        values: a copy of the part, [n] on the CPU; n may be 0.
        ranges: the elements of the flattened parameter that `values` has one after the other, as (first, number). It is
            one range that begins at `offset`, except for a parameter in tiles: a rank has one range of each tile.
    """

    fqn: str
    shape: torch.Size
    offset: int
    values: torch.Tensor
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter, or a tile of one, is stored: its flat group, its slot, and this rank's part of it.

    Attributes:
        parameter: the parameter, or the tile.
        state: the states of the parameter's flat group.
        slot: the number of the parameter in the flat group.
        shard: this rank's part of the parameter; None: this rank has no part.
    """

    parameter: ModelParameter
    state: GroupStates
    slot: int
    shard: ShardRange | None

    @property
    def range(self) -> slice:
        """The range of this rank's part of the parameter in this rank's partition of the group."""
        return _range(self.shard)

    @property
    def part(self) -> slice:
        """The range of this rank's part in the flattened parameter."""
        return slice(self.shard.offset, self.shard.offset + self.shard.numel) if self.shard else slice(0, 0)


# Where the values of a parameter are stored: one place, or for a tiled parameter the places of its tiles in the order
# of their rows.
Places: TypeAlias = tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """New values [n] of one kind of a parameter, for this rank's part of it; `hand_over` makes the change."""

    place: Place
    kind: Kind
    values: torch.Tensor


class StateAccess:
    """Reads and changes the states of single parameters of one engine, by name; the engine's methods call it.

    Args:
        model: the model, which gives the names of tied parameters and buffers.
        states: the states of all flat groups.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        states: Sequence[GroupStates],
        gradients: Gradients,
        scaler: LossScaler,
        collectives: Collectives,
    ) -> None:
        self._states = states
        self._gradients = gradients
        self._scaler = scaler
        self._collectives = collectives
        self._places: dict[int, Places] = {}
        for state in states:
            shards = {shard.slot: shard for shard in state.group.shards}
            for slot, parameter in enumerate(state.group.parameters):
                place = Place(parameter=parameter, state=state, slot=slot, shard=shards.get(slot))
                key = id(parameter.whole.tensor)
                self._places[key] = (*self._places.get(key, ()), place)
        self._model = model
        # Where the parameter with a name of the model's state dict is stored, by the name; a tied parameter has several
        # names. None if the name is that of a buffer, of a module's extra state, or of an entry that a module adds by a
        # state-dict hook.
        self._state_names = {
            name: self._places.get(id(entry)) for name, entry in model.state_dict(keep_vars=True).items()
        }
        self._buffers = frozenset(name for name, _ in model.named_buffers(remove_duplicate=False))
        self._with_extra_state = modules_with_extra_state(model)
        beside = {name for name, places in self._state_names.items() if places is None}
        self._own_entries = frozenset(beside - self._buffers - self._with_extra_state.keys())
        self._by_name = {
            fqn: self._places[id(tensor)] for fqn, tensor in model.named_parameters(remove_duplicate=False)
        }

    # The methods below read states of the model and of the optimizer.

    @torch.no_grad()
    def full_state_dict(self, *, keep: bool) -> dict[str, Any]:
        """Return the model's state by name, on the CPU: fp32 weights, and buffers and extra states as they are.

        Without `keep`, return an empty dict. All ranks must call this; they gather one flat group at a time.
        """
        weights: dict[int, torch.Tensor] = {}
        for state in self._states:
            partition = state.read(state.group.weight_kind)
            whole = torch.empty(state.group.slot_table.numel, dtype=partition.dtype, device=self._collectives.device)
            self._collectives.all_gather_flat(whole, partition)
            if keep:
                pieces = state.group.pieces(whole.float().cpu())
                for parameter, piece in zip(state.group.parameters, pieces, strict=True):
                    if parameter.tile_of is None:
                        weights[parameter.index] = piece.clone()
                        continue
                    if parameter.index not in weights:
                        weights[parameter.index] = torch.empty(parameter.whole.shape, dtype=piece.dtype)
                    weights[parameter.index].view(-1)[parameter.first :][: piece.numel()] = piece.reshape(-1)
        if not keep:
            return {}
        beside = self._beside_parameters()
        return {
            name: weights[places[0].parameter.index] if places else beside[name]
            for name, places in self._state_names.items()
            if places or name in beside
        }

    @torch.no_grad()
    def parameter_state_dict(self, *, keep: bool, with_frozen: bool) -> dict[str, Any]:
        """Return parameters by name as forward computes with them, on the CPU; buffers and extra states as they are.

        Tied names share one tensor. Without `keep`, return an empty dict. All ranks must call this; they gather one
        parameter at a time.

        Args:
            with_frozen: whether the result has the parameters that are frozen now.
        """
        values: dict[int, torch.Tensor] = {}
        found: dict[str, Any] = {}
        beside = self._beside_parameters() if keep else {}
        for name, places in self._state_names.items():
            if places is None:
                found |= {name: beside[name]} if name in beside else {}
                continue
            parameter = places[0].parameter.whole
            if not (with_frozen or parameter.tensor.requires_grad):
                continue
            index = parameter.index
            if index not in values:
                whole = self._whole(places, _PARAM).view(parameter.shape)
                values[index] = whole if keep else torch.empty(0)
            found |= {name: values[index]} if keep else {}
        return found

    def _beside_parameters(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that are no parameters, by name.

        Tensors are copies on the CPU. A module may add an entry to one state dict and not to the next, so a name that
        was there when the engine was made may be missing.
        """
        return {
            name: entry.detach().cpu().clone() if isinstance(entry, torch.Tensor) else entry
            for name, entry in self._model.state_dict(keep_vars=True).items()
            if self._state_names.get(name, ()) is None
        }

    def full(self, key: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return all values of one kind of a parameter, in the parameter's shape, on the CPU.

        All ranks must call this. The values are fp32, except those of "param", which have the parameter's dtype.

        Return None for a gradient that no rank has.
        """
        places = self._places_of_key(key)
        shape = places[0].parameter.whole.shape
        if kind != _GRAD:
            return self._whole(places, kind).view(shape)
        if not self._has_gradient(places):
            return None
        return torch.cat([self._whole_gradient(place) for place in places]).view(shape)

    def local(self, key: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return this rank's part [n] of the values that `full` returns; n may be 0.

        The other ranks do not have to call this.

        Return None if the parameter has no gradient.
        """
        places = self._places_of_key(key)
        if kind == _GRAD and any(self._gradients.partition_of(p.state.group, p.slot) is None for p in places):
            return None
        return joined([self._part(place, kind) for place in places])

    def parameter(self, key: ParameterKey) -> ModelParameter:
        """Return the ModelParameter of a parameter or name. Raise ConfigError if the model has no such parameter."""
        return self._places_of_key(key)[0].parameter.whole

    def shards(self, kind: str) -> dict[str, StateShard]:
        """Return this rank's part of every parameter that has the kind, by each of its names.

        The other ranks do not have to call this.
        """
        read = {
            id(state): state.read(_kind_of(state.group, kind, "")) for state in self._states if _has(state.group, kind)
        }
        found = {}
        for fqn, places in self._by_name.items():
            if id(places[0].state) in read:
                values = torch.cat([read[id(place.state)][place.range] for place in places])
                ranges = tuple((place.part.start, place.part.stop - place.part.start) for place in places)
                shape = places[0].parameter.whole.shape
                found[fqn] = StateShard(fqn=fqn, shape=shape, offset=ranges[0][0], values=values, ranges=ranges)
        return found

    # The methods below change states of the model and of the optimizer.

    def compare_names(self, state_dict: Mapping[str, Any]) -> StateDictNames:
        """Return which names of the model's state are missing, and which names are not the model's.

        If one name of a tied parameter is given, none of its names is missing. The name of an entry that a module adds
        by a state-dict hook is never missing.
        """
        given = {id(places) for name in state_dict if (places := self._state_names.get(name)) is not None}
        missing = [
            name
            for name, places in self._state_names.items()
            if name not in state_dict and name not in self._own_entries and (places is None or id(places) not in given)
        ]
        return StateDictNames(missing, [name for name in state_dict if name not in self._state_names])

    def weight_changes(self, state_dict: Mapping[str, Any]) -> list[StateChange]:
        """Return the changes that give the parameters the weights of a plain state dict.

        Raises:
            ConfigError: the shape of a weight or of a buffer does not fit.
        """
        for name in state_dict:
            if name in self._buffers and name in self._state_names:
                wanted, given = self._model.get_buffer(name).shape, state_dict[name].shape
                if given != wanted:
                    raise ConfigError(
                        f"buffer {name} cannot be set to a tensor of shape {list(given)}: it is {list(wanted)}"
                    )
        weights = {
            id(places): (name, value)
            for name, value in state_dict.items()
            if (places := self._state_names.get(name)) is not None
        }
        return self.changes({(name, _MASTER): value for name, value in weights.values()}, local=False)

    def load_own_entries(self, state_dict: Mapping[str, Any]) -> None:
        """Give the modules those entries of a plain state dict that they have added by state-dict hooks.

        It can raise what the modules' own functions for loading raise.
        """
        given = {name: state_dict[name] for name in self._own_entries if name in state_dict}
        refused = self._model.load_state_dict(given, strict=False).unexpected_keys if given else []
        if refused and self._collectives.rank == 0:
            log.warning(
                "load_state_dict() has left out %s, which modules put into their state dict and do not load",
                ", ".join(sorted(refused)),
            )

    @torch.no_grad()
    def set_beside_parameters(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the values of a plain state dict into the model's buffers, and give modules their extra states."""
        for name in self._state_names:
            if name not in state_dict:
                continue
            if (module := self._with_extra_state.get(name)) is not None:
                module.set_extra_state(state_dict[name])
            elif name in self._buffers:
                self._model.get_buffer(name).copy_(state_dict[name])

    @torch.no_grad()
    def changes(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor], *, local: bool) -> list[StateChange]:
        """Check new values of states, and return them as changes for `hand_over`.

        Every rank must name the same parameters and kinds.

        Args:
            values: the new values by parameter and kind.
            local: whether each value is this rank's part [n] of the parameter. If False, each value has the parameter's
                shape.

        Raises:
            ConfigError: the model has no such parameter or kind, or the shape does not fit.
        """
        changes = []
        for (key, kind), value in values.items():
            places = self._places_of_key(key)
            for place, part in zip(places, self._checked(places, kind, value, local=local), strict=True):
                changes += self._changes(place, kind, part)
        return changes

    @torch.no_grad()
    def set_gradient(self, key: ParameterKey, value: torch.Tensor, *, local: bool) -> None:
        """Replace a gradient between backward and step, or give the parameter one.

        Every rank has to call this, but the ranks do not wait for each other.

        Raises:
            RuntimeError: the parameter is frozen, or its flat group has no gradient in this step.
        """
        places = self._places_of_key(key)
        parts = self._checked(places, _GRAD, value, local=local)
        fqn = places[0].parameter.fqn
        if not all(place.parameter.tensor.requires_grad for place in places):
            raise RuntimeError(f"parameter {fqn} is frozen, and its gradient cannot be set")
        if not all(self._gradients.can_change(place.state.group) for place in places):
            raise RuntimeError(f"parameter {fqn} has no gradient: set it after backward()")
        for place, part in zip(places, parts, strict=True):
            partition = self._gradients.change(place.state.group, place.slot)
            partition[place.range] = (part.float() * self._scaler.scale).to(partition.device, partition.dtype)

    @torch.no_grad()
    def hand_over(self, changes: Iterable[StateChange], step: int) -> None:
        """Hand changed states over to the store, as a part of the uncommitted `step`.

        Each kind of a flat group is written once with all its changes, because the store takes only one put of a slab
        in a step.
        """
        by_state: dict[int, list[StateChange]] = {}
        for change in changes:
            by_state.setdefault(id(change.place.state), []).append(change)
        for state in self._states:
            mine = by_state.get(id(state), [])
            partitions: dict[Kind, torch.Tensor] = {}
            for change in mine:
                if change.place.shard is not None:
                    if change.kind not in partitions:
                        partitions[change.kind] = state.read(change.kind)
                    partitions[change.kind][change.place.range] = change.values.to(partitions[change.kind].dtype)
            if partitions:
                state.hand_over(partitions, step)
            if mine:
                state.refill()

    def _changes(self, place: Place, kind: str, part: torch.Tensor) -> list[StateChange]:
        """Return the changes that set this rank's part of one kind of a parameter to `part`.

        For "param" and "master" these are the changes of all kinds of the weight, because they change together.
        """
        group = place.state.group
        if kind not in (_PARAM, _MASTER):
            return [StateChange(place=place, kind=_kind_of(group, kind, place.parameter.fqn), values=part)]
        # A parameter and its master weight change together, because the parameter always is the rounded master weight.
        weight = part.to(group.dtype) if kind == _PARAM else part
        return [StateChange(place=place, kind=each, values=weight) for each in group.weight_kinds]

    def _checked(self, places: Places, kind: str, value: torch.Tensor, *, local: bool) -> list[torch.Tensor]:
        """Check the shape of a value from the user, and return this rank's part [n] of it, one for each tile.

        For a parameter that is not in tiles it is one part. It can raise ConfigError.
        """
        parameter = places[0].parameter.whole
        wanted = torch.Size([sum(p.part.stop - p.part.start for p in places)]) if local else parameter.shape
        if value.shape != wanted:
            what = "this rank's part of it is" if local else "it is"
            raise ConfigError(
                f"{kind} of parameter {parameter.fqn} cannot be set to a tensor of shape {list(value.shape)}: "
                f"{what} {list(wanted)}"
            )
        value = value.detach().cpu()
        return split(value, places) if local else [value.reshape(-1)[place.part] for place in places]

    # The methods below find where a parameter's values are stored.

    def _places_of_key(self, key: ParameterKey) -> Places:
        """Return where a parameter, given by itself or by its name, is stored. Raise ConfigError if there is none."""
        if not isinstance(key, str):
            return self.places_of(key)
        if key not in self._by_name:
            raise ConfigError(f"the model has no parameter {key!r}: write a name that model.named_parameters() gives")
        return self._by_name[key]

    def places_of(self, tensor: torch.Tensor) -> Places:
        """Return where a parameter is stored: one place, or one for each tile. It can raise ConfigError."""
        if id(tensor) not in self._places:
            raise ConfigError(f"a tensor of shape {list(tensor.shape)} is not a parameter of this engine's model")
        return self._places[id(tensor)]

    def _has_gradient(self, places: Places) -> bool:
        """Return whether any rank has a gradient of the parameter. All ranks must call this."""
        return all(self._collectives.any_rank([self._gradients.is_present(p.state.group, p.slot) for p in places]))

    def _whole_gradient(self, place: Place) -> torch.Tensor:
        """Return the mean over ranks of a gradient so far, [numel] in fp32. All ranks must call this.

        The result includes gradients that the ranks have not reduced yet, rounded as if the ranks reduced them now.
        """
        group = place.state.group
        owed = self._gradients.read_unreduced(group, place.slot)
        partition = self._gradients.reduced_of(group)
        total = None if partition is None else self._gather(place, partition[place.range].float().cpu())
        if owed is not None:
            total = (owed if total is None else total + owed).to(group.gradient_dtype).float()
        assert total is not None, "some rank has a gradient, so it is reduced or owed"
        return total / self._scaler.scale

    def _part(self, place: Place, kind: str) -> torch.Tensor:
        """Return this rank's part [n] of one kind of the parameter or tile at `place`, on the CPU.

        All kinds but "param" are returned in fp32. A gradient is returned without the loss scale.
        """
        group = place.state.group
        if kind == _GRAD:
            partition = self._gradients.partition_of(group, place.slot)
            assert partition is not None, "asked before"
            return partition[place.range].float().cpu() / self._scaler.scale
        values = place.state.read(_kind_of(group, kind, place.parameter.fqn))[place.range].clone()
        return values if kind == _PARAM else values.float()

    def _whole(self, places: Places, kind: str) -> torch.Tensor:
        """Return all elements of one kind of a parameter, flattened and on the CPU. All ranks must call this."""
        return joined([self._gather(place, self._part(place, kind)) for place in places])

    def _gather(self, place: Place, part: torch.Tensor) -> torch.Tensor:
        """Return the whole parameter or tile, made of the `part` that each rank has. All ranks must call this."""
        group = place.state.group
        world_size = self._collectives.world_size
        shards = [next((s for s in group.shards_of(r) if s.slot == place.slot), None) for r in range(world_size)]
        sizes = [shard.numel if shard else 0 for shard in shards]
        row = torch.zeros(max(sizes), dtype=part.dtype)
        row[: part.numel()] = part
        rows = self._collectives.gather_rows(row)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of a parameter, given those of its tiles; a single part is returned itself, not a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(values: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """Cut `values` into this rank's parts of the tiles of a parameter, which lie in it one after the other."""
    return list(values.split([place.part.stop - place.part.start for place in places]))


def _range(shard: ShardRange | None) -> slice:
    """Return the elements of a partition in which a shard lies; an empty range if this rank has no shard (None)."""
    return shard.in_partition if shard else slice(0, 0)


def _has(group: FlatGroup, kind: str) -> bool:
    """Return whether the parameters of the flat group have the kind that the user names."""
    return kind in (_PARAM, _MASTER) or any(kind_name(k) == kind.lower() for k in group.kinds)


def _kind_of(group: FlatGroup, kind: str, fqn: str) -> Kind:
    """Return the kind of the store for the user's name of a kind, such as "exp_avg". It can raise ConfigError.

    "master" is the fp32 weight. If the parameter is fp32, it is its own master weight, so the kind is that of "param".
    """
    if kind == _MASTER:
        return group.weight_kind
    for candidate in group.kinds:
        if kind_name(candidate) == kind.lower():
            return candidate
    known = [_PARAM, _MASTER, _GRAD, *map(kind_name, group.state_kinds)]
    raise ConfigError(f"parameter {fqn} has no state {kind!r}: write one of {', '.join(known)}")
