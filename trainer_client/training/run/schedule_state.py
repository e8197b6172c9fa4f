"""A learning-rate schedule that goes on from the state of one in a commit or in a checkpoint.

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

# Classes of torch whose rates follow from the count of steps alone, besides those with a method for this.
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

    A schedule of torch gets the stored parameters. If its class is another one than the stored one, it gets only the
    stored count. Its base rates are those of this run in that case, and if the groups have this run's settings.

    Args:
        scheduler: the schedule of this run.
        stored: the state; None: the stored run had no schedule, and this one stays where it is.
        stored_class: the name of the class that the state is of; None: it was not recorded.
        groups: the parameter groups of the optimizer.
        rates_before: their rates by the schedule as it is, which stored settings may have replaced.
        keeps_settings: whether the groups have their stored settings.
        takes_count_alone: whether the schedule keeps its own parameters, as one of another class does.

    Raises:
        ConfigError: the schedule has made more steps than the stored one, and cannot go back.
    """
    if stored is None:
        _set_rates(groups, rates_before)
    elif not isinstance(scheduler, LRScheduler):
        scheduler.load_state_dict(dict(stored))
    elif isinstance(scheduler, Schedule):
        # The state of such a schedule is its count, so it may be that of another class.
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
    """Return the present learning rates of parameter groups."""
    return [float(group["lr"]) for group in groups]


def restore_rates(groups: ParameterGroups, rates: Sequence[float], *, is_loud: bool) -> None:
    """Give the groups of a resumed job the rates of this run again.

    Args:
        rates: the rates with which this run has made the groups.
        is_loud: whether this rank logs rates that differ.
    """
    stored = rates_of(groups)
    _set_rates(groups, rates)
    if is_loud and rates_of(groups) != stored:
        log.warning("the learning rates are those of the script: %s (stored: %s)", rates_of(groups), stored)


def _set_rates(groups: ParameterGroups, rates: Sequence[float]) -> None:
    """Give parameter groups these rates. Groups for which there is none keep theirs."""
    for group, rate in zip(groups, rates, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _has_class(scheduler: LRScheduler, stored: Mapping[str, Any], stored_class: str | None) -> bool:
    """Return whether a state is one of the schedule's class.

    Commits of earlier versions and imported checkpoints do not name the class. Their states are taken for those of the
    class if they have all its parameters.
    """
    if stored_class is not None:
        return stored_class == type(scheduler).__name__
    return all(key in stored for key in scheduler.state_dict() if not key.startswith("_") or key == "_schedulers")


def _count_of(stored: Mapping[str, Any]) -> int | None:
    """Return the count of steps in a state of a schedule of torch or of DeepSpeed; None if it has none."""
    for part in (stored, *stored.get("_schedulers", ())):
        if "last_epoch" in part:
            return int(part["last_epoch"])
        if "last_batch_iteration" in part:
            return int(part["last_batch_iteration"]) + 1
    return None


def _go_to(scheduler: LRScheduler, count: int) -> None:
    """Have a schedule of torch go on at a count of steps, and give the groups its rates there."""
    with warnings.catch_warnings():
        # torch warns of a count that is given, and of steps of a schedule before any step of its optimizer.
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

    The rate of each group becomes the same part of its base rate that it was in the state.
    """
    own = [(part, list(part.base_lrs)) for part in _parts(scheduler) if hasattr(part, "base_lrs")]
    scheduler.load_state_dict(dict(stored))
    stored_bases: Sequence[Any] = own[0][0].base_lrs
    stored_rates = scheduler.get_last_lr()
    for part, bases in own:
        part.base_lrs = bases
    rates = []
    for number, base in enumerate(map(float, own[0][1])):
        # If there were fewer groups, the last one stands for those that were not there.
        index = min(number, len(stored_rates) - 1)
        stored_base, rate = float(stored_bases[index]), float(stored_rates[index])
        rates.append(rate if stored_base in (base, 0.0) else base * (rate / stored_base))
    _set_rates(groups, rates)
    scheduler._last_lr = [*rates]


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield a schedule, and those that it is made of."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)
