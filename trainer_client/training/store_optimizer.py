"""The optimizer that the training loop sees: parameter groups and hyper-parameters, without optimizer states.

This module owns the parameter groups, which torch's LR schedulers change, and the set of parameters that have optimizer
states. The store has the states and does the arithmetic. This module must never touch a parameter's values.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias, overload

import torch

from paramserver.contract.kinds import Kind, kind_name
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.optimizers.registry import find_problem, state_kinds
from trainer_client.base.index_ranges import from_ranges, to_ranges
from trainer_client.errors import ConfigError
from trainer_client.optimizers.hyper_parameters import check_settings
from trainer_client.optimizers.registry import OPTIMIZERS, find_record
from trainer_client.optimizers.torch_optimizer import OptimizerSection, ParameterGroup
from trainer_client.training.model.parameter_offload import ParameterOffload
from trainer_client.training.model.parameters import ModelParameter

log = logging.getLogger(__name__)

# The name of the setting that makes torch's Adam compute as AdamW. No schedule changes this setting, so it is not taken
# from a stored run.
_DECOUPLED = "decoupled_weight_decay"
# The name of a setting of Adam and AdamW in the config: whether the moments' bias is corrected. A parameter group
# without this setting corrects the bias.
_CORRECTS = "bias_correction"

OptimizerArgument: TypeAlias = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


class LossScale(Protocol):
    """The attributes of the engine's loss scaler that users read. DeepSpeed has the same names.

    step/precision.py has the loss scaler itself.
    """

    is_enabled: bool
    dynamic: bool
    scale_window: int
    min_scale: float
    cur_iter: int

    @property
    def cur_scale(self) -> float: ...


class LoopDriver(Protocol):
    """The methods of the engine that StoreOptimizer calls when the user's loop calls its `step` or `zero_grad`."""

    @property
    def loss_scaler(self) -> LossScale: ...

    def was_step_skipped(self) -> bool: ...

    def step(self) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class StoreOptimizer(torch.optim.Optimizer):
    """An optimizer that has taken over the parameter groups of the user's optimizer, the original.

    The two optimizers share the same list of groups and the same dicts. So a scheduler that was made for the original
    changes this optimizer, too, and a group that is added to one of them is added to the other.

    A parameter has optimizer states if, when the groups are taken over, it requires a gradient, is in a group, or is
    named by `may_thaw`. Only a parameter with states may be put into a group or be trained later. A trainable parameter
    that is in no group has a gradient and is never updated, as in torch.

    Args:
        original: an optimizer that has made no step. Its states are dropped, so that their memory is freed.
        parameters: all parameters of the model.
        may_thaw: patterns (of `fnmatch`) for the FQNs of parameters that are frozen now and may be trained later.

    Attributes:
        parameter_offload: DeepSpeed's attribute, see model/parameter_offload.py. It exists at stage 3 only.

    Raises:
        ConfigError: the store does not run the optimizer's class, the store's kernels do not support a flag of it, a
            group has parameters that are not the model's, or a pattern names no parameter.
    """

    parameter_offload: ParameterOffload

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
        self._is_user_stepping = False
        self._engine: weakref.ref[LoopDriver] | None = None
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
        self.state = original.state = StatesInStore()
        for each in (self, original):
            each.register_state_dict_pre_hook(_warn_of_no_states)
        if idle := [p.fqn for p in parameters if p.tensor.requires_grad and id(p.tensor) not in grouped]:
            log.warning("trainable, but in no parameter group of the optimizer, and never updated: %s", ", ".join(idle))

    @property
    def name(self) -> str:
        """The name of the optimizer's class, as the config has it."""
        return self._record.name

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The original optimizer. It has the same parameter groups, and no states, because the store has them."""
        return self._original

    # The properties below show the loss scale, as DeepSpeed's optimizers do.

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale: `cur_scale`, `scale_window`, `min_scale`, `cur_iter` and `dynamic`. Only for reading."""
        return self._driver().loss_scaler

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step; 1 in bf16 and fp32."""
        return self.loss_scaler.cur_scale

    @property
    def cur_scale(self) -> float:
        """The factor of the loss in the next step; 1 in bf16 and fp32."""
        return self.loss_scaler.cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic: it falls at an overflow, and grows when none has come for long."""
        return self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because its gradient was not finite on some rank."""
        return self._driver().was_step_skipped()

    def needs_scaler(self) -> bool:
        """Return whether a loss must be scaled before `loss.backward()`, with `engine.scale(loss)`."""
        return self.loss_scaler.is_enabled

    def has_states(self, parameter: ModelParameter) -> bool:
        """Return whether the store keeps optimizer states of the parameter, and so takes its gradients."""
        return parameter.index in self._stateful

    def stateful_ranges(self) -> list[list[int]]:
        """Return the indexes of the parameters that have optimizer states, as ranges [first, last]."""
        return to_ranges(sorted(self._stateful))

    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a parameter group, as torch's optimizers do.

        Raises:
            ConfigError: the store cannot update the group, for example because a parameter has no states. Nothing was
                added.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(len(self.param_groups) - 1)
        except ConfigError:
            self.param_groups.pop()
            raise

    def check_groups(self) -> None:
        """Check that the next step can be made with the groups and the model's parameters as they are now.

        Users and schedulers change groups and parameters without calling this class, so the engine calls this once a
        step.

        Raises:
            ConfigError: the message names the group or the parameter, and what is wrong with it.
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
        """Make a step, as `engine.step()` does.

        Raises:
            RuntimeError: a closure was given, or the optimizer has no engine.
        """
        if closure is not None:
            raise RuntimeError(
                "optimizer.step(closure) is not possible, because the store makes one update of each gradient: call "
                "the closure yourself, then step()"
            )
        if self._update is not None:
            self._run(self._update)
            return None
        # torch runs the user's step hooks around each call of `step`. If the user calls `step`, the engine's step calls
        # `make_step` in turn. `make_step` must then not call `step` again, because the hooks would run twice.
        self._is_user_stepping = True
        try:
            self._driver().step()
        finally:
            self._is_user_stepping = False
        return None

    def make_step(self, update: Callable[[], None]) -> None:
        """Run the engine's `update` as one step of this optimizer, with the user's step hooks before and after it."""
        if self._is_user_stepping:
            self._run(update)
            return
        self._update = update
        try:
            self.step()
        finally:
            self._update = None

    def _run(self, update: Callable[[], None]) -> None:
        update()
        # The parameters have no `.grad`, so the step of the user's original optimizer updates nothing. It is called
        # nevertheless, because a scheduler that was made for the original optimizer counts the calls, and because it
        # runs the user's step hooks.
        self._original.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes that no step has followed, as `engine.zero_grad()` does."""
        self._driver().zero_grad(set_to_none)

    def drive(self, engine: LoopDriver) -> None:
        """Have the user's `step()` and `zero_grad()` call those of `engine`. The optimizer does not keep it alive."""
        self._engine = weakref.ref(engine)

    def _driver(self) -> LoopDriver:
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise RuntimeError("the optimizer has no engine: its engine was deleted, or initialize() has not returned")
        return engine

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse the call, because the store has the states."""
        raise RuntimeError(
            "the store has the optimizer's states, and a job resumes with them: remove load_state_dict()"
        )

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """The kinds of optimizer state that the store keeps of each parameter: all that any group needs.

        They never change after the first use of this property, because the job is opened with them.
        """
        if self._state_kinds is None:
            rows = (self.row(number, 1) for number in range(len(self.param_groups)))
            self._state_kinds = tuple(sorted({kind for row in rows for kind in state_kinds(row)}))
        return self._state_kinds

    def groups_of_parameters(self) -> dict[int, int]:
        """Return the number of the group of each parameter, by the parameter's index in the model.

        Parameters that are in no group now are left out.
        """
        return {
            self._index_of[id(tensor)]: number
            for number, group in enumerate(self.param_groups)
            for tensor in group["params"]
        }

    def row(self, group: int, update_count: int) -> HyperParameters:
        """Return the hyper-parameters of a group for the `update_count`-th update of a parameter."""
        return self._record.to_row(self.param_groups[group], self.defaults, update_count)

    def settings(self) -> list[ParameterGroup]:
        """Return the hyper-parameters of the parameter groups, for the client state of a commit.

        `load_settings` sets the groups to them in a later run.

        The parameters of each group are stored as ranges of their indexes in the model.
        """
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"params": to_ranges(self._index_of[id(tensor)] for tensor in group["params"])}
            for group in self.param_groups
        ]

    def check_settings(self, settings: Sequence[ParameterGroup]) -> None:
        """Check that `load_settings` can set the groups to these settings.

        Raises:
            ConfigError: a group has other parameters than in `settings`, or `settings` has fewer groups than there are.
        """
        if len(settings) < len(self.param_groups):
            raise ConfigError(
                f"the optimizer has {len(self.param_groups)} parameter groups, the job was left with {len(settings)}: "
                "pass the same groups"
            )
        for number, (group, stored) in enumerate(zip(self.param_groups, settings, strict=False)):
            indexes = from_ranges(stored["params"])
            present = [self._index_of[id(tensor)] for tensor in group["params"]]
            if present != indexes:
                fqns = [self._parameters[index].fqn for index in sorted(set(present) ^ set(indexes))]
                raise ConfigError(
                    f"parameter group {number} of the optimizer is not the one that the job was left with (they differ "
                    f"in {', '.join(fqns) or 'the order of their parameters'}): pass the same groups"
                )

    def load_settings(self, settings: Sequence[ParameterGroup]) -> None:
        """Set the groups to what `settings` returned in an earlier run, and add the groups that were added in it.

        It can raise ConfigError, as `check_settings`, before anything is changed.
        """
        self.check_settings(settings)
        for number, stored in enumerate(settings):
            values = dict(stored)
            # Adam and AdamW have the same states, so a run with the one may go on with the other. The stored flag of
            # decoupled weight decay is dropped, because it would turn the optimizer that this run passes into that of
            # the earlier run.
            values.pop(_DECOUPLED, None)
            if _CORRECTS in self.defaults:
                values.setdefault(_CORRECTS, True)
            indexes = from_ranges(values.pop("params"))
            if number == len(self.param_groups):
                members = [self._parameters[index] for index in indexes]
                # torch requires that either all parameter groups have names of their parameters, or none. So the added
                # group gets names if the first group has them.
                named = "param_names" in self.param_groups[0]
                params = [(p.fqn, p.tensor) for p in members] if named else [p.tensor for p in members]
                self.add_param_group({**values, "params": params})
                continue
            self.param_groups[number].update(values)

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


class StatesInStore(defaultdict[Any, Any]):
    """The `state` of an optimizer whose states are in the store: empty, and an access raises ConfigError."""

    def __missing__(self, _: Any) -> Any:
        raise self._refusal()

    def __setitem__(self, _: Any, __: Any) -> None:
        raise self._refusal()

    def __delitem__(self, _: Any) -> None:
        raise self._refusal()

    def clear(self) -> None:
        """Refuse the call, because this dict has no states that could be cleared."""
        raise self._refusal()

    def pop(self, *_: Any) -> Any:
        """Refuse the call, because this dict has no states that could be removed."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            "optimizer.state is empty, because the store has the states: read one by "
            'engine.get_full(parameter, "exp_avg"), and change it by engine.set_full(parameter, "exp_avg", values), on '
            "all ranks"
        )


