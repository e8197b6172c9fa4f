"""The engine: DeepSpeed's verbs over a model whose state lives in the store.

Owns the counters, the order of a step, and the client state that each commit carries. Must never communicate on its
own: collectives, leases and hooks each have their room below.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from trainer_client.access import ParameterKey, StateAccess, StateShard, own
from trainer_client.config.training_config import BatchSizes
from trainer_client.errors import CollectiveError, NonFiniteGradientError, PhaseError, TrainerClientError
from trainer_client.model.gather import Gather
from trainer_client.model.parameters import ModelParameter
from trainer_client.model.placement import Residence
from trainer_client.model.states import PlacedStates, placement_bytes
from trainer_client.ranks.collectives import Collectives
from trainer_client.report.reporter import Reporter
from trainer_client.report.step_report import StepReport
from trainer_client.run.commits import Commits
from trainer_client.run.data_loader import TrainingLoader
from trainer_client.run.run_state import Progress, RunState, Scheduler
from trainer_client.step.gradients import ReductionSchedule
from trainer_client.step.hooks import UnitHooks
from trainer_client.step.phases import Phase
from trainer_client.step.precision import LossScaler
from trainer_client.step.training_step import TrainingStep
from trainer_client.store_optimizer import StoreOptimizer
from trainer_client.transport.attachments import Restart
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)


class Engine:
    """Made by `trainer_client.initialize`; one training loop per engine, as with DeepSpeed:

        loss = engine(batch); engine.backward(loss); engine.step()

    Attributes:
        module: the model. At stage 3, its parameters have no values outside of its forward.
        optimizer, lr_scheduler: what drives the hyper-parameters; `engine.step()` steps both.
        global_steps: steps made or skipped, the newest step of the job.
        micro_steps: calls of `step`, one per micro-batch.
        resumed_step: the global step that the run started from; 0 for a new job.
        client_state: the user's own values (JSON-like, tensors too), committed with each step and given back on resume:
            a data cursor, for example. Set them before the `step()` that they belong to.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: StoreOptimizer,
        lr_scheduler: Scheduler | None,
        parameters: Sequence[ModelParameter],
        states: Sequence[PlacedStates],
        step: TrainingStep,
        hooks: UnitHooks,
        gather: Gather,
        access: StateAccess,
        store: RankStore,
        commits: Commits,
        collectives: Collectives,
        scaler: LossScaler,
        run_state: RunState,
        batch: BatchSizes,
        data: TrainingLoader | None,
        reduction: ReductionSchedule,
        max_skipped_in_row: int | None,
        steps_per_print: int | None,
        reporter: Reporter,
        local_rank: int,
        resources: ExitStack,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = 0
        self.micro_steps = 0
        self.resumed_step = 0
        self.client_state: dict[str, Any] = {}
        self.local_rank = local_rank
        self.device = collectives.device
        self._states = states
        self._step = step
        self._hooks = hooks
        self._gather = gather
        self._access = access
        self._store = store
        self._commits = commits
        self._collectives = collectives
        self._scaler = scaler
        self._run_state = run_state
        self._batch = batch
        self._data = data
        self._reduction = reduction
        self._max_skipped_in_row = max_skipped_in_row
        self._steps_per_print = steps_per_print
        self._reporter = reporter
        self._resources = resources
        self._backwards = 0  # since the last boundary
        self._boundary: bool | None = None  # as the user says; None: by the count of micro-batches
        self._syncs = True  # False within `no_sync`
        self._closed = False
        if any(state.placement.residence is Residence.SHARDED for state in states):
            module.register_state_dict_pre_hook(_refuse_state_dict)
        own(parameters, self)
        atexit.register(self.leave)
        if collectives.rank == 0:
            log.info("placement, bytes of each rank: %s", self.placement())

    # DeepSpeed's verbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point inputs are cast to the compute dtype."""
        self._require_open()
        self._hooks.expect_forward()
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._hooks.fail_forward()
            raise

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Backward of a micro-batch; divides by the accumulation steps and applies the loss scale. A collective.

        Args:
            loss: 0-D, the mean over this rank's micro-batch.

        Returns:
            The loss divided by the accumulation steps.
        """
        self._require_open()
        if self._batch.accumulation > 1:
            loss = loss / self._batch.accumulation
        scaled = loss if self._scaler.scale == 1.0 else loss.float() * self._scaler.scale
        is_last = self.is_gradient_accumulation_boundary()
        reduces = self._syncs and (is_last or self._reduction is ReductionSchedule.MICRO_BATCH)
        if is_last and reduces:
            # The store prepares one step at a time; by now it has made the last one, which the forward has waited for.
            self.wait_for_commit()
        self._step.begin_backward(self._commits.next, is_last=is_last and reduces)
        try:
            self._hooks.begin_backward(self._commits.next, reduces=reduces)
            torch.autograd.backward(scaled, retain_graph=retain_graph)
            self._hooks.finish_backward()
        except BaseException as error:
            if self._hooks.abort_backward():
                self._step.abandon()
                self._give_up("a backward pass", error)
            raise
        self._backwards += 1
        return loss

    def step(self) -> None:
        """Ends a micro-batch; at the accumulation boundary, makes and commits a step. A collective.

        Returns when the store has the gradients; where parameters or optimizer states live on the device, when those
        are updated. What the store updates and the commit go on there; their failure is raised by the next step,
        `wait_for_commit` or `close`. A step with a non-finite gradient is skipped on every rank.

        Raises:
            ConfigError: a parameter group or a parameter was changed so that no step can be made; none was begun.
            NonFiniteGradientError: `paramserver.max_consecutive_skipped_steps` steps in a row were skipped.
            StoreError: the store failed; the last committed step is intact.
        """
        self._require_open()
        if self._access.is_holding:
            raise RuntimeError("step() within gathered(): leave it first, the step changes the parameters")
        if self._backwards == 0:
            raise RuntimeError("step() without backward(): there is no gradient")
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and not self._syncs:
            raise RuntimeError("step() of the last micro-batch within no_sync(): leave it first, a step communicates")
        if boundary:
            self.optimizer.check_groups()
        self.micro_steps += 1
        if self._data is not None:
            self._data.finish_micro_batch()
        if not boundary:
            return
        voted = self._commits.newest
        try:
            self._hooks.begin_step()
            self._make_step()
        except BaseException as error:
            self._step.abandon(is_voted_for=self._commits.newest != voted)
            self._give_up("engine.step()", error)
            raise
        self._report()
        if self._step.skipped_in_row == self._max_skipped_in_row:
            raise NonFiniteGradientError(
                f"the gradients of {self._step.skipped_in_row} steps in a row, up to step {self.global_steps}, are not "
                "finite (paramserver.max_consecutive_skipped_steps): look at the data and the learning rate; the "
                "states are those before these steps"
            )

    def _make_step(self) -> None:
        # Every rank waits here before it takes part in the norm: after the norm, the last step is settled everywhere.
        self.wait_for_commit()
        made = self._step.make(self._commits.next)
        self.global_steps += 1
        self._backwards = 0
        if self._data is not None:
            self._data.finish_step()
        if not made:
            log.warning("step %d is skipped: its gradient norm is %s", self.global_steps, self._step.gradient_norm)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # The scheduler has stepped: a resume starts with the learning rate that an uninterrupted run has.
        self._commits.end_step(self.global_steps, self._client_state)
        if self._gather.is_one_sided:
            self._collectives.barrier()
        self._step.refresh()
        self._hooks.finish_step()

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """`module` uses `parameter` of another module in each forward: both are gathered together from now on.

        Never needed, for the use is noticed, but it saves torch.compile a cut in the graph of `module`. DeepSpeed has
        the same in `deepspeed.zero`.

        Raises:
            ConfigError: one of them is not of this engine's model.
        """
        self._hooks.lend(module, parameter)

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradient over all ranks, before clipping; None before the first step.

        Without clipping by norm, that of bf16 gradients on the CPU is rounded: right within 0.1 %.
        """
        return self._step.gradient_norm

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because the gradient was not finite on some rank."""
        return self._step.skipped

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within the context do not communicate, at any stage; every rank enters it alike.

        Their gradients stay whole on each rank's device until the next backward pass outside of the context, or the
        step: DDP's `no_sync`.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Whether the micro-batch under way is the last of its step, until said otherwise; None: as the config says.

        To be called before its `backward`, on every rank alike.
        """
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` makes a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._batch.accumulation == 0

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro

    def train_batch_size(self) -> int:
        return self._batch.train

    # What the store adds

    @property
    def data_plane(self) -> str:
        """How tensor bytes reach this rank: "arena" (shared memory) or "streams" (gRPC)."""
        return self._store.plane.name

    @property
    def daemon_restarts(self) -> Sequence[Restart]:
        """The restarts of the store daemon that this rank has outlived."""
        return self._store.restarts

    def placement(self) -> dict[str, dict[str, int]]:
        """Where this rank's state lives: bytes by home ("device", "host", "nvme") of "parameters", "gradients" and
        "optimizer" (master weights and optimizer states)."""
        return placement_bytes(self._states)

    def step_report(self) -> StepReport | None:
        """Where the time of the last step went, on this rank, and how far it was from the roofline.

        None before the first step. Not a collective; waits for the store's answer to a small question.
        """
        return self._reporter.last()

    def wait_for_commit(self) -> None:
        """Returns when the newest commit is there as the job's durability class says. Raises StoreError."""
        self._commits.wait()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The model's state by name, on the CPU: fp32 (master) weights, buffers as they are. A collective.

        Loads into the same model outside of the engine with `strict=True`.

        Args:
            rank0_only: other ranks take part, but get an empty dict.
        """
        self._require_open()
        return self._access.full_state_dict(keep=not rank0_only or self._collectives.rank == 0)

    # Access to single parameters

    def get_full(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """The whole values of one kind of a parameter, of its shape, on the CPU, wherever they live. A collective.

        Args:
            parameter: or its FQN.
            kind: "param" (what forward computes with, in its dtype), "master" (the fp32 weight), "grad" (between
                backward and step: the mean over ranks so far, not scaled), or a state of the optimizer by torch's name,
                as "exp_avg". All but "param" are fp32.

        Returns:
            None for "grad" if no rank has one in this step.

        Raises:
            ConfigError: no such parameter or kind.
            RuntimeError: gradients are not reduced over the ranks yet (within `no_sync`, or before the last backward of
                a step where only that one reduces).
        """
        self._require_open()
        return self._access.full(parameter, kind)

    def get_local(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """As `get_full`, for the part of the flattened parameter that this rank has: [n], n may be 0. Not a collective.

        A gradient that no rank has is None or zeros.
        """
        self._require_open()
        return self._access.local(parameter, kind)

    def set_full(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Changes one kind of a parameter, everywhere; every rank passes the same value. A collective.

        "param" and "master" are one weight and change together. A gradient is changed between backward and step; all
        else between two steps, as a commit of its own: it is there after a resume, or not at all. `set_many` changes
        several in one commit.

        Args:
            value: of the parameter's shape, any dtype and device.

        Raises:
            ConfigError: no such parameter or kind, or the shape does not fit.
            RuntimeError: it is not the time for it.
        """
        self._set({(parameter, kind): value}, local=False)

    def set_local(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """As `set_full`; each rank passes the part [n] that it has, as `get_local` gives it. A collective, too."""
        self._set({(parameter, kind): value}, local=True)

    def set_many(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor]) -> None:
        """As `set_full` for several, by (parameter, kind), in one commit. A collective."""
        self._set(values, local=False)

    def state_dict(self, kind: str = "master") -> dict[str, StateShard]:
        """This rank's part of one kind of all parameters that have it, by FQN, tied names included. Not a collective.

        Each says which elements of which parameter it has, so that the dicts of all ranks are the whole state, for any
        number of ranks. (`full_state_dict` gathers it.)
        """
        self._require_open()
        return self._access.shards(kind)

    @contextmanager
    def gathered(
        self, parameters: nn.Module | Iterable[torch.Tensor], modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Within the context parameters are whole, in the dtype of the forward, for reading. A collective.

        Their units are gathered, and stay so: forwards within the context gather nothing that is here.

        Args:
            parameters: or a module, for all of its parameters.
            modifier_rank: what this rank writes into them (in place, under torch.no_grad) becomes everyone's at the end
                of the context, as a commit of its own. An element that it leaves as it is keeps its fp32 value.

        Raises:
            RuntimeError: with `modifier_rank`, between backward and step, or within a forward.
        """
        self._require_open()
        chosen = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        if modifier_rank is None:
            with self._access.gathered(chosen):
                yield
            return
        self._require_between_steps("gathered(modifier_rank=...)")
        before = self._access.parameters_before(chosen)
        with self._access.gathered(chosen):
            yield
            self._require_between_steps("the end of gathered(modifier_rank=...)")
            with self._changing():
                self._access.stage_changed(chosen, before, modifier_rank, self._commits.next)
        with self._changing():
            self._commit_change()

    def _set(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor], *, local: bool) -> None:
        self._require_open()
        gradients = {parameter: value for (parameter, kind), value in values.items() if kind == "grad"}
        for parameter, value in gradients.items():
            self._access.set_gradient(parameter, value, local=local)
        states = {key: value for key, value in values.items() if key[1] != "grad"}
        if states:
            self._require_between_steps("a change of parameters or optimizer states")
            changes = self._access.changes(states, local=local)
            with self._changing():
                self._access.stage(changes, self._commits.next)
                self._commit_change()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Surround a change of states. One that fails half-way cannot be undone and would be a part of the next commit,
        so the engine makes none after it."""
        self.wait_for_commit()
        try:
            yield
        except BaseException as error:
            self._hooks.fail_change()
            self._give_up("a change of states", error)
            raise

    def _give_up(self, what: str, error: BaseException) -> None:
        """Leave the other ranks, because this one cannot take part in the step any more and none of them shall wait for
        it: neither in a collective, nor in the store for its vote."""
        if self._collectives.world_size > 1:
            self._collectives.give_up(what, error)
            self._commits.abandon()
            self._store.close()

    def _commit_change(self) -> None:
        self._hooks.forget_values()
        self._commits.begin(self._client_state())
        self._commits.wait()

    def _require_between_steps(self, what: str) -> None:
        self._require_open()
        if self._backwards or self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(f"{what} is possible between two steps: after step(), before the next forward")

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Goes on where a commit was, which carried `state`; as the last act of `initialize`."""
        progress = self._run_state.restore(state)
        self.global_steps = self.resumed_step = progress.global_steps
        self.micro_steps = progress.micro_steps
        self.client_state = state["user"]

    def commit_initial_state(self) -> None:
        """Commits what is staged: the initial weights as step 0, or the resumed step in another layout as the next."""
        self._commits.begin(self._client_state())
        self._commits.wait()

    def close(self) -> None:
        """Commits what is not committed yet, waits for the other ranks, leaves the job, and stops the daemon that
        belongs to it. Idempotent. A collective: what one rank still reads would go with the rank that leaves before it.
        """
        if self._closed:
            return
        try:
            if self._hooks.phase not in (Phase.STEP, Phase.FAILED):
                self._commits.settle()
                self._commits.wait()
                self._meet()
        finally:
            self.leave()

    def leave(self) -> None:
        """As `close`, for a run that may have failed: commits nothing that is not under way, and waits for nobody."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.leave)
        self._store.give_up()
        with self._resources:
            self.wait_for_commit()

    def _meet(self) -> None:
        try:
            self._collectives.barrier("the end of the run")
        except CollectiveError as error:
            # Everything is committed: others that have failed or gone take nothing from this rank.
            log.warning("leaving without the other ranks: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.leave()
        except TrainerClientError:
            log.exception("closing the engine failed too")

    def _client_state(self) -> bytes:
        progress = Progress(global_steps=self.global_steps, micro_steps=self.micro_steps)
        return self._run_state.encode(progress, self.client_state)

    def _report(self) -> None:
        line = None
        if self._collectives.rank == 0 and self._steps_per_print and self.global_steps % self._steps_per_print == 0:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            shown = (self.global_steps, self.skipped_steps, rates, self._step.gradient_norm)

            def line(report: StepReport) -> None:
                log.info("step=%d skipped=%d lr=%s norm=%s %s", *shown, report)

        self._reporter.end_step(self.global_steps, line)

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._hooks.phase in (Phase.BACKWARD, Phase.STEP, Phase.FAILED):
            raise PhaseError(f"the engine was called where it cannot be: {self._hooks.phase.value}")


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError("the model's weights are in the store: call engine.full_state_dict() instead of state_dict()")
