"""The state of a run besides its tensors: it is collected for each commit, and restored when a run resumes.

This module owns the list of the state's parts. It must never encode them, because client_state.py does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from paramserver.contract.limits import MAX_CLIENT_STATE_BYTES
from trainer_client.errors import ClientStateError
from trainer_client.training.model.large_buffers import LargeBuffers
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.run import client_state
from trainer_client.training.run.data_loader import TrainingLoader
from trainer_client.training.run.extra_states import ExtraStates
from trainer_client.training.run.made_with import MadeWith
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.run.rolled_back import RollBacks
from trainer_client.training.run.schedule_state import rates_of, restore_schedule
from trainer_client.training.run.stored_state import AMENDMENT, sort_counts, sort_groups
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.step.trace import Clock
from trainer_client.training.step.training_step import TrainingStep
from trainer_client.training.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """A learning-rate scheduler of torch, DeepSpeed or the user: any object with the methods that the engine calls."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The counters of the engine: optimizer steps, the samples in them, and micro-batches."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0


class RunState:
    """Collects this rank's state besides its shards for each commit, and restores it when a run resumes.

    Args:
        names: the names of the model's parameters, in its order.
        made_with: the record of this run's config, model and optimizer; None on all ranks but rank 0, whose commits
            carry it.
        rolled_back: the roll-backs of the job that operators made before this run, see rolled_back.py.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        step: TrainingStep,
        scaler: LossScaler,
        optimizer: StoreOptimizer,
        lr_scheduler: Scheduler | None,
        clock: Clock,
        micro_batches: MicroBatches,
        data: TrainingLoader | None,
        device: torch.device,
        plain: PlainState,
        large_buffers: LargeBuffers,
        extra_states: ExtraStates,
        made_with: MadeWith | None,
        rolled_back: RollBacks,
    ) -> None:
        """Keep references to the parts of the state. Nothing is encoded or restored yet."""
        self._names = names
        self._step = step
        self._scaler = scaler
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._clock = clock
        self._micro_batches = micro_batches
        self._data = data
        self._device = device
        self._plain = plain
        self._large_buffers = large_buffers
        self._extra_states = extra_states
        self._rolled_back = dict(rolled_back)
        self._made_with = made_with
        # The record of the settings of this run is encoded only once, because every commit carries the same text.
        self._made_with_text = None if made_with is None else made_with.encode()
        # `_members`: the parameters of the optimizer's groups in the last commit, by their indexes. `_sorted_members`:
        # the same by their names. They rarely change, so `sort_groups` is called only if they do.
        self._members: list[Any] = []
        self._sorted_members: list[Any] | None = None
        # `_encoded`: the digests of the buffers and of the script's values in the last encoded state, by name. `_late`:
        # the names of the buffers that the script has changed after a step of this run.
        self._encoded: dict[str, int] = {}
        self._late: set[str] = set()
        # The digests of the values in the newest amendment of the last encoded state. None if that state was not
        # amended.
        self._amended: dict[str, int] | None = None
        # Whether this run has already logged the warning that the script has changed large buffers before it waited for
        # a commit.
        self._has_warned = False
        # The size in bytes of the last encoded state, without the values that the script may change between two steps.
        self._other_bytes = 0

    def encode(self, progress: RunProgress, user: Mapping[str, Any], *, ends_step: bool = False) -> bytes:
        """Return this rank's encoded state, as it is now, for a commit.

        Args:
            progress: the counters of the engine.
            user: the user's part of the state, `engine.client_state`.
            ends_step: whether this is the state at the end of a step. If so, it lists the buffers that the script has
                changed after earlier steps, because it may change them after this step, too, and a run that goes on
                from this commit warns that such changes are lost.

        Raises:
            ClientStateError: a value cannot be stored.
        """
        sizes = self._micro_batches.sizes
        groups = self._optimizer.settings()
        if (members := [group["params"] for group in groups]) != self._members:
            self._members, self._sorted_members = members, sort_groups(groups, self._names)
        encoded = client_state.encode(
            {
                "counters": {
                    "global_steps": progress.global_steps,
                    "skipped_steps": self._step.skipped,
                    "skipped_in_row": self._step.skipped_in_row,
                    "micro_steps": progress.micro_steps,
                    "accumulation": sizes.accumulation,
                    "train_batch_size": sizes.train,
                    "global_samples": progress.global_samples,
                    "clock": self._clock.now,
                },
                "update_counts": self._step.update_counts,
                "sorted_counts": sort_counts(self._step.update_counts, self._names),
                "scaler": self._scaler.state_dict(),
                "optimizer": groups,
                "sorted_groups": self._sorted_members,
                "lr_scheduler": None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
                "lr_scheduler_class": None if self._lr_scheduler is None else type(self._lr_scheduler).__name__,
                "random": client_state.random_states(self._device),
                "data": None if self._data is None else self._data.state_dict(),
                **self._model_entries(),
                "extra_states": self._extra_states.to_commit(),
                "user": user,
                "made_at": time.time(),
                "made_with": self._made_with_text,
                "rolled_back": self._rolled_back,
                "late_buffers": sorted(self._late) if ends_step else [],
            }
        )
        self._encoded, self._amended = self._digests(user), None
        self._other_bytes = len(encoded) - self._check_values_of_script(user)
        return encoded

    def has_late_changes(self, user: Mapping[str, Any]) -> bool:
        """Return whether the script has changed a buffer or `engine.client_state` since the last state was encoded."""
        return self._digests(user) != self._encoded or self._large_buffers.has_changes()

    def amended(self, encoded: bytes, user: Mapping[str, Any], *, is_alone: bool) -> bytes | None:
        """Return the newest commit's state with an entry for what the script has changed after the commit.

        The script may have changed buffers and its own part of the state, `engine.client_state`.

        None is returned if this rank need not amend its state: the state was amended by the same values before, or
        nothing was changed and there are no other ranks. Other ranks could have changes, which count only if all ranks
        amend.

        Args:
            encoded: the state as the commit had it before any amendment.
            user: the user's part of the state, `engine.client_state`.
            is_alone: whether this is the only rank.

        Raises:
            ClientStateError: a value cannot be stored, or the state would be too large.
        """
        if not self._has_warned and (large := self._large_buffers.changed()):
            self._has_warned = True
            log.warning(
                "wait_for_commit() cannot add to the last step what was changed after it in large buffers (%s), so a "
                "run that goes on from the step has their values at its end: call engine.commit_last_step() on all "
                "ranks",
                ", ".join(sorted(large)),
            )
        now = self._digests(user)
        if now == (self._encoded if is_alone and self._amended is None else self._amended):
            return None
        changed = {name for name, digest in now.items() if self._encoded.get(name) != digest}
        buffers = self._plain.to_commit()["buffers"]
        amendment: dict[str, Any] = {"buffers": {name: buffers[name] for name in sorted(changed - {""})}}
        if "" in changed:
            amendment["user"] = user
        amended = client_state.with_entry(encoded, AMENDMENT, amendment)
        if len(amended) > MAX_CLIENT_STATE_BYTES:
            raise ClientStateError(
                f"the state of the last step would have {len(amended)} bytes with what was changed after it, and "
                f"{MAX_CLIENT_STATE_BYTES} are allowed: change buffers and engine.client_state before "
                "engine.step(), or call engine.commit_last_step() on all ranks"
            )
        self._amended = now
        return amended

    def note_late_changes(self) -> None:
        """Note which buffers the script has changed after a step, because the forward of the next one begins.

        Changes after a step are only in the commit of the next step. So each later commit lists these buffers, and a
        run that goes on from such a commit logs that changes of them after the step may be lost.
        """
        now = self._digests(None)
        self._late |= {name for name, digest in now.items() if self._encoded.get(name, digest) != digest}
        self._late |= self._large_buffers.changed()

    def _digests(self, user: Mapping[str, Any] | None) -> dict[str, int]:
        """Return a digest of each buffer that commits carry, by its name, and a digest of `user` under the name ""."""
        digests = {
            name: xxhash.xxh3_64_intdigest(buffer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            for name, buffer in self._plain.to_commit()["buffers"].items()
        }
        return digests if user is None else digests | {"": xxhash.xxh3_64_intdigest(client_state.encode(user))}

    def require_committable(self, user: Mapping[str, Any]) -> None:
        """Check that a commit can carry what the script may have changed: `user`, and the optimizer's groups.

        Call this before a step is made, because after the step a value that cannot be committed would end the run.

        Raises:
            ClientStateError: a value cannot be stored, or all of them are larger than a commit's state may be.
        """
        size = self._check_values_of_script(user)
        if self._other_bytes + size > MAX_CLIENT_STATE_BYTES:
            raise ClientStateError(
                f"the state that goes with a commit would have {self._other_bytes + size} bytes, of which "
                f"engine.client_state, the optimizer's groups and the schedule have {size}, and "
                f"{MAX_CLIENT_STATE_BYTES} are allowed: keep large values in files of your own, or tensors in buffers "
                "of the model"
            )

    def _check_values_of_script(self, user: Mapping[str, Any]) -> int:
        """Return the encoded size of the values that the script may change. It can raise ClientStateError."""
        schedule = None if self._lr_scheduler is None else self._lr_scheduler.state_dict()
        return (
            client_state.check(user, "engine.client_state")
            + sum(
                client_state.check(group, f"optimizer.param_groups[{number}]")
                for number, group in enumerate(self._optimizer.settings())
            )
            + client_state.check(schedule, "lr_scheduler.state_dict()")
        )

    def _model_entries(self) -> dict[str, Any]:
        """Return the model's entries in a commit: names and buffers on rank 0, the rank's buffers on the others."""
        model = self._plain.to_commit()
        return {"model": model} if self._made_with is not None else {"model": None, "buffers": model["buffers"]}

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        optimizer: bool = True,
        lr_scheduler: bool = True,
        settings: bool = True,
    ) -> RunProgress:
        """Restore the run from the decoded state of a commit, and return its counters.

        The user's part is ignored, and so are the model's names, which only exports need. The model's buffers were
        loaded when the job was opened. `restore_extra_states` restores the extra states.

        If the commit's number of updates of a parameter is None, the parameter's present number stays.

        Args:
            optimizer: whether the optimizer's settings and counts and the loss scale are restored, too.
            lr_scheduler: whether the schedule is restored, too.
            settings: False: the optimizer's groups and the schedule keep the settings of this run, and only the counts
                of updates and of the schedule's steps are restored.
        """
        counters, own_counts = state["counters"], self._step.update_counts
        counts = state["update_counts"] if optimizer else own_counts
        self._step.go_on_from(
            update_counts=[own if count is None else count for own, count in zip(own_counts, counts, strict=True)],
            skipped=counters["skipped_steps"],
            skipped_in_row=counters["skipped_in_row"],
        )
        # The positions in a run's traces must only grow, because the store compares them. So the clock never goes back,
        # even if the run goes back to an earlier step.
        self._clock.go_on_from(max(self._clock.now, counters["clock"]))
        if optimizer:
            self._scaler.load_state_dict(state["scaler"])
        rates_before = rates_of(self._optimizer.param_groups)
        # The entry "optimizer" is None if the step was made with another optimizer. The settings of this run's
        # optimizer then stay.
        are_settings_stored = optimizer and settings and state["optimizer"] is not None
        if are_settings_stored:
            self._optimizer.load_settings(state["optimizer"])
        # An imported checkpoint may lack the schedule that has set the learning rates of its groups. Then the schedule
        # of this run is not restored, and the rates stay as they were loaded.
        is_known = state["lr_scheduler"] is not None or state["imported"] is None
        if lr_scheduler and self._lr_scheduler is not None and is_known:
            restore_schedule(
                self._lr_scheduler,
                state["lr_scheduler"],
                state["lr_scheduler_class"],
                groups=self._optimizer.param_groups,
                rates_before=rates_before,
                keeps_settings=are_settings_stored,
                takes_count_alone=not settings,
            )
        if self._data is not None and state["data"] is not None:
            self._data.load_state_dict(state["data"])
        client_state.restore_random_states(state["random"], self._device)
        if self._made_with is not None:
            if settings:
                self._made_with = self._made_with.going_on_from(state)
            self._made_with_text = self._made_with.encode()
        sizes = self._micro_batches.sizes
        micro_steps = counters["micro_steps"]
        if counters["accumulation"] != sizes.accumulation:
            # A commit is made at the end of a step. So the count of micro-batches is set as if all steps so far had had
            # this run's number of micro-batches, and the next micro-batch is the first one of a step.
            micro_steps = counters["global_steps"] * sizes.accumulation
        return RunProgress(
            global_steps=counters["global_steps"], global_samples=counters["global_samples"], micro_steps=micro_steps
        )

    def restore_extra_states(self, state: Mapping[str, Any]) -> None:
        """Give the model's modules the extra states in the decoded state of a commit. It can raise ClientStateError."""
        self._extra_states.restore(state["extra_states"])
