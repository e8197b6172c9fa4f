"""The training loop of one engine, as all calls of the engine see it: its parts, its counters, and where it stands.

This module owns the count of steps, the user's client state, and the encoding of both for a commit. It also says which
calls are possible at this point of the loop, and gives the run up where this rank cannot go on. It must never begin a
pass, a step or a commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_client.client.transport.attachments import Restart
from trainer_client.client.transport.own_process import OwnProcess
from trainer_client.errors import PhaseError
from trainer_client.training.access import StateAccess
from trainer_client.training.model.gather import Gather
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.refusals import ModelRefusals
from trainer_client.training.model.states import PlacedStates, placement_bytes
from trainer_client.training.model.tiling import Tiling
from trainer_client.training.report.reporter import Reporter
from trainer_client.training.report.step_report import StepReport
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
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.step.training_step import TrainingStep
from trainer_client.training.whole_parameters import WholeParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The objects of `trainer_client.training` that the calls of an engine use. assembly.py makes them.

    Attributes:
        tiling: the parameters that are cut into tiles.
        states: the states of all groups.
        in_place: finds parameters that the script has changed in place.
        gather: makes the parameters of units whole.
        activations: moves boundaries of activation checkpoints; None: the boundaries stay on the device.
    """

    tiling: Tiling
    states: Sequence[PlacedStates]
    in_place: InPlaceChanges
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


class TrainingLoop:
    """The training loop of one engine.

    The docstring of `Engine` explains the counters, `client_state`, `optimizer`, `lr_scheduler` and `tput_timer`.

    Attributes:
        user: the model, its parameters, and what else the script has given to `initialize`.
        rank: the settings, the ranks and the store of this rank.
        parts: the objects that the calls of the engine use.
        is_sharded: whether the parameters of some group have no values on this rank outside of forwards (stage 3).
        refusals: the calls of the model that are refused while the engine has it.
        is_closed: whether the engine was closed.
        was_taken_over: whether a later `initialize` or `load_state_dict_from_zero_checkpoint` has taken the model from
            the engine, which is then of no more use.
    """

    def __init__(self, user: UserObjects, rank: RankContext, parts: EngineParts) -> None:
        """Begin a loop whose counters are 0."""
        self.user, self.rank, self.parts = user, rank, parts
        self.global_steps = 0
        self.global_samples = 0
        self.resumed_step = 0
        self.client_state: dict[str, Any] = {}
        self.optimizer = user.optimizer
        self.lr_scheduler = user.lr_scheduler
        self.tput_timer = ThroughputTimer()
        self.is_sharded = any(state.placement.residence is Residence.SHARDED for state in parts.states)
        self.refusals = ModelRefusals(user.module, is_sharded=self.is_sharded)
        self.is_closed = False
        self.was_taken_over = False
        self._process = OwnProcess()
        self._settings = rank.settings
        self._store = rank.store
        self._collectives = rank.collectives
        self._hooks = parts.hooks
        self._step = parts.step
        self._commits = parts.commits
        self._micro_batches = parts.micro_batches
        self._run_state = parts.run_state

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process has made the loop, and is not a forked child of the one that has."""
        return self._process.is_here

    @property
    def data_plane(self) -> str:
        """The way in which tensors pass between store and rank: "arena" (shared memory) or "streams" (gRPC)."""
        return self._store.plane.name

    @property
    def daemon_restarts(self) -> Sequence[Restart]:
        """The restarts of the store daemon after which this rank has gone on training."""
        return self._store.restarts

    def placement(self) -> dict[str, dict[str, int]]:
        """Return where this rank's state lives.

        Returns:
            For "parameters", "gradients" and "optimizer" (master weights and optimizer states), the bytes in each home
            ("device", "host", "nvme").
        """
        return placement_bytes(self.parts.states)

    def step_report(self) -> StepReport | None:
        """Return how this rank spent the time of the last step, and how far the step was from the roofline.

        Return None before the first step. The other ranks do not have to call this. The call waits for the store's
        answer to one small RPC.
        """
        return self.parts.reporter.last()

    def require_open(self) -> None:
        """Raise RuntimeError if the engine is closed, and PhaseError if it is in a phase that allows no call."""
        if self.was_taken_over:
            raise RuntimeError(
                "the engine has no model any more, because load_state_dict_from_zero_checkpoint() has made it a plain "
                "one, or a later initialize() has taken it over: close this engine, and call initialize() to train on"
            )
        if self.is_closed:
            raise RuntimeError("the engine is closed")
        if self._hooks.backward.is_lost:
            self.fail_backward(RuntimeError("loss.backward() has failed; see the error that it raised"))
        if self._hooks.phase in (Phase.BACKWARD, Phase.STEP, Phase.OFFLOADED, Phase.FAILED):
            raise PhaseError(f"the engine was called where it cannot be: {self._hooks.phase.value}")

    def require_between_steps(self, what: str) -> None:
        """Raise RuntimeError unless the engine is between two steps, because `what` is possible only there."""
        self.require_open()
        if self._micro_batches.backwards or self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(f"{what} is possible between two steps: after step(), before the next forward")

    def require_between_passes(self, what: str) -> None:
        """Raise RuntimeError if a forward waits for its backward, because `what` changes the weights."""
        self.require_open()
        if self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{what} is possible where no forward waits for its backward: after backward() or step(), before the "
                "next forward"
            )

    def fail_backward(self, error: BaseException) -> None:
        """If a backward pass is under way, give up the step and abandon the run, because the pass has failed."""
        if self._hooks.backward.abort():
            self._step.abandon()
            self.abandon_run("a backward pass", error)

    def abandon_run(self, what: str, error: BaseException) -> None:
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
    def is_within_step(self) -> bool:
        """Whether a forward or a backward pass was run since the last step."""
        return self._micro_batches.backwards > 0 or self._hooks.phase is Phase.FORWARD

    def encoded_state(self, *, ends_step: bool = False) -> bytes:
        """Return this rank's client state for the next commit, encoded: the state at the end of the last step.

        If a step is under way, this is the state with which the step began, because a run that goes on from the commit
        begins the step anew. If that state was not encoded at the time, the random generators and buffers of this
        moment are taken instead.

        Args:
            ends_step: whether this is the call at the end of a step. The script may still change buffers that belong
                to the step. So the result then lists the buffers that the script has changed after earlier steps, and a
                resume can say that such changes may be missing.
        """
        if not ends_step and self.is_within_step and (state := self._commits.state_of_last_step) is not None:
            return state
        progress = RunProgress(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            micro_steps=self._micro_batches.micro_steps_of_steps,
        )
        return self._run_state.encode(progress, self.client_state, ends_step=ends_step)

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Set counters, schedules and random generators to those of the commit from which the run resumes.

        Args:
            state: the decoded client state of the commit.
        """
        self._run_state.restore_extra_states(state)
        keeps_settings = self._settings.paramserver.hyper_parameters == "stored"
        self.go_on_from(self._run_state.restore(state, settings=keeps_settings), state["user"])
        self.resumed_step = self.global_steps
        self._commits.note_state(self.encoded_state())

    def go_on_from(self, progress: RunProgress, user: dict[str, Any]) -> None:
        """Set the engine's counts of steps and samples to `progress`, and `client_state` to `user`."""
        self.global_steps = progress.global_steps
        self.global_samples = progress.global_samples
        self._micro_batches.go_on_from(progress.micro_steps)
        self.client_state = user