def make_optimizer(
    argument: OptimizerArgument,
    section: OptimizerSection | None,
    model_parameters: Iterable[Any] | None,
    parameters: Sequence[ModelParameter],
    may_thaw: Sequence[str] = (),
) -> StoreOptimizer:
    """Return the optimizer for `initialize`: from the user's instance, else from their callable, else from the config.

    Args:
        argument: an optimizer that the store runs, or a callable that takes parameters and returns such an optimizer.
        section: the config's section `optimizer`.
        model_parameters: the parameters or parameter groups to optimise; None stands for all trainable parameters.
            Without effect if `argument` is an optimizer instance, which has its own groups.
        parameters: all parameters of the model.
        may_thaw: see StoreOptimizer.

    Raises:
        ConfigError: see StoreOptimizer; or there is neither `argument` nor `section`.
    """
    if isinstance(argument, torch.optim.Optimizer):
        return StoreOptimizer(argument, parameters, may_thaw)
    chosen = [p.tensor for p in parameters if p.tensor.requires_grad] if model_parameters is None else model_parameters
    if argument is not None:
        return StoreOptimizer(argument(chosen), parameters, may_thaw)
    if section is None:
        raise ConfigError(
            'no optimizer: write {"optimizer": {"type": "AdamW", "params": {"lr": ...}}}, or pass one; for inference '
            "without one, write zero_optimization.stage 3"
        )
    # A list of no parameters is passed within a group, because torch refuses an empty list of parameters, but takes a
    # group with an empty list.
    groups = [{"params": chosen}] if model_parameters is None else chosen
    try:
        original = OPTIMIZERS[section.type].torch_class(groups, **section.params.arguments())
    except ValueError as error:
        raise ConfigError(f"optimizer.params is refused by {section.type}: {error}") from None
    # The settings of the config become defaults of the optimizer, because a parameter group that is added later takes
    # from them the settings that it lacks.
    original.defaults |= section.params.group_settings()
    for group in original.param_groups:
        group |= {key: value for key, value in section.params.group_settings().items() if key not in group}
    return StoreOptimizer(original, parameters, may_thaw)


def _warn_of_no_states(_: torch.optim.Optimizer) -> None:
    log.warning(
        "optimizer.state_dict() has the parameter groups and no states, because the store has the states: save a "
        "checkpoint with engine.save_checkpoint(), or files with engine.export('dcp', ..., optimizer=True)"
    )


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
