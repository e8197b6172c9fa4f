"""The record of a run's config, number of ranks, model and optimizer. Rank 0's commits carry it.

The next run compares its own record with it; see resume_notice.py. Hyper-parameters and schedules are recorded as the
user made them, before the first step, because a schedule changes them in each step without a change of the config. This
module owns the form of the record. It must never restore anything from it, because run_state.py restores the values
from the other parts of the client state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainer_client.base.section import Agreement, Section, agreement_of
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.run import client_state

# The setting that distinguishes AdamW from Adam. It is always taken from this run's optimizer, and never from a commit.
DECOUPLED = "decoupled_weight_decay"

# The keys of the config that are not recorded in a commit. A name that ends with a dot stands for a whole section.
# These keys only say how the job is found, or the record has their effect in another form.
_LEFT_OUT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "bf16.",
    "fp16.enabled",
    "paramserver.job",
    "paramserver.peers",
    "paramserver.resume",
    "paramserver.hyper_parameters",
    "paramserver.durability",
    "paramserver.data.",
    "paramserver.units.",
)
# The settings of a parameter group that are not recorded in a commit. They choose a kernel, are refused by the store,
# or are recorded elsewhere.
_NO_SETTINGS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "initial_lr"}
)
# The settings of a parameter group that torch's schedulers change during a run.
_SCHEDULED = frozenset({"lr", "betas", "momentum"})

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeWith:
    """The record of one run: its config, model and optimizer, which the next run compares with its own.

    Attributes:
        facts: values that a resumed run never takes from the store, as texts: keys of the config in JSON, the number of
            ranks, the number formats, the units, the version of torch and the device.
        optimizer: name of the optimizer's class.
        groups: the settings of each parameter group as the user made it. A run that goes on with stored settings has
            those of the run that made them.
        lr_scheduler: the class of the scheduler and its state before the first step; None: there is none. As with
            `groups`, a run that goes on with the stored schedule has the record of the run that made it.
        trained: the parameters that have optimizer states, as ranges of their indexes in the model.
    """

    facts: Mapping[str, str]
    optimizer: str
    groups: Sequence[Settings]
    lr_scheduler: tuple[str, Settings] | None
    trained: Sequence[Sequence[int]]

    def encode(self) -> str:
        """Return the record as a text for commits. Raise ClientStateError if a scheduler's value cannot be stored."""
        return client_state.encode(asdict(self)).decode()

    @classmethod
    def stored_in(cls, state: Mapping[str, Any]) -> MadeWith | None:
        """Return the record in the client state of a commit; None if an earlier version made the commit."""
        text = state["made_with"]
        return None if text is None else cls(**client_state.decode(text.encode()))

    def going_on_from(self, state: Mapping[str, Any]) -> MadeWith:
        """Return the record for this run's commits, after the run has restored the client state `state` of a commit."""
        stored = MadeWith.stored_in(state)
        groups, lr_scheduler = self.groups, self.lr_scheduler
        if state["optimizer"] is not None:
            then = stored_groups(state)
            todays = {DECOUPLED, "lr"} if has_own_rates(lr_scheduler, stored, state) else {DECOUPLED}
            groups = [
                own | {key: value for key, value in before.items() if key not in todays}
                for own, before in zip(self.groups, then, strict=False)
            ]
            groups += self.groups[len(then) :]
        if stored is not None and stored.lr_scheduler is not None and lr_scheduler is not None:
            lr_scheduler = stored.lr_scheduler if stored.lr_scheduler[0] == lr_scheduler[0] else lr_scheduler
        return replace(self, groups=groups, lr_scheduler=lr_scheduler)


def has_own_rates(lr_scheduler: tuple[str, Settings] | None, stored: MadeWith | None, state: Mapping[str, Any]) -> bool:
    """Return whether a run's scheduler sets rates from the base rate that it took from the run's own optimizer.

    The scheduler does so if the run of the commit had no scheduler, or a scheduler of another class.

    Args:
        lr_scheduler: the class and the first state of this run's scheduler; None: this run has no scheduler.
        stored: the record in the commit.
        state: the client state of the commit.
    """
    if lr_scheduler is None or state["lr_scheduler"] is None:
        return lr_scheduler is not None
    former = None if stored is None else stored.lr_scheduler
    return former is not None and former[0] != lr_scheduler[0]


def as_made(group: Mapping[str, Any]) -> Settings:
    """Return a parameter group's settings as the user made it. Its first rate is `initial_lr`, if that is there."""
    settings = {key: plain(value) for key, value in group.items() if key not in _NO_SETTINGS}
    if "initial_lr" in group:
        settings["lr"] = plain(group["initial_lr"])
    return settings


def stored_groups(state: Mapping[str, Any]) -> Sequence[Settings]:
    """Return the settings of the groups with which the run of a commit was made.

    A commit of an earlier version has only the settings of its own step. Settings that a scheduler may have changed
    since the first step are left out.
    """
    stored = MadeWith.stored_in(state)
    if stored is not None:
        return stored.groups
    if state["optimizer"] is None:
        return []
    if state["lr_scheduler"] is None:
        return [as_made(group) for group in state["optimizer"]]
    return [
        {
            key: value
            for key, value in as_made(group).items()
            if key not in _SCHEDULED or (key == "lr" and "initial_lr" in group)
        }
        for group in state["optimizer"]
    ]


def plain(value: Any) -> Any:
    """Return the value with lists in place of tuples and tensors, so that values of two runs can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def config_facts(settings: TrainingConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys of the config that the record has, each as its dotted name and its value in JSON."""
    return (
        (key, value)
        for key, value in _keys(settings, "")
        if not any(key == out or (out.endswith(".") and key.startswith(out)) for out in _LEFT_OUT)
        and not (key.startswith("fp16.") and not settings.fp16.enabled)
    )


def _keys(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the keys on which all ranks agree, with their values in JSON.

    A key that is not set is yielded, too. So if a commit lacks a key, the version that made the commit did not have the
    key. For the same reason, a section that may be missing is one value.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if agreement_of(field) is not Agreement.RUN:
            continue
        if isinstance(value, Section) and field.default is not None:
            yield from _keys(value, f"{prefix}{name}.")
        elif isinstance(value, Section):
            yield f"{prefix}{name}", json.dumps({key: json.loads(v) for key, v in value.values(Agreement.RUN)})
        else:
            yield f"{prefix}{name}", json.dumps(value, default=str, sort_keys=True)
