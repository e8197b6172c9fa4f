"""The optimizer as the training loop sees it: parameter groups and hyper-parameters, without state.

Owns the parameter groups, which torch's LR schedulers drive, and which parameters have optimizer states at all. The
states and the arithmetic are the store's; must never touch a parameter's values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, overload

import torch

from paramserver.contract.kinds import Kind, kind_name
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.optimizers.registry import find_problem, state_kinds
from trainer_client.errors import ConfigError
from trainer_client.model.parameters import ModelParameter
from trainer_client.optimizers.hyper_parameters import check_settings
from trainer_client.optimizers.registry import OPTIMIZERS, find_record
from trainer_client.optimizers.torch_optimizer import OptimizerSection, ParameterGroup

log = logging.getLogger(__name__)

# What makes torch's Adam its AdamW. Not a setting that a schedule would change.
_DECOUPLED = "decoupled_weight_decay"

OptimizerArgument: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


class StoreOptimizer(torch.optim.Optimizer):
    """Takes an optimizer's parameter groups over, the same list and dict objects: a scheduler that was made for the
    original drives them too, and a group that is added to the one is added to the other.

    A parameter has optimizer states if it requires a gradient when the optimizer is taken over, is in a group, or is
    named by `may_thaw`. Only such a one may be in a group, or be trained, later. One that is in no group has a gradient
    and is never updated, as in torch.

    Args:
        original: fresh. What it has allocated for its states is given back.
        parameters: the model's.
        may_thaw: FQNs, as patterns of `fnmatch`, of parameters that are frozen now and may be trained later.

    Raises:
        ConfigError: a class that the store does not run, a flag that its kernels do not have, a group with parameters
            that are not the model's, or a pattern that names no parameter.
    """

    def __init__(
        self,
        original: torch.optim.Optimizer,
        parameters: Sequence[ModelParameter],
        may_thaw: Sequence[str] = (),
    ) -> None:
        self._record = find_record(original)
        if any(state.get("step", 1) > 0 for state in original.state.values()):
            raise ConfigError("the optimizer has made steps already: its states cannot be taken over; pass a fresh one")
        original.state.clear()
        self._original = original
        self._update: Callable[[], None] | None = None
        self._state_kinds: tuple[Kind, ...] | None = None
        self._parameters = parameters
        self._index_of = {id(parameter.tensor): parameter.index for parameter in parameters}
        grouped = {id(tensor) for group in original.param_groups for tensor in group["params"]}
        thawed = _matching(may_thaw, parameters)
        self._stateful = frozenset(
            p.index for p in parameters if p.tensor.requires_grad or id(p.tensor) in grouped or p.index in thawed
        )
        super().__init__(original.param_groups, original.defaults)
        self.param_groups = original.param_groups
        if idle := [p.fqn for p in parameters if p.tensor.requires_grad and id(p.tensor) not in grouped]:
            log.warning("trainable, but in no parameter group of the optimizer, and never updated: %s", ", ".join(idle))

    def has_states(self, parameter: ModelParameter) -> bool:
        """Whether the store keeps optimizer states of the parameter, and takes gradients of it."""
        return parameter.index in self._stateful

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """As torch's. Raises ConfigError, and adds nothing, if a parameter of the group has no states."""
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except ConfigError:
            self.param_groups.pop()
            raise

    def check_groups(self) -> None:
        """Raises ConfigError if the next step cannot be made with the groups, or the model's parameters, as they are.

        They are the user's: what was set on them behind our back is looked at once a step.
        """
        for number in range(len(self.param_groups)):
            self._check_group(number)
        for parameter in self._parameters:
            if parameter.tensor.requires_grad and parameter.index not in self._stateful:
                raise ConfigError(_without_states(parameter.fqn))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Only `engine.step()` may call this."""
        if self._update is None or closure is not None:
            raise RuntimeError("the store runs the optimizer: call engine.step() instead of optimizer.step()")
        self._update()
        # Without gradients this updates nothing. It tells a scheduler that was made for the original that a step was
        # made, and runs the user's step hooks.
        self._original.step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Only the engine knows when gradients are done with."""
        raise RuntimeError("gradients go to the store and are done with at engine.step(): remove optimizer.zero_grad()")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The states are not here to be replaced."""
        raise RuntimeError(
            "the store has the optimizer's states, and a job resumes with them: remove load_state_dict()"
        )

    @contextmanager
    def stepping_with(self, update: Callable[[], None]) -> Iterator[None]:
        """Within the context, `step` runs `update`."""
        self._update = update
        try:
            yield
        finally:
            self._update = None

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """The states that the optimizer keeps of each parameter; for good, once asked: a job is opened with them."""
        if self._state_kinds is None:
            rows = (self.row(number, 1) for number in range(len(self.param_groups)))
            self._state_kinds = tuple(sorted({kind for row in rows for kind in state_kinds(row)}))
        return self._state_kinds

    def groups_of_parameters(self) -> dict[int, int]:
        """The number of the group of each parameter (index in the model) that is in one now."""
        return {
            self._index_of[id(tensor)]: number
            for number, group in enumerate(self.param_groups)
            for tensor in group["params"]
        }

    def row(self, group: int, update_count: int) -> HyperParameters:
        """The hyper-parameters of a group for a parameter's `update_count`-th update."""
        return self._record.to_row(self.param_groups[group], self.defaults, update_count)

    def settings(self) -> list[ParameterGroup]:
        """What the groups hold, for the client state; the parameters as ranges of their indexes in the model."""
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"params": _ranges(self._index_of[id(tensor)] for tensor in group["params"])}
            for group in self.param_groups
        ]

    def load_settings(self, settings: Sequence[ParameterGroup]) -> None:
        """Takes over what `settings` gave, and adds the groups that were added in the course of that run.

        Raises:
            ConfigError: a group has other parameters than it had, or there are more groups than there were.
        """
        if len(settings) < len(self.param_groups):
            raise ConfigError(
                f"the optimizer has {len(self.param_groups)} parameter groups, the job was left with {len(settings)}: "
                "pass the same groups"
            )
        for number, stored in enumerate(settings):
            values = dict(stored)
            indexes = [index for first, last in values.pop("params") for index in range(first, last + 1)]
            if number == len(self.param_groups):
                members = [self._parameters[index] for index in indexes]
                # torch has names of all groups' parameters, or of none.
                named = "param_names" in self.param_groups[0]
                params = [(p.fqn, p.tensor) for p in members] if named else [p.tensor for p in members]
                self.add_param_group({**values, "params": params})
                continue
            group = self.param_groups[number]
            present = [self._index_of[id(tensor)] for tensor in group["params"]]
            if present != indexes:
                fqns = [self._parameters[index].fqn for index in sorted(set(present) ^ set(indexes))]
                raise ConfigError(
                    f"parameter group {number} of the optimizer is not the one that the job was left with (they differ "
                    f"in {', '.join(fqns) or 'the order of their parameters'}): pass the same groups"
                )
            if values.pop(_DECOUPLED, None) != group.get(_DECOUPLED):
                # Their states are the same: the one that this run passes goes on with them.
                log.warning("parameter group %d: the job was left with the other of Adam and AdamW", number)
            group.update(values)

    def _check_group(self, number: int) -> None:
        group = self.param_groups[number]
        check_settings(self._record, number, group)
        strangers = [tensor for tensor in group["params"] if id(tensor) not in self._index_of]
        if strangers:
            raise ConfigError(
                f"parameter group {number} of the optimizer has {len(strangers)} parameters that are not the model's, "
                f"the first of shape {list(strangers[0].shape)}: remove them"
            )
        for tensor in group["params"]:
            index = self._index_of[id(tensor)]
            if index not in self._stateful:
                raise ConfigError(_without_states(self._parameters[index].fqn))
        row = self.row(number, 1)
        if problem := find_problem(row):
            raise ConfigError(f"parameter group {number} of the optimizer: {problem}")
        kept = self._state_kinds
        if missing := [kind for kind in state_kinds(row) if kept is not None and kind not in kept]:
            names = ", ".join(map(kind_name, missing))
            raise ConfigError(
                f"parameter group {number} needs {names} now, which no group did when the job was opened: give one a "
                "momentum from the beginning"
            )


