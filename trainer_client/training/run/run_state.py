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
    """The methods of a learning-rate scheduler that the engine uses."""

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
    """The parts of a run's state that a commit carries for this rank.

    Args:
        names: the names of the model's parameters, in its order.
        made_with: the record of this run; None: the commits of another rank carry it.
        rolled_back: the roll-backs by operators before this run, see rolled_back.py.
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
        """Join the parts; `made_with` is None on all ranks but rank 0, whose commits carry it."""
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
        # The text is made once, because every commit carries it.
        self._made_with_text = None if made_with is None else made_with.encode()
        # The parameters of the groups in the last commit, by their indexes and by their names. They rarely change.
        self._members: list[Any] = []
        self._sorted_members: list[Any] | None = None
        # The bytes of the buffers and of the script's part in the last encoded state, as digests by name, and the
        # buffers that the script has changed after a step of this run.
        self._encoded: dict[str, int] = {}
        self._late: set[str] = set()
        # The digests of what the last encoded state was amended by, or None if it was not.
        self._amended: dict[str, int] | None = None
        # Whether this run has said that large buffers were changed before a wait for a commit.
        self._has_warned = False
        # The bytes of the last encoded state without those that the script may change between two steps.
        self._other_bytes = 0

    def encode(self, progress: RunProgress, user: Mapping[str, Any], *, ends_step: bool = False) -> bytes:
        """Return the encoded state for a commit.

        Args:
            progress: the counters.
            user: the user's part.
            ends_step: whether a step ends, after which the script may still change buffers.

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
        """Return whether the script has changed a buffer, or its own part, since the last state was encoded."""
        return self._digests(user) != self._encoded or self._large_buffers.has_changes()

    def amended(self, encoded: bytes, user: Mapping[str, Any], *, is_alone: bool) -> bytes | None:
        """Return the newest commit's state with what the script has changed in buffers and in its own part since.

        None is returned if this rank need not amend its state: it was amended by the same, or nothing was changed and
        there are no other ranks, which could have changes.

        Args:
            encoded: the state as the commit had it first.
            user: the user's part.
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

        They are in the commit of the next step only. A run that goes on from the commit of the step says so.
        """
        now = self._digests(None)
        self._late |= {name for name, digest in now.items() if self._encoded.get(name, digest) != digest}
        self._late |= self._large_buffers.changed()

    def _digests(self, user: Mapping[str, Any] | None) -> dict[str, int]:
        """Return the digests of the buffers that commits carry by their names, and that of the user's part by ""."""
        digests = {
            name: xxhash.xxh3_64_intdigest(buffer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            for name, buffer in self._plain.to_commit()["buffers"].items()
        }
        return digests if user is None else digests | {"": xxhash.xxh3_64_intdigest(client_state.encode(user))}

    def require_committable(self, user: Mapping[str, Any]) -> None:
        """Check what the script may have changed since the last commit: its own part, and the optimizer's groups.

        Call this before a step is made, because a value that cannot be committed would end the run afterwards.

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
        """Return the size of the encoded values that the script may change. It can raise ClientStateError."""
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

        The user's part is ignored, and so are the model's names, which only exports need. Its buffers were loaded when
        the job was opened; see also `restore_extra_states`.

        A number of updates that is None stays as it is.

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
        # The positions of a run only grow, even if the run goes back to an earlier step.
        self._clock.go_on_from(max(self._clock.now, counters["clock"]))
        if optimizer:
            self._scaler.load_state_dict(state["scaler"])
        rates_before = rates_of(self._optimizer.param_groups)
        # The entry is None if the commit was made with another optimizer.
        are_settings_stored = optimizer and settings and state["optimizer"] is not None
        if are_settings_stored:
            self._optimizer.load_settings(state["optimizer"])
        # An imported checkpoint may lack the schedule by which its groups have their rates, so these stay.
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
            # A commit is made at the end of a step, so this is the count as if all steps had had the new number of
            # micro-batches.
            micro_steps = counters["global_steps"] * sizes.accumulation
        return RunProgress(
            global_steps=counters["global_steps"], global_samples=counters["global_samples"], micro_steps=micro_steps
        )

    def restore_extra_states(self, state: Mapping[str, Any]) -> None:
        """Give the model's modules the extra states in the decoded state of a commit. It can raise ClientStateError."""
        self._extra_states.restore(state["extra_states"])
