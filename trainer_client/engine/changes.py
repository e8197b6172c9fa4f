"""Changes of states between two steps, by a call of the engine or by the script itself, and their commits.

This module owns when a change of states is committed: as a commit of its own, between two passes. It must never make a
training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paramserver.contract.capabilities import AMENDED_STEPS
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.training.step.phases import Phase


class StateChanges:
    """Commits what calls of the engine, or the script itself, have changed since the last step."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Serve the calls of one engine."""
        self._loop = loop
        self._commits = loop.parts.commits
        self._step = loop.parts.step
        self._hooks = loop.parts.hooks
        self._in_place = loop.parts.in_place
        self._run_state = loop.parts.run_state
        self._store = loop.rank.store
        self._collectives = loop.rank.collectives

    @contextmanager
    def changing(self) -> Iterator[None]:
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
            self._loop.abandon_run("a change of states", error)
            raise

    def commit(self) -> None:
        """Commit the states that were changed within `changing`, and wait until the commit is on all nodes."""
        self._hooks.release_units()
        self._commits.begin(self._loop.encoded_state())
        self._commits.wait_until_settled()
        self._in_place.note()

    def adopt(self) -> bool:
        """Take over the parameters that the script has changed in place since the last step. All ranks must call this.

        Returns:
            Whether the store was given changed values, which have to be committed before the next update. Changed
            parameters that live on the device need no commit of their own, because the commit of the step has them.

        Raises:
            ConfigError: the ranks have changed parameters in different ways, or a parameter has another shape or dtype
                now.
            PhaseError: the store has begun an early update that is final, so it cannot be withdrawn.
        """
        changed = self._in_place.find()
        has_stored = any(state.is_in_store for state in changed)
        if has_stored:
            self._step.require_revisable("a parameter was changed in place between backward and step")
            self._step.withdraw_early_updates()
        for state in changed:
            state.adopt(self._commits.next)
        return has_stored

    def amend(self) -> None:
        """Add what this rank has changed in buffers and client state since the last step to the commit of that step.

        The other ranks need not call this. The call does nothing within a step, or if the last step has no commit.
        """
        state, step = self._commits.state_of_last_step, self._commits.newest
        has_commit = state is not None and step is not None and not self._commits.is_behind
        if self._loop.is_closed or not has_commit or self._hooks.phase is not Phase.IDLE or self._loop.is_within_step:
            return
        assert state is not None and step is not None
        is_alone = self._collectives.world_size == 1
        amended = self._run_state.amended(state, self._loop.client_state, is_alone=is_alone)
        # A daemon of an earlier release cannot amend a committed step (replace its client state). The changes of the
        # client state are lost then, and the next run logs that.
        if amended is not None and AMENDED_STEPS in self._store.capabilities:
            self._store.steps.amend(step, amended)

    def commit_changes_of_script(self) -> None:
        """Commit what the script has changed since the last step: parameters, buffers and its client state.

        All ranks must call this. It does nothing if steps are never committed. It can raise ConfigError and PhaseError,
        as `adopt`.
        """
        if not self._commits.commits_steps:
            return
        changed = self._in_place.find()
        is_late = not self._loop.is_within_step and self._run_state.has_late_changes(self._loop.client_state)
        (is_late_anywhere,) = self._collectives.any_rank([is_late], "a look at buffers")
        if changed or is_late_anywhere:
            with self.changing():
                for state in changed:
                    state.adopt(self._commits.next)
                self.commit()

    def commit_initial_state(self) -> None:
        """Commit the states that `initialize` has handed over.

        For a new job they are the initial weights, and the commit is step 0. For a resume in another layout they are
        the states of the resumed step, and the commit is the step after it.
        """
        self._commits.begin(self._loop.encoded_state())
        self._commits.wait_until_settled()