def make_optimizer(
    argument: OptimizerArgument,
    section: OptimizerSection | None,
    model_parameters: Iterable[Any] | None,
    parameters: Sequence[ModelParameter],
    may_thaw: Sequence[str] = (),
) -> StoreOptimizer:
    """The optimizer of `initialize`: the client's instance, its callable, or the config's, in this order.

    Args:
        argument: an optimizer that the store runs, or a callable from parameters to one.
        section: the config's `optimizer`.
        model_parameters: parameters or parameter groups to optimise; None: all trainable ones.
        parameters: the model's.
        may_thaw: as StoreOptimizer's.
    """
    if isinstance(argument, torch.optim.Optimizer):
        if model_parameters is not None:
            raise ConfigError("model_parameters and an optimizer instance are both given: the optimizer has its groups")
        return StoreOptimizer(argument, parameters, may_thaw)
    chosen = [p.tensor for p in parameters if p.tensor.requires_grad] if model_parameters is None else model_parameters
    if argument is not None:
        return StoreOptimizer(argument(chosen), parameters, may_thaw)
    if section is None:
        raise ConfigError('no optimizer: write {"optimizer": {"type": "AdamW", "params": {"lr": ...}}}, or pass one')
    # A list of no parameters is an error to torch, a group of none is not.
    groups = [{"params": chosen}] if model_parameters is None else chosen
    try:
        original = OPTIMIZERS[section.type].torch_class(groups, **section.params.arguments())
    except ValueError as error:
        raise ConfigError(f"optimizer.params is refused by {section.type}: {error}") from error
    return StoreOptimizer(original, parameters, may_thaw)


def _matching(patterns: Sequence[str], parameters: Sequence[ModelParameter]) -> frozenset[int]:
    matches = {pattern: [p.index for p in parameters if fnmatchcase(p.fqn, pattern)] for pattern in patterns}
    if idle := [pattern for pattern, indexes in matches.items() if not indexes]:
        raise ConfigError(f"paramserver.may_thaw has {idle[0]!r}, which names no parameter of the model: correct it")
    return frozenset(index for indexes in matches.values() for index in indexes)


def _without_states(fqn: str) -> str:
    return (
        f"parameter {fqn} cannot be trained: it was frozen and in no parameter group when the job was opened, and has "
        "no optimizer states in the store; name it in paramserver.may_thaw, and resume the job"
    )


def _ranges(indexes: Iterable[int]) -> list[list[int]]:
    """Consecutive indexes as [first, last]: models have up to some hundred thousand."""
    ranges: list[list[int]] = []
    for index in indexes:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ranges
