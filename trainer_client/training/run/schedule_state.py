"""A learning-rate schedule that goes on from the state of a schedule in a commit or in a checkpoint.

The stored schedule may be of another class, and the parameter groups may have settings of this run. This module owns
the rules for these cases. It must never change a setting of a parameter group that the schedule does not set.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from trainer_client.errors import ConfigError
from trainer_client.schedules.schedule import Schedule

log = logging.getLogger(__name__)

# The classes of torch's schedules that have no `_get_closed_form_lr`, although their learning rates follow from the
# count of steps alone. Such a schedule can go to any step at once.
_OF_COUNT = (CosineAnnealingWarmRestarts, CyclicLR, LambdaLR, OneCycleLR)

ParameterGroups = Sequence[dict[str, Any]]


def restore_schedule(
    scheduler: Any,
    stored: Mapping[str, Any] | None,
    stored_class: str | None,
    *,
    groups: ParameterGroups,
    rates_before: Sequence[float],
    keeps_settings: bool,
    takes_count_alone: bool = False,
) -> None:
    """Have a schedule go on from a stored state, and give the groups the rates that belong to its count of steps.

    A schedule of torch gets the stored parameters. If its class is not the stored class, it gets only the stored count.
    It keeps the base rates of this run if its class is not the stored class, or if the groups have this run's settings.

    Args:
        scheduler: the schedule of this run.
        stored: the stored state; None: the stored run had no schedule, so this run's schedule stays where it is.
        stored_class: the name of the class that the state is of; None: it was not recorded.
        groups: the parameter groups of the optimizer.
        rates_before: the groups' rates by `scheduler` before stored settings may have replaced them.
        keeps_settings: whether the groups have their stored settings. If not, the schedule keeps the base rates of
            this run.
        takes_count_alone: whether the schedule gets only the stored count and keeps its own parameters.

    Raises:
        ConfigError: the schedule has made more steps than the stored one, and cannot go back.
    """
    if stored is None:
        _set_rates(groups, rates_before)
    elif not isinstance(scheduler, LRScheduler):
        scheduler.load_state_dict(dict(stored))
    elif isinstance(scheduler, Schedule):
        # The state of a schedule of this library is only its count of steps. So the stored state of any of these
        # classes fits each of them.
        scheduler.load_state_dict(dict(stored))
        if not keeps_settings and scheduler.last_batch_iteration >= 0:
            scheduler.step(scheduler.last_batch_iteration)
    elif (takes_count_alone or not _has_class(scheduler, stored, stored_class)) and (
        count := _count_of(stored)
    ) is not None:
        _set_rates(groups, rates_before)
        _go_to(scheduler, count)
    elif keeps_settings:
        scheduler.load_state_dict(dict(stored))
    else:
        _follow(scheduler, stored, groups)


def rates_of(groups: ParameterGroups) -> list[float]:
    """Return the present learning rate of each parameter group, in the order of `groups`."""
    return [float(group["lr"]) for group in groups]


def restore_rates(groups: ParameterGroups, rates: Sequence[float], *, is_loud: bool) -> None:
    """Give the groups of a resumed job the rates of this run again.

    Args:
        rates: the rates with which this run has made the groups, in their order.
        is_loud: whether this rank logs a rate that differs from the stored one.
    """
    stored = rates_of(groups)
    _set_rates(groups, rates)
    if is_loud and rates_of(groups) != stored:
        log.warning("the learning rates are those of the script: %s (stored: %s)", rates_of(groups), stored)


def _set_rates(groups: ParameterGroups, rates: Sequence[float]) -> None:
    """Give parameter groups these rates. If there are more groups than rates, the last groups keep their rates."""
    for group, rate in zip(groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _has_class(scheduler: LRScheduler, stored: Mapping[str, Any], stored_class: str | None) -> bool:
    """Return whether a stored state was made by a schedule of the same class as `scheduler`.

    Commits of earlier versions and imported checkpoints do not name the class. A state without a class is taken for one
    of the schedule's class if it has all parameters of the class.
    """
    if stored_class is not None:
        return stored_class == type(scheduler).__name__
    return all(key in stored for key in scheduler.state_dict() if not key.startswith("_") or key == "_schedulers")


def _count_of(stored: Mapping[str, Any]) -> int | None:
    """Return the count of steps in a state of a schedule of torch or of DeepSpeed; None if the state has none."""
    for part in (stored, *stored.get("_schedulers", ())):
        if "last_epoch" in part:
            return int(part["last_epoch"])
        if "last_batch_iteration" in part:
            return int(part["last_batch_iteration"]) + 1
    return None


def _go_to(scheduler: LRScheduler, count: int) -> None:
    """Have a schedule of torch go on at a count of steps, and give the groups its rates at that count."""
    with warnings.catch_warnings():
        # torch warns if `step` is called with a count, or if a schedule makes a step before its optimizer has made one.
        # Both are intended here, so the warnings are suppressed.
        warnings.simplefilter("ignore")
        if hasattr(scheduler, "_get_closed_form_lr") or isinstance(scheduler, _OF_COUNT):
            scheduler.step(count)
            scheduler._step_count = count + 1
            return
        made = next(part.last_epoch for part in _parts(scheduler) if hasattr(part, "last_epoch"))
        if made > count:
            name = type(scheduler).__name__
            raise ConfigError(
                f"lr_scheduler {name} has made {made} steps and cannot go back to step {count}, at which the stored "
                f"schedule of another class is: make {name} anew, or give load_lr_scheduler_states=False"
            )
        for _ in range(count - made):
            scheduler.step()


def _follow(scheduler: LRScheduler, stored: Mapping[str, Any], groups: ParameterGroups) -> None:
    """Load the state of a schedule of torch, but keep the base rates of this run.

    If, for example, a group's stored rate was half of its stored base rate, its rate becomes half of its base rate in
    this run.
    """
    own = [(part, list(part.base_lrs)) for part in _parts(scheduler) if hasattr(part, "base_lrs")]
    scheduler.load_state_dict(dict(stored))
    stored_bases: Sequence[Any] = own[0][0].base_lrs
    stored_rates = scheduler.get_last_lr()
    for part, bases in own:
        part.base_lrs = bases
    rates = []
    for number, base in enumerate(map(float, own[0][1])):
        # If the stored state has fewer parameter groups than this run, the rates of its last group are used for the
        # groups that it lacks.
        index = min(number, len(stored_rates) - 1)
        stored_base, rate = float(stored_bases[index]), float(stored_rates[index])
        rates.append(rate if stored_base in (base, 0.0) else base * (rate / stored_base))
    _set_rates(groups, rates)
    scheduler._last_lr = [*rates]


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a schedule, and the schedules inside it, as in SequentialLR or ChainedScheduler."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
