"""The engine's methods that read, change, save and load states: of whole models, of checkpoints, of parameters.

This module owns when a change of states is committed: as a commit of its own, between two passes. It must never make a
training step. `training/access.py` reads and changes the states, `training/whole_parameters.py` makes parameters whole
within a context, and `training/run/checkpoints.py` knows checkpoints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Unpack

import torch
from torch import nn

from paramserver.contract.capabilities import AMENDED_STEPS
from paramserver.contract.durable_files import make_directory, replace
from trainer_client.engine.core import EngineCore
from trainer_client.errors import ConfigError
from trainer_client.exchange.export import Format, FormatOptions, PendingExport, begin_export
from trainer_client.training.access import ParameterKey, StateDictNames, StateShard
from trainer_client.training.model.refusals import has_released, without_released
from trainer_client.training.run.run_state import RunProgress
from trainer_client.training.step.phases import Phase

log = logging.getLogger(__name__)

# The engine is a module whose child `module` is the model, so the names of the model's parameters begin with this
# prefix in a state dict of the engine.
_PREFIX = "module."


class EngineStates(EngineCore):
    """The base class of the engine with the methods that read, change, save and load states."""

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
        self._amend_commit()

    def commit_last_step(self) -> None:
        """Commit the last step if no commit has it yet, and wait for the commit. All ranks must call this.

        This is for `paramserver.durability` "snapshot:N", with which only every N-th step and the run's last one, at
        `close`, are committed. It raises what `wait_for_commit` raises.
        """
        self._commits.commit_last_step()
        self._commits.wait_until_settled()
        self._commit_changes_of_script()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the model's state by name, on the CPU: fp32 (master) weights; buffers and extra states as they are.

        All ranks must call this.

        A plain copy of the model, without an engine, can load the dict with `strict=True`.

        Args:
            rank0_only: whether only rank 0 gets the state. The other ranks take part, and get an empty dict.
        """
        self._require_open()
        with self._refusals.allow_empty():
            return self._access.full_state_dict(keep=not rank0_only or self._collectives.rank == 0)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the engine as a module, by names that begin with "module."; the arguments are torch's.

        At stage 3, parameters that are not gathered have no elements in the dict, as with DeepSpeed: the dict has the
        names, dtypes and buffers of the model. `full_state_dict` returns the values. The other ranks need not call
        this.
        """
        if not has_released(self.module):
            return super().state_dict(*args, **kwargs)
        log.warning(
            "engine.state_dict() at stage 3 has names and no values, because the weights are in the store: call "
            "engine.full_state_dict() on every rank for the values"
        )
        with self._refusals.allow_empty():
            return without_released(super().state_dict(*args, **{**kwargs, "keep_vars": True}))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> StateDictNames:
        """Set the model's weights, buffers and extra states, between two steps, in a commit. All ranks must call this.

        Optimizer states stay as they are. Every rank must give the same values. A module may put entries of its own
        into its state dict (by a state-dict hook). Such entries are given to the module, and no commit contains them.

        Args:
            state_dict: values by name, as `full_state_dict` or the model's `state_dict` returned them, in any
                floating-point dtype. The names may all begin with "module.".
            strict: whether the names must be exactly those of the model.
            assign: only False is possible, because parameters keep their memory.

        Returns:
            `missing_keys` and `unexpected_keys`, as torch does.

        Raises:
            RuntimeError: the names are not those of the model, or a step is under way; nothing was changed.
            ConfigError: a shape does not fit, or `assign` was given.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True): the engine's parameters keep their memory; leave it out")
        self._require_between_steps("load_state_dict()")
        found = self._access.compare_names(state_dict)
        if found.unexpected_keys and all(name.startswith(_PREFIX) for name in state_dict):
            # A model may have a child that is called `module`. So the prefix is removed from the given names only if
            # more of them are names of the model without it.
            unprefixed = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
            compared = self._access.compare_names(unprefixed)
            if len(compared.unexpected_keys) < len(found.unexpected_keys):
                state_dict, found = unprefixed, compared
        if strict and (found.missing_keys or found.unexpected_keys):
            raise RuntimeError(
                f"load_state_dict(): missing are {', '.join(found.missing_keys) or 'none'}; unexpected are "
                f"{', '.join(found.unexpected_keys) or 'none'}: give the model's own state, or strict=False"
            )
        changes = self._access.weight_changes(state_dict)
        # The modules' own functions that load their entries run before the change of states begins, because an error
        # within such a change ends the run.
        self._access.load_own_entries(state_dict)
        with self._changing():
            self._access.set_beside_parameters(state_dict)
            self._access.hand_over(changes, self._commits.next)
            self._commit_change()
        return found

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
        self._require_between_steps("an export")
        self._commit_changes_of_script()
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

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights as forward computes with them to a file that `torch.load` reads. All ranks must call this.

        Rank 0 writes, and needs host memory for all of these weights. Tied names share one tensor in the file. The file
        is complete when it appears, because it is synced and renamed at the end.

        Args:
            save_dir: directory of the file, made if need be.

        Returns:
            True.

        Raises:
            OSError, RuntimeError: rank 0 could not write the file; OSError on rank 0, RuntimeError on the others.
        """
        self._require_open()
        weights = self._parameter_state_dict(exclude_frozen_parameters)
        failure: OSError | None = None
        if self._collectives.rank == 0:
            try:
                _save(weights, Path(save_dir) / save_filename)
            except OSError as error:
                failure = error
        (has_failed,) = self._collectives.any_rank([failure is not None], "save_16bit_model()")
        if has_failed:
            raise failure or RuntimeError("save_16bit_model(): rank 0 could not write the file; see its message")
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the weights as forward computes with them on rank 0, and None on the others. All ranks must call this.

        The method has DeepSpeed's name, because Accelerate and the Trainer of transformers call it to save the model.
        """
        self._require_open()
        weights = self._parameter_state_dict(exclude_frozen_parameters)
        return weights if self._collectives.rank == 0 else None

    def _parameter_state_dict(self, exclude_frozen_parameters: bool) -> dict[str, Any]:
        """Return the weights as forward computes with them on rank 0, else an empty dict. All ranks must call this."""
        with self._refusals.allow_empty():
            return self._access.parameter_state_dict(
                keep=self._collectives.rank == 0, with_frozen=not exclude_frozen_parameters
            )

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
        self._require_open()
        self._commit_changes_of_script()
        if self._commits.is_behind:
            self._commits.begin(self._client_state())
        self._commits.wait()
        step = self._commits.newest
        assert step is not None, "initialize() commits the initial values"
        self._checkpoints.save(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else str(tag),
            step=step,
            global_steps=self.global_steps,
            run_state=self._client_state(),
            user_state=client_state,
            metric=None if metric is None else float(metric),
            save_latest=save_latest,
            is_within_step=self._is_within_step,
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
        self._require_between_steps("load_checkpoint()")
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
        with self._changing():
            self._checkpoints.hand_over(loaded, self._commits.next, with_states=with_states)
            self._run_state.restore_extra_states(loaded.run_state)
            if not load_module_only:
                progress = self._run_state.restore(
                    loaded.run_state, optimizer=load_optimizer_states, lr_scheduler=load_lr_scheduler_states
                )
                self._go_on_from(progress, loaded.run_state["user"])
            self._commit_change()
        if self._collectives.rank == 0:
            # The run has logged at its start from which step it goes on. After `load_checkpoint` that line is wrong, so
            # a new line says the next step.
            log.warning("paramserver: loaded %s: the next step is %d", loaded.path, self.global_steps + 1)
        return loaded.path, loaded.client_state

    # The methods below read and change the states of single parameters.

    def is_trained(self, parameter: ParameterKey) -> bool:
        """Return whether a parameter is trained, or was trained before it was frozen. It can raise ConfigError.

        A frozen parameter in a parameter group has states, too, because it may be trained later; they are zero.
        """
        found = self._access.parameter(parameter)
        counts = self._step.update_counts
        return self.optimizer.has_states(found) and (found.tensor.requires_grad or counts[found.index] > 0)

    def get_full(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return the whole values of one kind of a parameter, on the CPU, wherever they live. All ranks must call this.

        Args:
            parameter: the parameter, or its FQN.
            kind: "param" (the values that forward computes with, in their dtype), "master" (the fp32 weight), "grad"
                (between backward and step: the mean, or the sum, over ranks of the gradients so far, without the loss
                scale), or a state of the optimizer by torch's name, as "exp_avg". All but "param" are fp32. A gradient
                that the ranks have not reduced yet (within `no_sync`, or before the last backward of a step in which
                only the last one reduces) is reduced for this call alone.

        Returns:
            The values in the parameter's shape. None for "grad" if no rank has a gradient in this step.

        Raises:
            ConfigError: there is no such parameter or kind.
        """
        self._require_open()
        return self._access.full(parameter, kind)

    def get_local(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return this rank's part of one kind of a parameter: [n] of the flattened parameter; n may be 0.

        The values are as those of `get_full`, but the other ranks do not have to call this. For a gradient that no rank
        has, None or zeros are returned.

        Raises:
            ConfigError: there is no such parameter or kind.
            RuntimeError: gradients are not reduced over the ranks yet (within `no_sync`, or before the last backward of
                a step in which only that one reduces).
        """
        self._require_open()
        return self._access.local(parameter, kind)

    def set_full(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter, on all ranks. All ranks must call this with the same value.

        "param" and "master" are one weight and change together. A gradient can be changed between backward and step. A
        parameter that the backward pass has not reached can be given a gradient, if the pass has reached another
        parameter of its flat group. All other kinds can be changed wherever no forward waits for its backward. Each
        change is a commit of its own, so a resume has the whole change or nothing of it. A change keeps the gradients
        of the step under way, so `step()` then updates the new values. `set_many` makes several changes in one commit.

        Args:
            value: the new values in the parameter's shape, of any dtype and on any device.

        Raises:
            ConfigError: there is no such parameter or kind, or the shape does not fit.
            RuntimeError: the kind cannot be changed at this point of the training loop.
        """
        self._set({(parameter, kind): value}, local=False)

    def set_local(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter as `set_full` does, but each rank gives only its own part.

        All ranks must call this, each with its own part [n], as `get_local` returns it.
        """
        self._set({(parameter, kind): value}, local=True)

    def set_many(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor]) -> None:
        """Make several changes as `set_full`, by (parameter, kind), in one commit. All ranks must call this."""
        self._set(values, local=False)

    def sharded_state_dict(self, kind: str = "master") -> dict[str, StateShard]:
        """Return this rank's part of one kind of all parameters that have it, by FQN, tied names included.

        The other ranks do not have to call this. Each part says which elements of which parameter it has, so that the
        dicts of all ranks together are the whole state, for any number of ranks. (`full_state_dict` returns the whole
        state on each rank.)
        """
        self._require_open()
        return self._access.shards(kind)

    @contextmanager
    def gathered(
        self, parameters: nn.Module | Iterable[torch.Tensor], modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Make parameters whole within the context, in the dtype of the forward, for reading. All ranks must call this.

        Their units stay gathered in the context, so forwards within it do not gather them again.

        Args:
            parameters: the parameters, or a module, for all of its parameters.
            modifier_rank: the rank that may change the parameters (in place, under torch.no_grad). At the end of the
                context all ranks get the values of this rank, in a commit of their own. An element that this rank does
                not change keeps its fp32 value. This rank may call `load_state_dict` of a module, if that loads these
                parameters only. None: no rank may change them. (At stages 0 to 2, all ranks may make the same change.)

        Raises:
            InPlaceChangeError: parameters were changed without `modifier_rank`, at stage 3.
            RuntimeError: `modifier_rank` was given between a forward and its backward.
        """
        self._require_open()
        chosen = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        if modifier_rank is None:
            with self._whole_parameters.gathered(chosen):
                yield
                self._whole_parameters.require_unchanged(chosen)
            return
        self._require_between_passes("gathered(modifier_rank=...)")
        before = self._whole_parameters.parameters_before(chosen)
        with self._whole_parameters.gathered(chosen):
            with self._refusals.allow_load(chosen if self._collectives.rank == modifier_rank else ()):
                yield
            self._require_between_passes("the end of gathered(modifier_rank=...)")
            with self._changing():
                self._whole_parameters.hand_over_changed(chosen, before, modifier_rank, self._commits.next)
        with self._changing():
            self._commit_change()

    def _set(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor], *, local: bool) -> None:
        """Change gradients at once, and all other kinds in a commit of their own. All ranks must call this."""
        self._require_open()
        gradients = {parameter: value for (parameter, kind), value in values.items() if kind == "grad"}
        for parameter, value in gradients.items():
            self._access.set_gradient(parameter, value, local=local)
        states = {key: value for key, value in values.items() if key[1] != "grad"}
        if states:
            self._require_between_passes("a change of parameters or optimizer states")
            changes = self._access.changes(states, local=local)
            with self._changing():
                self._access.hand_over(changes, self._commits.next)
                self._commit_change()

    # The methods below begin a run, and commit changes of states.

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Set counters, schedules and random generators to those of the commit from which the run resumes.

        `initialize` calls this at its end.

        Args:
            state: the decoded client state of the commit.
        """
        self._run_state.restore_extra_states(state)
        keeps_settings = self._settings.paramserver.hyper_parameters == "stored"
        self._go_on_from(self._run_state.restore(state, settings=keeps_settings), state["user"])
        self.resumed_step = self.global_steps
        self._commits.note_state(self._client_state())

    def commit_initial_state(self) -> None:
        """Commit the states that `initialize` has handed over.

        For a new job they are the initial weights, and the commit is step 0. For a resume in another layout they are
        the states of the resumed step, and the commit is the step after it.
        """
        self._commits.begin(self._client_state())
        self._commits.wait_until_settled()

    def _go_on_from(self, progress: RunProgress, user: dict[str, Any]) -> None:
        """Set the engine's counts of steps and samples to `progress`, and `client_state` to `user`."""
        self.global_steps = progress.global_steps
        self.global_samples = progress.global_samples
        self._micro_batches.go_on_from(progress.micro_steps)
        self.client_state = user

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Enclose a change of states. If the change fails, the engine makes no commit any more.

        A change that fails half-way cannot be undone, so a later commit would have a part of it. Early updates are
        withdrawn before the change, because the store has computed them from the former values.
        """
        self._commits.wait()
        self._step.require_revisable("weights or states are to be changed between backward and step")
        try:
            self._step.withdraw_early_updates()
            yield
        except BaseException as error:
            self._hooks.fail_change()
            self._step.abandon()
            self._abandon_run("a change of states", error)
            raise

    def _commit_change(self) -> None:
        """Commit the states that were changed within `_changing`, and wait until the commit is on all nodes."""
        self._hooks.release_units()
        self._commits.begin(self._client_state())
        self._commits.wait_until_settled()
        self._changes.note()

    def _adopt_changes(self) -> bool:
        """Take over the parameters that the script has changed in place since the last step. All ranks must call this.

        Returns:
            Whether the store was given changed values, which have to be committed before the next update. Changed
            parameters that live on the device need no commit of their own, because the commit of the step has them.

        Raises:
            ConfigError: the ranks have changed parameters in different ways, or a parameter has another shape or dtype
                now.
            PhaseError: the store has begun an early update that is final, so it cannot be withdrawn.
        """
        changed = self._changes.find()
        has_stored = any(state.is_in_store for state in changed)
        if has_stored:
            self._step.require_revisable("a parameter was changed in place between backward and step")
            self._step.withdraw_early_updates()
        for state in changed:
            state.adopt(self._commits.next)
        return has_stored

    def _amend_commit(self) -> None:
        """Add what this rank has changed in buffers and client state since the last step to the commit of that step.

        The other ranks need not call this. The call does nothing within a step, or if the last step has no commit.
        """
        state, step = self._commits.state_of_last_step, self._commits.newest
        has_commit = state is not None and step is not None and not self._commits.is_behind
        if self._closed or not has_commit or self._hooks.phase is not Phase.IDLE or self._is_within_step:
            return
        assert state is not None and step is not None
        is_alone = self._collectives.world_size == 1
        amended = self._run_state.amended(state, self.client_state, is_alone=is_alone)
        # A daemon of an earlier release cannot amend a committed step (replace its client state). The changes of the
        # client state are lost then, and the next run logs that.
        if amended is not None and AMENDED_STEPS in self._store.capabilities:
            self._store.steps.amend(step, amended)

    def _commit_changes_of_script(self) -> None:
        """Commit what the script has changed since the last step: parameters, buffers and its client state.

        All ranks must call this. It does nothing if steps are never committed. It can raise ConfigError and PhaseError,
        as `_adopt_changes`.
        """
        if not self._commits.commits_steps:
            return
        changed = self._changes.find()
        is_late = not self._is_within_step and self._run_state.has_late_changes(self.client_state)
        (is_late_anywhere,) = self._collectives.any_rank([is_late], "a look at buffers")
        if changed or is_late_anywhere:
            with self._changing():
                for state in changed:
                    state.adopt(self._commits.next)
                self._commit_change()


def _save(weights: Mapping[str, Any], path: Path) -> None:
    """Write `weights` to `path` by `torch.save`. The file appears when it is complete. It can raise OSError."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(weights, file)
        except RuntimeError as error:
            # If a write to the file fails with OSError, torch.save raises RuntimeError about the unfinished file in its
            # place. The OSError is the context of that error, and says more, so it is raised instead.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else OSError(f"{path} cannot be written: {error}") from None

    make_directory(path.parent)
    replace(path, write)
