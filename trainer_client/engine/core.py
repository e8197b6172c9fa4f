"""The parts of an engine, the counters that the user sees, and the checks that a call is possible at this point.

This module owns the count of steps, the user's client state, and the encoding of both for a commit. It must never begin
a pass, a step or a commit, because the methods in states.py and engine.py do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trainer_client.client.transport.own_process import OwnProcess
from trainer_client.engine.getters import EngineGetters
from trainer_client.errors import PhaseError
from trainer_client.training.access import StateAccess
from trainer_client.training.model.gather import Gather
from trainer_client.training.model.pickling import PlainPickles
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.refusals import ModelRefusals
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.model.tiling import Tiling
from trainer_client.training.report.reporter import Reporter
from trainer_client.training.report.throughput import ThroughputTimer
from trainer_client.training.run.backward_passes import BackwardPasses
from trainer_client.training.run.checkpoints import Checkpoints
from trainer_client.training.run.commits import Commits
from trainer_client.training.run.context import RankContext, UserObjects
from trainer_client.training.run.device_copies import CopyRoom
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.run.run_state import RunProgress, RunState
from trainer_client.training.run.state_offload import StateOffload
from trainer_client.training.step.activations import Activations
from trainer_client.training.step.hooks import UnitHooks
from trainer_client.training.step.in_place import InPlaceChanges
from trainer_client.training.step.phases import Phase
from trainer_client.training.step.precision import LossScaler, PrecisionPolicy
from trainer_client.training.step.training_step import TrainingStep
from trainer_client.training.whole_parameters import WholeParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The objects to which an engine's methods pass their calls. assembly.py makes them.

    Attributes:
        tiling: the parameters that are cut into tiles.
        states: the states of all groups.
        changes: finds parameters that the script has changed in place.
        gather: makes the parameters of units whole.
        activations: moves boundaries of activation checkpoints; None: the boundaries stay on the device.
    """

    tiling: Tiling
    states: Sequence[PlacedStates]
    changes: InPlaceChanges
    gather: Gather
    micro_batches: MicroBatches
    hooks: UnitHooks
    step: TrainingStep
    scaler: LossScaler
    access: StateAccess
    whole_parameters: WholeParameters
    commits: Commits
    passes: BackwardPasses
    run_state: RunState
    checkpoints: Checkpoints
    offload: StateOffload
    device_copies: CopyRoom
    activations: Activations | None
    reporter: Reporter


