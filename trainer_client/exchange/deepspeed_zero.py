"""The reader of DeepSpeed's ZeRO checkpoints, of stages 1 to 3 and of the BF16 optimizer: weights, moments, counters.

[Note: DeepSpeed's layouts] A checkpoint is a directory for each tag, and a file `latest` that names the newest tag.

- Stages 1 and 2, and the BF16 optimizer: `mp_rank_00_model_states.pt` has the low-precision model, and in
  `param_shapes` the names and shapes of each parameter group in the order in which they are flattened. Each rank's
  `..._optim_states.pt` has one partition of each flattened group: of the fp32 weights, with or without the padding at
  the group's end, and of the optimizer states, always with the padding. So the partitions, one after another, are the
  group.
- Stage 3: each rank has both files. `param_shapes` has sub-groups of parameters. Every parameter is cut into equal
  parts, one for each rank, of which the last is padded; a rank's flat tensor of a sub-group has its parts one after
  another. Parts of frozen parameters are in the ranks' model files.

This module must never hold more elements than the piece that the caller asks for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_client.base.foreign import torch_files
from trainer_client.client.store_client.types import Kind
from trainer_client.errors import ImportCheckpointError
from trainer_client.exchange.checkpoint import (
    STATE_KINDS,
    Checkpoint,
    CheckpointTensor,
    ParameterGroup,
    TensorValues,
    Values,
)
from trainer_client.exchange.deepspeed_files import Scaler, find_directory, find_files, load_dict
from trainer_client.exchange.deepspeed_partitions import Joined, Striped
from trainer_client.exchange.source import verify_checksums

# The entries of a model file that are DeepSpeed's own; all other entries are the client state that the user has passed.
_OWN_ENTRIES = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config"),
        *("ds_version", "num_experts", "universal_checkpoint_info", "checkpoint_parallel_dimensions"),
        *("compression_states", "curriculum_scheduler", "ds_autoep_layers", "autoep_layers"),
    }
)


def open_deepspeed(path: Path, tag: str | None, *, verify: bool, weights_only: bool = False) -> Checkpoint:
    """Open a ZeRO checkpoint of DeepSpeed.

    Args:
        path: the directory that was passed to `save_checkpoint`, or that of one tag in it.
        tag: the tag; None: the one that `latest` names, or `path` is the directory of a tag.
        verify: whether all files are read and compared with their checksums first.
        weights_only: whether the optimizer's states are left out; their kinds then need not be known.

    Raises:
        ImportCheckpointError: the checkpoint is damaged, incomplete, or of a layout that this module cannot read.
    """
    directory = find_directory(path, tag)
    models, optimizers = find_files(directory)
    if verify:
        verify_checksums([*models, *optimizers])
    states = [load_dict(file) for file in optimizers]
    reader = _Reader(directory, models, optimizers, states, weights_only=weights_only)
    return reader.read()


# One group of parameters that DeepSpeed has flattened together: their shapes by name, in the order of the flat tensor.
_Shapes = Mapping[str, tuple[int, ...]]


class _Reader:
    """Reads the files of one checkpoint of DeepSpeed, and makes a `Checkpoint` of them; see `read`."""

    def __init__(
        self,
        directory: Path,
        models: Sequence[Path],
        files: Sequence[Path],
        states: Sequence[dict[str, Any]],
        *,
        weights_only: bool,
    ) -> None:
        self._directory = directory
        self._files = files
        self._model_files = models
        self._weights_only = weights_only
        self._model = load_dict(models[0])
        self._ranks = [
            self._entry(path, state, "optimizer_state_dict", dict) for path, state in zip(files, states, strict=True)
        ]
        if not self._ranks:
            raise ImportCheckpointError(
                f"{directory} has no file *_optim_states.pt: checkpoints of ZeRO stages 1, 2 and 3 are read, with the "
                "files of all ranks. Of a stage 0 checkpoint, save the weights as safetensors and import these"
            )
        self._is_stage_3 = self._stage() == 3
        self._check_count()

    def read(self) -> Checkpoint:
        """Read the files, and return the checkpoint. It can raise ImportCheckpointError."""
        model = self._model
        path = self._model_files[0]
        shapes = self._shapes()
        modules = self._entry(path, model, "module", dict)
        aliases = {alias: fqn for alias, fqn in (model.get("shared_params") or {}).items() if alias != fqn}
        groups, trained = self._trained(shapes)
        buffers = {
            name: torch_files.check_tensor(path, name, modules[name])
            for name in model.get("buffer_names") or ()
            if name in modules
        }
        frozen = self._frozen(modules, {*trained, *aliases, *buffers})
        tensors = _in_order_of(modules, trained | frozen)
        if unknown := sorted(fqn for fqn in aliases.values() if fqn not in trained and fqn not in frozen):
            raise ImportCheckpointError(
                f"{path}: shared_params names {unknown[0]!r}, which the checkpoint does not have"
            )
        return Checkpoint(
            format="deepspeed",
            tensors=tensors,
            aliases=aliases,
            buffers=buffers,
            step=self._count("global_steps"),
            skipped_steps=self._count("skipped_steps"),
            samples=self._count("global_samples"),
            groups=groups,
            lr_scheduler=model.get("lr_scheduler"),
            loss_scale=self._loss_scale(),
            user={name: value for name, value in model.items() if name not in _OWN_ENTRIES},
        )

    def _stage(self) -> int:
        # Files of DeepSpeed's BF16 optimizer do not name the stage of ZeRO, and their layout is that of stages 1 and 2.
        # So they are read as files of stage 1.
        stage = self._ranks[0].get("zero_stage", 1)
        if stage not in (1, 2, 3):
            raise ImportCheckpointError(f"{self._files[0]}: zero_stage {stage!r} is none of 1, 2 and 3")
        return int(stage)

    def _check_count(self) -> None:
        counts = self._ranks[0].get("partition_count")
        counted = max(counts) if isinstance(counts, list) and counts else counts
        if counted != len(self._files) or (isinstance(counts, list) and len(set(counts)) > 1):
            raise ImportCheckpointError(
                f"{self._directory} has the optimizer files of {len(self._files)} ranks, and its partition_count is "
                f"{counts}: a file is missing, or parameters are partitioned over some of the ranks only (MoE, MiCS), "
                "which is not read"
            )
        if self._is_stage_3 and len(self._model_files) != len(self._files):
            raise ImportCheckpointError(
                f"{self._directory} has {len(self._model_files)} model files and {len(self._files)} optimizer files, "
                "and stage 3 has both for each rank"
            )

    def _shapes(self) -> list[_Shapes]:
        """Return, for each flattened group of the checkpoint, the shapes of its trained parameters by name."""
        path = self._model_files[0]
        found: list[_Shapes] = []
        for group in self._entry(path, self._model, "param_shapes", list):
            if not isinstance(group, dict):
                raise ImportCheckpointError(f"{path}: param_shapes has a {type(group).__name__}, not a dict of shapes")
            found.append({name: _shape(path, name, shape) for name, shape in group.items()})
        return found

    def _trained(self, shapes: Sequence[_Shapes]) -> tuple[list[ParameterGroup] | None, dict[str, CheckpointTensor]]:
        """Return the optimizer's parameter groups, or None if the files have none, and the trained parameters by name.

        Args:
            shapes: for each flattened group, the shapes of its parameters by name.
        """
        weights = "fp32_flat_groups" if self._is_stage_3 else "single_partition_of_fp32_groups"
        flat = [self._tensors(rank, weights) for rank in range(len(self._ranks))]
        optimizers = [self._optimizer(rank) for rank in range(len(self._ranks))]
        if any(len(tensors) != len(shapes) for tensors in flat):
            raise ImportCheckpointError(
                f"{self._directory}: the files have {[len(tensors) for tensors in flat]} flattened groups, and "
                f"param_shapes has {len(shapes)}"
            )
        found: dict[str, CheckpointTensor] = {}
        for number, group in enumerate(shapes):
            parts: dict[Kind, list[torch.Tensor]] = {"master": [tensors[number] for tensors in flat]}
            for kind in () if self._weights_only else self._state_kinds(optimizers, number):
                parts[kind] = [
                    self._flat(rank, f"{kind} of group {number}", optimizer.states[number].get(kind))
                    for rank, optimizer in enumerate(optimizers)
                ]
            count = self._update_count(optimizers[0], number)
            for name, kinds in self._cut(group, parts):
                if name in found:
                    raise ImportCheckpointError(f"{self._model_files[0]}: param_shapes has {name!r} twice")
                found[name] = CheckpointTensor(
                    name=name, shape=group[name], weight=kinds.pop("master"), states=kinds, update_count=count
                )
        return _groups(optimizers[0], shapes), found

    def _cut(
        self, group: _Shapes, parts: Mapping[Kind, Sequence[torch.Tensor]]
    ) -> Iterator[tuple[str, dict[Kind, Values]]]:
        """Yield each parameter of a flattened group by name, with its weight and optimizer states as `Values` by kind.

        Args:
            group: the shapes of the group's parameters by name.
            parts: for each kind, the tensors of the group that the ranks' files have.
        """
        for kind, tensors in parts.items():
            self._check_size(group, kind, tensors)
        begins = {
            kind: [0, *itertools.accumulate(tensor.numel() for tensor in tensors[:-1])]
            for kind, tensors in parts.items()
        }
        first = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            part_numel = -(-numel // len(self._ranks))
            values: dict[Kind, Values] = {}
            for kind, tensors in parts.items():
                values[kind] = (
                    Striped(tensors, first, part_numel) if self._is_stage_3 else Joined(tensors, begins[kind], first)
                )
            yield name, values
            first += part_numel if self._is_stage_3 else numel

    def _check_size(self, group: _Shapes, kind: Kind, tensors: Sequence[torch.Tensor]) -> None:
        """Check that the ranks' tensors of a kind have all elements of a flattened group.

        Raises:
            ImportCheckpointError: elements are missing, or there are more than the group's padding explains.
        """
        numels = [tensor.numel() for tensor in tensors]
        ranks = len(self._ranks)
        if self._is_stage_3:
            wanted = sum(-(-math.prod(shape) // ranks) for shape in group.values())
            fits = all(numel == wanted for numel in numels)
        else:
            wanted = sum(map(math.prod, group.values()))
            fits = wanted <= sum(numels) <= -(-wanted // (2 * ranks)) * 2 * ranks
        if not fits:
            hint = ""
            if 0 in numels:
                hint = "; DeepSpeed keeps optimizer states that are on NVMe in other files, which are not read"
            raise ImportCheckpointError(
                f"{self._directory}: the ranks' tensors of {kind} have {numels} elements, and param_shapes has {wanted}"
                f"{' for each rank' if self._is_stage_3 else ' in all'}{hint}"
            )

    def _state_kinds(self, optimizers: Sequence[_Optimizer], number: int) -> list[Kind]:
        """Return the kinds of optimizer states that the files have for the flattened group with this number.

        Raises:
            ImportCheckpointError: the group has a state of an unknown kind, or a rank's file lacks the group.
        """
        states = optimizers[0].states.get(number, {})
        found = [
            name
            for name, value in states.items()
            if name != "step" and isinstance(value, torch.Tensor) and (value.dim() > 0 or name in STATE_KINDS)
        ]
        if unknown := [name for name in found if name not in STATE_KINDS]:
            raise ImportCheckpointError(
                f"{self._files[0]}: the optimizer has a state {unknown[0]!r}, which no optimizer here has "
                f"({', '.join(STATE_KINDS)}): import the weights alone (--weights-only)"
            )
        for rank, optimizer in enumerate(optimizers):
            if number not in optimizer.states and found:
                raise ImportCheckpointError(f"{self._files[rank]} has no optimizer states of group {number}")
        return [kind for kind in STATE_KINDS if kind in found]

    def _update_count(self, optimizer: _Optimizer, number: int) -> int:
        """Return how often the optimizer has updated the parameters of the flattened group with this number."""
        for value in (optimizer.states.get(number, {}).get("step"), *optimizer.steps):
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                return int(value.item())
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return self._count("global_steps") - self._count("skipped_steps")

    def _frozen(self, modules: Mapping[str, Any], known: set[str]) -> dict[str, CheckpointTensor]:
        """Return the frozen parameters by name.

        Args:
            modules: the model's state dict in the checkpoint.
            known: the names of trained parameters, of buffers, and the further names of tied parameters. None of
                these is a frozen parameter.
        """
        found: dict[str, CheckpointTensor] = {}
        if not self._is_stage_3:
            path = self._model_files[0]
            for name, value in modules.items():
                if name not in known and isinstance(value, torch.Tensor) and value.is_floating_point():
                    tensor = torch_files.check_tensor(path, name, value)
                    found[name] = _frozen(name, tuple(tensor.shape), TensorValues(tensor))
            return found
        shapes = self._model.get("frozen_param_shapes") or {}
        if not shapes:
            return found
        fragments = []
        for path in self._model_files:
            model = self._model if path == self._model_files[0] else load_dict(path)
            fragments.append(self._entry(path, model, "frozen_param_fragments", dict))
        for name, value in shapes.items():
            shape = _shape(self._model_files[0], name, value)
            part_numel = -(-math.prod(shape) // len(fragments))
            tensors = [
                torch_files.check_tensor(path, name, fragment.get(name)).reshape(-1)
                for path, fragment in zip(self._model_files, fragments, strict=True)
            ]
            if any(tensor.numel() != part_numel for tensor in tensors):
                raise ImportCheckpointError(
                    f"{self._directory}: the parts of {name!r} have {[tensor.numel() for tensor in tensors]} elements, "
                    f"and each should have {part_numel}"
                )
            found[name] = _frozen(name, shape, Striped(tensors, 0, part_numel))
        return found

    def _optimizer(self, rank: int) -> _Optimizer:
        """Return the part of the optimizer that a rank's file has. It can raise ImportCheckpointError."""
        path, state = self._files[rank], self._ranks[rank]
        held = state.get("optimizer_state_dict" if self._is_stage_3 else "base_optimizer_state")
        if isinstance(held, list) and all(isinstance(item, dict) for item in held):
            # An elastic checkpoint of DeepSpeed has the optimizer states as a list, with one dict for each parameter
            # group.
            return _Optimizer(dict(enumerate(held)), [], (state.get("base_optimizer_state_step"),))
        if not isinstance(held, dict) or not isinstance(held.get("state"), dict):
            raise ImportCheckpointError(f"{path} has no optimizer states that are understood")
        groups = held.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise ImportCheckpointError(f"{path} has no parameter groups")
        if not all(isinstance(states, dict) for states in held["state"].values()):
            raise ImportCheckpointError(f"{path}: the optimizer's states are not understood")
        return _Optimizer(held["state"], groups, tuple(group.get("step") for group in groups))

    def _tensors(self, rank: int, key: str) -> list[torch.Tensor]:
        held = self._entry(self._files[rank], self._ranks[rank], key, list)
        return [self._flat(rank, f"{key}[{number}]", tensor) for number, tensor in enumerate(held)]

    def _flat(self, rank: int, name: str, tensor: Any) -> torch.Tensor:
        checked = torch_files.check_tensor(self._files[rank], name, tensor)
        if checked.dim() != 1 or not checked.is_floating_point():
            raise ImportCheckpointError(
                f"{self._files[rank]}: {name} of {checked.dtype}, shape {list(checked.shape)}, should be flat"
            )
        return checked.detach()

    def _loss_scale(self) -> dict[str, Any] | None:
        """Return the state of a dynamic loss scale, as LossScaler has it; None if the run had no dynamic loss scale."""
        scaler = self._ranks[0].get("loss_scaler")
        values = vars(scaler) if isinstance(scaler, Scaler) else {}
        if not values.get("dynamic"):
            return None
        try:
            good = int(values["cur_iter"]) - int(values["last_overflow_iter"]) - 1
            return {
                "scale": float(values["cur_scale"]),
                "patience": int(values["cur_hysteresis"]),
                "good_steps": max(0, good),
                "dynamic": True,
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ImportCheckpointError(f"{self._files[0]}: the loss scale is not understood: {error!r}") from None

    def _count(self, key: str) -> int:
        value = self._model.get(key, 0)
        if not isinstance(value, int) or value < 0:
            raise ImportCheckpointError(f"{self._model_files[0]}: {key} is {value!r}, and a count is expected")
        return value

    def _entry(self, path: Path, content: Mapping[str, Any], key: str, kind: type) -> Any:
        value = content.get(key)
        if not isinstance(value, kind):
            raise ImportCheckpointError(
                f"{path}: the entry {key!r} is a {type(value).__name__}, not a {kind.__name__}, so this is "
                "no ZeRO checkpoint of DeepSpeed that is read here"
            )
        return value


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """The part of the optimizer that one rank's file has.

    Attributes:
        states: for each flattened group, by its number: the rank's partition of each optimizer state.
        groups: the parameter groups, whose "params" are numbers of flattened groups.
        steps: counts of updates that the file has outside of the states, for each parameter group or for all.
    """

    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    steps: tuple[Any, ...]


def _groups(optimizer: _Optimizer, shapes: Sequence[_Shapes]) -> list[ParameterGroup] | None:
    """Return the optimizer's parameter groups, each with its parameters' names; None if the file has no groups."""
    if not optimizer.groups:
        return None
    found = []
    for group in optimizer.groups:
        numbers = [number for number in group.get("params", ()) if number in range(len(shapes))]
        names = [name for number in numbers for name in shapes[number]]
        found.append(ParameterGroup(names=names, settings={key: group[key] for key in group if key != "params"}))
    return found


def _frozen(name: str, shape: tuple[int, ...], values: Values) -> CheckpointTensor:
    return CheckpointTensor(name=name, shape=shape, weight=values, trainable=False)


def _shape(path: Path, name: object, shape: object) -> tuple[int, ...]:
    if (
        not isinstance(name, str)
        or not isinstance(shape, (tuple, list))
        or not all(isinstance(size, int) and size >= 0 for size in shape)
    ):
        raise ImportCheckpointError(f"{path}: the parameter {name!r} has no shape that is understood: {shape!r}")
    return tuple(shape)


def _in_order_of(modules: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]) -> list[CheckpointTensor]:
    """Return the tensors in the order of the model's state dict, which has the parameters in the model's order."""
    places = {name: place for place, name in enumerate(modules)}
    return sorted(tensors.values(), key=lambda tensor: places.get(tensor.name, len(places)))
