"""The line of the log that says which job a run begins or goes on with, and how its script differs from a stored job.

This module owns the rules that say which side of a difference takes effect. The rules follow from the values that
run_state.py restores, and from the values that stay in the store. This module must never change anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paramserver.contract.printable import printable
from paramserver.contract.sizes import shown_size
from trainer_client.base.index_ranges import from_ranges
from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.training.model.plain_state import modules_with_extra_state
from trainer_client.training.run import client_state
from trainer_client.training.run.context import RankContext, UserObjects
from trainer_client.training.run.imported import describe_origin, is_imported
from trainer_client.training.run.job import Job
from trainer_client.training.run.made_with import (
    DECOUPLED,
    MadeWith,
    as_made,
    config_facts,
    has_own_rates,
    plain,
    stored_groups,
)
from trainer_client.training.step.precision import PrecisionPolicy

# The config key that sets the first value of a dynamic loss scale. If the stored scale is dynamic, a resumed run goes
# on with it, and the key has no effect.
_SCALE_POWER = "fp16.initial_scale_power"
# The entries of a scheduler's state that follow from the learning rates. They are not compared, because the learning
# rates are.
_RATES = ("base_lrs", "_last_lr")
_SHOWN_NAMES = 3
_SHOWN_CHARACTERS = 80


def record_run(user: UserObjects, rank: RankContext, job: Job) -> MadeWith:
    """Return the record of this run. Call this before anything is restored, and before the first step.

    Raises:
        ClientStateError: the state of the scheduler has a value that cannot be stored.
    """
    policy = PrecisionPolicy.of(rank.settings)
    dtypes = {str(policy.dtype_of(parameter)).removeprefix("torch.") for parameter in user.parameters}
    units = [unit.fqn for unit in job.units[1:]]
    scheduler = user.lr_scheduler
    return MadeWith(
        facts={
            "ranks": str(rank.collectives.world_size),
            "precision": ", ".join(sorted(dtypes)),
            "units": f"{len(units)} from {units[0]!r} to {units[-1]!r}" if units else "the whole model",
            "torch": str(torch.__version__),
            "device": rank.collectives.device.type,
            **dict(config_facts(rank.settings)),
        },
        optimizer=user.optimizer.name,
        groups=[as_made(group) for group in user.optimizer.param_groups],
        # The state of the scheduler is copied into the record, because the scheduler goes on changing its own.
        lr_scheduler=None
        if scheduler is None
        else (type(scheduler).__name__, client_state.decode(client_state.encode(scheduler.state_dict()))),
        trained=user.optimizer.stateful_ranges(),
    )


def new_job_line(rank: RankContext) -> str:
    """Return the line about a new job: its name, its place, and the budgets of its own daemon if it has one."""
    section = rank.settings.paramserver
    budgets = ""
    if rank.place.state_dir is not None:
        host, nvme = map(shown_size, (section.host_budget, section.nvme_budget))
        budgets = f" (host_budget {host}, nvme_budget {nvme})"
    return printable(f"paramserver: new job {rank.place.job!r}, in {rank.place}{budgets}")


def resume_line(
    user: UserObjects, rank: RankContext, job: Job, sizes: BatchSizes, made_with: MadeWith, state: Mapping[str, Any]
) -> str:
    """Return the line about a run that goes on from a commit.

    Args:
        made_with: the record of this run's config, model and optimizer, from before values of the commit are restored.
        state: the client state of the commit.
    """
    made_at = state["made_at"]
    age = "" if made_at is None else f", committed {_span(time.time() - made_at)} ago"
    others = "" if job.sharers == rank.collectives.world_size else ", and in the stores of the other nodes"
    found = _Differences(user, made_with, state, keeps_settings=rank.settings.paramserver.hyper_parameters == "stored")
    found.compare(sizes, fresh=len(job.fresh))
    late = state.get("late_buffers") or []
    lost = (
        f" The script has changed buffers after its steps ({', '.join(late[:_SHOWN_NAMES])}), and the run was ended "
        "before a commit had the change of this step, so they go on as they were at its end; change them before "
        "engine.step() to have them in its commit."
        if late
        else ""
    )
    return printable(
        f"paramserver: job {rank.place.job!r} goes on from step {state['counters']['global_steps']}{age}, in "
        f"{rank.place}{others}. {found}{lost}"
    )


class _Differences:
    """The differences between this run and a commit, in which either the stored or this run's value takes effect."""

    def __init__(self, user: UserObjects, now: MadeWith, state: Mapping[str, Any], *, keeps_settings: bool) -> None:
        self._keeps_settings = keeps_settings
        self._user = user
        self._now = now
        self._state = state
        self._then = MadeWith.stored_in(state)
        self._stored: list[str] = []
        self._todays: list[str] = []
        self._has_stored_settings = False

    def __str__(self) -> str:
        sentences = []
        if self._stored:
            sentences.append(f"The stored values count for: {'; '.join(self._stored)}.")
        if self._has_stored_settings:
            sentences.append(
                'To change these, write "hyper_parameters": "config" into the section paramserver, or set them in '
                "optimizer.param_groups after initialize()."
            )
        if self._todays:
            sentences.append(f"Today's values count for: {'; '.join(self._todays)}.")
        if is_imported(self._state):
            origin = describe_origin(self._state)
            sentences.append(f"The job was imported from {origin}, which notes less than a commit.")
            return " ".join(sentences)
        if not sentences:
            sentences.append("Config, model and optimizer have not changed.")
        if self._then is None:
            sentences.append("An earlier version made this commit and noted less, so more may have changed.")
        return " ".join(sentences)

    def compare(self, sizes: BatchSizes, *, fresh: int) -> None:
        """Fill this object with the differences between this run and the commit.

        Args:
            fresh: the number of trained parameters whose optimizer states begin at zero.
        """
        self._compare_batches(sizes)
        self._compare_optimizer(fresh)
        self._compare_groups()
        self._compare_scheduler()
        self._compare_data()
        self._compare_model()
        if self._then is not None:
            self._compare_facts(self._then)
            self._compare_trained(self._then)

    def _note_stored(self, name: str, stored: Any, today: Any) -> None:
        self._stored.append(f"{name} {_short(stored)} (today: {_short(today)})")

    def _note_todays(self, name: str, stored: Any, today: Any) -> None:
        self._todays.append(f"{name} {_short(today)} (stored: {_short(stored)})")

    def _compare_batches(self, sizes: BatchSizes) -> None:
        counters = self._state["counters"]
        train, accumulation = counters["train_batch_size"], counters["accumulation"]
        pairs = [("train_batch_size", train, sizes.train)]
        if self._then is not None:
            micro = train // (accumulation * int(self._then.facts["ranks"]))
            pairs.append(("train_micro_batch_size_per_gpu", micro, sizes.micro))
        pairs.append(("gradient_accumulation_steps", accumulation, sizes.accumulation))
        for name, stored, today in pairs:
            # The client state of an imported job has no batch sizes to compare with.
            if stored is not None and stored != today:
                self._note_todays(name, stored, today)

    def _compare_optimizer(self, fresh: int) -> None:
        if self._then is not None and self._then.optimizer != self._now.optimizer:
            self._note_todays("optimizer", self._then.optimizer, self._now.optimizer)
        if fresh:
            self._todays.append(f"the optimizer states of {fresh} parameters, which begin at zero")
        if self._state["optimizer"] is None and self._then is None:
            self._todays.append("all hyper-parameters of the optimizer")

    def _compare_groups(self) -> None:
        # Parameter groups with the same difference in a setting are named together in one line. `found` maps each
        # setting to its (stored value, value of this run, numbers of the groups).
        found: dict[str, list[tuple[Any, Any, list[int]]]] = {}
        for number, (stored, today) in enumerate(zip(stored_groups(self._state), self._now.groups, strict=False)):
            for key in today.keys() & stored.keys():
                if today[key] == stored[key]:
                    continue
                alike = found.setdefault(key, [])
                numbers = next((of for *values, of in alike if values == [stored[key], today[key]]), None)
                if numbers is None:
                    alike.append((stored[key], today[key], [number]))
                else:
                    numbers.append(number)
        for key in sorted(found):
            for stored, today, numbers in found[key]:
                self._note_setting(key, numbers, stored, today)

    def _note_setting(self, key: str, numbers: Sequence[int], stored: Any, today: Any) -> None:
        if key == DECOUPLED and self._then is not None and self._then.optimizer != self._now.optimizer:
            # The notice already names both optimizers, so this setting, by which AdamW and Adam differ, would only
            # repeat the difference.
            return
        where = "" if len(numbers) == len(self._now.groups) else f" of group {', '.join(map(str, numbers))}"
        begins = has_own_rates(self._now.lr_scheduler, self._then, self._state)
        if not self._keeps_settings or self._state["optimizer"] is None or key == DECOUPLED or (key == "lr" and begins):
            self._note_todays(f"{key}{where}", stored, today)
        else:
            self._note_stored(f"{key}{where}", stored, today)
            self._has_stored_settings = True

    def _compare_scheduler(self) -> None:
        today, was_there = self._now.lr_scheduler, self._state["lr_scheduler"] is not None
        stored = None if self._then is None else self._then.lr_scheduler
        if today is None and was_there:
            was = "a scheduler" if stored is None else stored[0]
            self._todays.append(f"no lr_scheduler (stored: {was}), so the learning rates stay as they are")
        elif today is not None and not was_there:
            self._todays.append(f"lr_scheduler {today[0]}, from its beginning (stored: none)")
        elif today is not None and stored is not None:
            if today[0] != stored[0]:
                self._todays.append(f"lr_scheduler {today[0]}, with the stored count of steps (stored: {stored[0]})")
                return
            then, now = dict(_leaves(stored[1])), dict(_leaves(today[1]))
            for key in sorted(then.keys() & now.keys()):
                if then[key] != now[key]:
                    note = self._note_stored if self._keeps_settings else self._note_todays
                    note(f"lr_scheduler {key}", then[key], now[key])

    def _compare_data(self) -> None:
        stored, data = self._state["data"], self._user.data
        if stored is None and data is None:
            return
        if data is None:
            self._todays.append("no training_data (stored: a place in it, which the next commit will not have)")
        elif stored is None:
            self._todays.append("training_data, from the first sample (stored: none)")
        else:
            now = data.state_dict()
            names = {"size": "samples of training_data", "seed": "data.seed", "shuffle": "data.shuffle"}
            for key, name in names.items():
                if stored[key] != now[key]:
                    self._note_todays(name, stored[key], now[key])

    def _compare_model(self) -> None:
        own = {name for name, _ in self._user.module.named_buffers(remove_duplicate=False)}
        model = self._state["model"] or {}
        if larger := [name for name in model.get("left_out", ()) if name in own]:
            self._todays.append(f"{_listed(larger)}, buffers that the step does not have")
        stored = self._state["extra_states"] or {}
        if missing := [name for name in modules_with_extra_state(self._user.module) if name not in stored]:
            self._todays.append(f"{_listed(missing)}, which the commit does not have")

    def _compare_facts(self, then: MadeWith) -> None:
        # A fact that only one of the two records has is not compared, because the version that wrote the other record
        # did not record it.
        for key in (key for key in self._now.facts if key in then.facts):
            stored, today = then.facts[key], self._now.facts[key]
            if stored == today:
                continue
            if key == _SCALE_POWER:
                if self._state["scaler"].get("dynamic"):
                    self._note_stored("the loss scale", self._state["scaler"]["scale"], f"2 ** {today}")
                continue
            self._note_todays(key, stored, today)

    def _compare_trained(self, then: MadeWith) -> None:
        before, now = set(from_ranges(then.trained)), set(from_ranges(self._now.trained))
        for word, other, changed in (("trained", "frozen", now - before), ("frozen", "trained", before - now)):
            if changed:
                names = [self._user.parameters[index].fqn for index in sorted(changed)]
                self._todays.append(f"{_listed(names)} {word} (stored: {other})")


def _listed(names: Sequence[str]) -> str:
    """Return a text with the first few of the names, and the number of the others."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts in the state of a scheduler with their places, without those that are in _RATES."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key not in _RATES:
                yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, list | tuple) and any(isinstance(item, Mapping) for item in state):
        for index, item in enumerate(state):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, plain(state)


def _short(value: Any) -> str:
    """Return a value as a text that is short enough for a line of the log."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _span(seconds: float) -> str:
    """Return a span of time as a text in its two largest units, such as "3 h 12 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