class EngineCore(EngineGetters):
    """The base class of the engine, with the attributes, counters and checks that all of its methods use.

    The docstring of `Engine` explains the public attributes.
    """

    def __init__(self, user: UserObjects, rank: RankContext, parts: EngineParts, resources: ExitStack) -> None:
        """Set the engine's attributes to the parts, and its counters to 0.

        Args:
            resources: closed when the engine is closed.
        """
        super().__init__()
        self.module = user.module
        self.training = user.module.training
        self.optimizer = user.optimizer
        self.lr_scheduler = user.lr_scheduler
        self.global_steps = 0
        self.global_samples = 0
        self.resumed_step = 0
        self.client_state: dict[str, Any] = {}
        self.tput_timer = ThroughputTimer()
        self.local_rank = rank.local_rank
        self.device = rank.collectives.device
        self._settings = rank.settings
        self._precision = PrecisionPolicy.of(rank.settings)
        self._store = rank.store
        self._collectives = rank.collectives
        self._log_context = rank.log_context
        self._tiling = parts.tiling
        self._states = parts.states
        self._step = parts.step
        self._hooks = parts.hooks
        self._changes = parts.changes
        self._gather = parts.gather
        self._access = parts.access
        self._whole_parameters = parts.whole_parameters
        self._commits = parts.commits
        self._passes = parts.passes
        self._scaler = parts.scaler
        self._run_state = parts.run_state
        self._checkpoints = parts.checkpoints
        self._micro_batches = parts.micro_batches
        self._reporter = parts.reporter
        self._offload = parts.offload
        self._device_copies = parts.device_copies
        self._activations = parts.activations
        self._resources = resources
        self._closed = False
        self._process = OwnProcess()
        self._was_step_applied = False
        self._is_sharded = any(state.placement.residence is Residence.SHARDED for state in parts.states)
        self._refusals = ModelRefusals(user.module, is_sharded=self._is_sharded)
        self._pickles = PlainPickles(user.module, is_sharded=self._is_sharded)
        self._parameters_of_model = user.parameters
        # `_has_model`: whether the model still has this engine's hooks. `_was_taken_over`: whether a later `initialize`
        # or load_state_dict_from_zero_checkpoint() has taken the model from this engine, which is then of no more use.
        self._has_model = True
        self._was_taken_over = False

    def _require_open(self) -> None:
        """Raise RuntimeError if the engine is closed, and PhaseError if it is in a phase that allows no call."""
        if self._was_taken_over:
            raise RuntimeError(
                "the engine has no model any more, because load_state_dict_from_zero_checkpoint() has made it a plain "
                "one, or a later initialize() has taken it over: close this engine, and call initialize() to train on"
            )
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._hooks.backward.is_lost:
            self._fail_backward(RuntimeError("loss.backward() has failed; see the error that it raised"))
        if self._hooks.phase in (Phase.BACKWARD, Phase.STEP, Phase.OFFLOADED, Phase.FAILED):
            raise PhaseError(f"the engine was called where it cannot be: {self._hooks.phase.value}")

    def _require_between_steps(self, what: str) -> None:
        """Raise RuntimeError unless the engine is between two steps, because `what` is possible only there."""
        self._require_open()
        if self._micro_batches.backwards or self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(f"{what} is possible between two steps: after step(), before the next forward")

    def _require_between_passes(self, what: str) -> None:
        """Raise RuntimeError if a forward waits for its backward, because `what` changes the weights."""
        self._require_open()
        if self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{what} is possible where no forward waits for its backward: after backward() or step(), before the "
                "next forward"
            )

    def _fail_backward(self, error: BaseException) -> None:
        """If a backward pass is under way, give up the step and abandon the run, because the pass has failed."""
        if self._hooks.backward.abort():
            self._step.abandon()
            self._abandon_run("a backward pass", error)

    def _abandon_run(self, what: str, error: BaseException) -> None:
        """Abandon the run, because this rank has failed in `what` and cannot take part in the step any more.

        This rank leaves its process groups and its session, so the other ranks wait for it neither in a collective nor
        for its vote in the store. In a forked child of the rank's process the call does nothing, because a failure
        there is no failure of the rank.
        """
        if self._collectives.world_size > 1 and self._process.is_here:
            self._collectives.process_groups.abandon(what, error)
            self._commits.abandon()
            self._store.close()

    @property
    def _is_within_step(self) -> bool:
        """Whether a forward or a backward pass was run since the last step."""
        return self._micro_batches.backwards > 0 or self._hooks.phase is Phase.FORWARD

    def _client_state(self, *, ends_step: bool = False) -> bytes:
        """Return this rank's client state for the next commit, encoded: the state at the end of the last step.

        If a step is under way, this is the state with which the step began, because a run that goes on from the commit
        begins the step anew. If that state was not encoded at the time, the random generators and buffers of this
        moment are taken instead.

        Args:
            ends_step: whether this is the call at the end of a step. The script may still change buffers that belong
                to the step. So the result then lists the buffers that the script has changed after earlier steps, and a
                resume can say that such changes may be missing.
        """
        if not ends_step and self._is_within_step and (state := self._commits.state_of_last_step) is not None:
            return state
        progress = RunProgress(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            micro_steps=self._micro_batches.micro_steps_of_steps,
        )
        return self._run_state.encode(progress, self.client_state, ends_step=ends_step)
