"""The engine's methods that wait for commits, and save steps as checkpoints or as files of other frameworks.

This module owns the order in which ranks commit, keep and export a step. It must never make a training step.
`training/run/checkpoints.py` knows checkpoints, and `exchange/export.py` the other formats.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from trainer_client.engine.changes import StateChanges
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.errors import CollectiveError, ConfigError
from trainer_client.exchange.export import Format, FormatOptions, PendingExport, begin_export

log = logging.getLogger(__name__)


class SavedSteps:
    """The committed steps of an engine's job, as a script waits for them, keeps them, exports them and loads them."""

    def __init__(self, loop: TrainingLoop, changes: StateChanges, resources: ExitStack) -> None:
        """Serve the calls of one engine.

        Args:
            resources: closed when the engine is closed.
        """
        self._loop, self._changes, self._resources = loop, changes, resources
        self._settings = loop.rank.settings
        self._store = loop.rank.store
        self._collectives = loop.rank.collectives
        self._commits = loop.parts.commits
        self._run_state = loop.parts.run_state
        self._checkpoints = loop.parts.checkpoints

    def wait_for_commit(self) -> None:
        """Wait until the newest commit is safe: on all nodes of the job, as durable as the job's durability class says.

        The next run of the job goes on from this commit or from a later one, even if any ranks die. With
        `paramserver.durability` "replicated" the commit is on all replicas, too; docs/resume.md says what is safe with
        "snapshot:N". The other ranks need not call this, and may be anywhere in the loop.

        The call also adds to the commit what this rank has changed in buffers and in `client_state` since the step.
        Such changes count only when every rank has called this after its own changes, because a resume takes the
        changes of all ranks or of none. A call between a forward and the end of its step adds nothing.

        Raises:
            ClientStateError: a value of `client_state` cannot be committed.
            StoreError: the commit has failed, or a replica does not have it in time.
            CollectiveError: another rank has gone, so it is not known whether its node has the commit. The next run
                goes on from the newest step that all nodes have.
        """
        self._commits.wait_until_settled()
        self._changes.amend()

    def commit_last_step(self) -> None:
        """Commit the last step if no commit has it yet, and wait for the commit. All ranks must call this.

        This is for `paramserver.durability` "snapshot:N", with which only every N-th step and the run's last one, at
        `close`, are committed. It raises what `wait_for_commit` raises.
        """
        self._commits.commit_last_step()
        self._commits.wait_until_settled()
        self._changes.commit_changes_of_script()

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        metric: float | None = None,
    ) -> bool:
        """Keep the present step in the store, and write a manifest of it to `save_dir/tag`. All ranks must call this.

        Nothing is copied: the store keeps the bytes that it has of the step, until the checkpoint is removed by the
        retention of the config (`paramserver.checkpoints`), or forgotten. The manifest appears when it is complete.

        If the call comes between the micro-batches of a step, the checkpoint has the state at the end of the last step,
        and no gradients: a run that loads it begins the step anew. The only exception are buffers larger than 256 KiB,
        which have their values at the time of the call.

        Args:
            save_dir: directory of the checkpoints, made if need be. Rank 0 writes there. "" and None are refused.
            tag: name of the checkpoint's directory; None: `global_step` and the number of the step. A checkpoint of the
                same tag is replaced.
            client_state: this rank's own values, which `load_checkpoint` returns to it. JSON-like values and tensors,
                or whatever `torch.load(weights_only=True)` reads.
            save_latest: whether the file `latest` in `save_dir` is to name this checkpoint.
            exclude_frozen_parameters: has no effect, because frozen parameters are not copied either.
            metric: a measure of the step, for `paramserver.checkpoints.keep_best`.

        Returns:
            True.

        Raises:
            CheckpointError, StoreError, OSError: the checkpoint could not be saved; StoreBudgetError: the store has no
                room to keep the step beside later steps. No committed step is lost, and training can go on.
            ConfigError: `save_dir` names no directory.
            PhaseError: a backward pass or a step is under way.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint(save_dir={save_dir!r}): name the directory of the checkpoints")
        self._loop.require_open()
        self._changes.commit_changes_of_script()
        if self._commits.is_behind:
            self._commits.begin(self._loop.encoded_state())
        self._commits.wait()
        step = self._commits.newest
        assert step is not None, "initialize() commits the initial values"
        self._checkpoints.save(
            save_dir,
            f"global_step{self._loop.global_steps}" if tag is None else str(tag),
            step=step,
            global_steps=self._loop.global_steps,
            run_state=self._loop.encoded_state(),
            user_state=client_state,
            metric=None if metric is None else float(metric),
            save_latest=save_latest,
            is_within_step=self._loop.is_within_step,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint that `save_checkpoint` has saved. All ranks must call this.

        The values of the checkpoint's step become a new commit of this job, so that later checkpoints stay. The
        checkpoint may be of another job and of another number of ranks. With the default arguments, the count of steps,
        schedules, the loss scale, random generators and the cursor of the data are loaded, too. So the next steps
        repeat, bit for bit, the steps that followed the save.

        Args:
            load_dir: directory of the checkpoints; rank 0 reads there.
            tag: name of the checkpoint's directory; None: what the file `latest` names.
            load_module_strict: whether the model must have exactly the parameters of the checkpoint. If False, the
                parameters whose name and shape fit are loaded.
            load_optimizer_states: False: optimizer states, their counts and the loss scale stay as they are.
            load_lr_scheduler_states: False: the schedule stays as it is.
            load_module_only: whether nothing but weights, buffers and extra states of modules is loaded.
            custom_load_fn: only None is possible, because the values go from the store into the store.

        Returns:
            The path of the checkpoint's manifest, and the `client_state` that this rank gave to `save_checkpoint`. A
            rank that did not take part in the save gets the `client_state` of rank 0. If `tag` is None and there is no
            file `latest`, a warning is logged and (None, None) is returned.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or no store keeps its step any more.
            OtherModelError: the checkpoint is of a model with other parameters.
            ConfigError: `custom_load_fn` was given, or the optimizer has other parameter groups than that of the
                checkpoint. Nothing is changed then.
            RuntimeError: a step is under way.
        """
        self._loop.require_between_steps("load_checkpoint()")
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): the store gives the values to the store, and no module gets them "
                "on the way; leave it out, and change weights with engine.load_state_dict()"
            )
        tag = None if tag is None else str(tag)
        with_states = load_optimizer_states and not load_module_only
        loaded = self._checkpoints.find(load_dir, tag, strict=load_module_strict, with_states=with_states)
        if loaded is None:
            return None, None
        with self._changes.changing():
            self._checkpoints.hand_over(loaded, self._commits.next, with_states=with_states)
            self._run_state.restore_extra_states(loaded.run_state)
            if not load_module_only:
                progress = self._run_state.restore(
                    loaded.run_state, optimizer=load_optimizer_states, lr_scheduler=load_lr_scheduler_states
                )
                self._loop.go_on_from(progress, loaded.run_state["user"])
            self._changes.commit()
        if self._collectives.rank == 0:
            # The run has logged at its start from which step it goes on. After `load_checkpoint` that line is wrong, so
            # a new line says the next step.
            log.warning("paramserver: loaded %s: the next step is %d", loaded.path, self._loop.global_steps + 1)
        return loaded.path, loaded.client_state

    def commit_and_meet(self) -> None:
        """Commit the last step and what the script has changed since, and wait for the other ranks.

        All ranks must call this at the end of the run. If another rank has failed or gone after the commit of the last
        step, this rank only logs a warning. The call raises what a failed commit raises.
        """
        self._commits.commit_last_step()
        self._commits.wait()
        try:
            self._changes.commit_changes_of_script()
            self._commits.wait()
            self._collectives.barrier("the end of the run")
            self._commits.record_settled()
        except CollectiveError as error:
            # At a failure of another rank no step is lost, because the last step was committed on all nodes before.
            log.warning("leaving without the other ranks: %s", error)

    def export(
        self, format: Format, destination: str | os.PathLike[str], **options: Unpack[FormatOptions]
    ) -> PendingExport | None:
        """Begin to write the newest committed step, or a kept one, as files of another framework, beside the training.

        All ranks must call this.

        The call returns when rank 0 has checked the arguments and that the destination can be written. Rank 0 then
        reads the step from the store and writes the files on a thread of its own, while training goes on. The next
        commit waits until the store holds the step for the export, because a commit may delete the step before it.
        `close` waits for the export.

        Args:
            format: see `trainer_client.exchange.export.export_step`, which explains all of these arguments.
            destination: a directory that does not exist, or a URL of one that fsspec knows.
            options: further arguments of `export_step`, such as `dtype`, `optimizer` and `adapter`. `kept` names a step
                that the job keeps, as a checkpoint's manifest does.

        Returns:
            The futures of the export on rank 0: `staged` with the number of the step, and `persisted` with the result.
            None on the other ranks. An error of the store is in these futures and in the log, and training goes on.

        Raises:
            ConfigError: an argument is malformed, or does not fit the format; raised on rank 0 alone.
            ExportError: the destination exists or cannot be written; raised on rank 0 alone.
        """
        self._loop.require_between_steps("an export")
        self._changes.commit_changes_of_script()
        stores = [address.decode() for address in self._collectives.gather_bytes(self._store.address.encode())]
        pending = None
        try:
            if self._collectives.rank == 0:
                options.setdefault("credentials", self._store.credentials)
                # If a kept step is exported, the export asks the store for the step's number. A kept step is committed
                # already, so the export waits for no commit.
                is_kept = options.get("kept") is not None
                job, step = self._settings.paramserver.job, None if is_kept else self._commits.newest
                unique, committed = list(dict.fromkeys(stores)), None if is_kept else self._commits.answered()
                pending = begin_export(unique, job, step, destination, committed=committed, format=format, **options)
                # `close` stops a daemon that the run has started, and the export reads from this daemon, so `close`
                # waits for the export first.
                self._resources.callback(wait, [pending.persisted])
                pending.accepted.result()
        finally:
            # Before the next commit, every rank waits in the barrier of `_wait_until_staged`. If the export fails at
            # once, only rank 0 knows that, so rank 0 comes to the barrier also then, because the other ranks wait for
            # it.
            self._commits.hold_next(partial(self._wait_until_staged, pending))
        return pending

    def _wait_until_staged(self, pending: PendingExport | None) -> None:
        """Wait on every rank until the store holds the step of an export, or the export has failed."""
        if pending is not None:
            wait([pending.staged])
        self._collectives.barrier("an export")
