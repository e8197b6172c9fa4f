"""The engine: DeepSpeed's verbs over a model whose state lives in the store.

Owns the counters, the order of a step, and the client state that each commit carries. Must never communicate on its
own: collectives, leases and hooks each have their room below.
"""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client import client_state
from trainer_client.collectives import Collectives
from trainer_client.commits import Commits
from trainer_client.config import BatchSizes
from trainer_client.errors import TrainerClientError
from trainer_client.gather import Gather
from trainer_client.gradients import Gradients
from trainer_client.hooks import Phase, UnitHooks
from trainer_client.link.rank_store import GroupUpdate, RankStore
from trainer_client.optimizer import StoreOptimizer
from trainer_client.parameters import ModelParameter
from trainer_client.precision import LossScaler
from trainer_client.states import GroupStates
from trainer_client.trace import Clock

log = logging.getLogger(__name__)

# torch.nn.utils.clip_grad_norm_'s.
_CLIP_EPSILON = 1e-6


class Scheduler(Protocol):
    """What the engine needs of a learning-rate scheduler."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Engine:
    """Made by `trainer_client.initialize`; one training loop per engine, as with DeepSpeed:

        loss = engine(batch); engine.backward(loss); engine.step()

    Attributes:
        module: the model. Outside of its forward, its parameters have no values.
        optimizer, lr_scheduler: what drives the hyper-parameters; `engine.step()` steps both.
        global_steps: steps made or skipped, the newest step of the job.
        skipped_steps: steps skipped because the gradient was not finite.
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
        states: Sequence[GroupStates],
        gradients: Gradients,
        hooks: UnitHooks,
        gather: Gather,
        store: RankStore,
        commits: Commits,
        collectives: Collectives,
        scaler: LossScaler,
        clock: Clock,
        batch: BatchSizes,
        gradient_clipping: float,
        steps_per_print: int | None,
        local_rank: int,
        resources: ExitStack,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.resumed_step = 0
        self.client_state: dict[str, Any] = {}
        self.local_rank = local_rank
        self.device = collectives.device
        self._states = states
        self._gradients = gradients
        self._hooks = hooks
        self._gather = gather
        self._store = store
        self._commits = commits
        self._collectives = collectives
        self._scaler = scaler
        self._clock = clock
        self._batch = batch
        self._gradient_clipping = gradient_clipping
        self._steps_per_print = steps_per_print
        self._resources = resources
        self._update_counts = [0] * len(parameters)  # per parameter of the model
        self._trainable = [parameter.tensor.requires_grad for parameter in parameters]
        self._global_grad_norm: float | None = None
        self._backwards = 0  # since the last boundary
        self._closed = False
        # Names as a plain checkpoint has them, tied ones included; None for a buffer.
        index_of = {id(parameter.tensor): parameter.index for parameter in parameters}
        self._state_names = {name: index_of.get(id(t)) for name, t in module.state_dict(keep_vars=True).items()}
        module.register_state_dict_pre_hook(_refuse_state_dict)
        atexit.register(self.close)

    # DeepSpeed's verbs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point inputs are cast to the compute dtype."""
        self._require_open()
        return self.module(*args, **kwargs)

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
        self._hooks.begin_backward(self._commits.next)
        try:
            torch.autograd.backward(scaled, retain_graph=retain_graph)
        except BaseException:
            self._hooks.abort_backward()
            raise
        self._hooks.finish_backward()
        self._backwards += 1
        return loss

    def step(self) -> None:
        """Ends a micro-batch; at the accumulation boundary, makes and commits a step. A collective.

        Returns when the store has the gradients. The update and the commit go on in the store; their failure is raised
        by the next step, `wait_for_commit` or `close`. A step with a non-finite gradient is skipped on every rank.

        Raises:
            StoreError: the store failed; the last committed step is intact.
        """
        self._require_open()
        if self._backwards == 0:
            raise RuntimeError("step() without backward(): there is no gradient")
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        # Every rank waits here before it takes part in the norm: after the norm, the last step is settled everywhere.
        self.wait_for_commit()
        norm = self._gradients.norm()
        unscaled = norm.total / self._scaler.scale
        self._global_grad_norm = float(unscaled)
        finite = math.isfinite(self._global_grad_norm)
        if finite:
            with self.optimizer.stepping_with(lambda: self._hand_over(self._gradient_scale(unscaled), norm.present)):
                self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        else:
            self._gradients.discard()
            self.skipped_steps += 1
            log.warning("step %d is skipped: its gradient norm is %s", self.global_steps + 1, self._global_grad_norm)
        self._scaler.update(overflow=not finite)
        self.global_steps += 1
        self._backwards = 0
        # The scheduler has stepped: a resume starts with the learning rate that an uninterrupted run has.
        self._commits.begin(self._client_state())
        if self._gather.is_one_sided:
            self._collectives.barrier()
        self._hooks.finish_step()
        self._report()

    def train(self, mode: bool = True) -> Self:
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradient over all ranks, before clipping; None before the first step."""
        return self._global_grad_norm

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` makes a step."""
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

    def wait_for_commit(self) -> None:
        """Returns when the newest step is committed as the job's durability class says. Raises StoreError."""
        self._commits.wait()

    @torch.no_grad()
    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """The model's state by name, on the CPU: fp32 (master) weights, buffers as they are. A collective.

        Loads into the same model outside of the engine with `strict=True`.

        Args:
            rank0_only: other ranks take part, but get an empty dict.
        """
        self._require_open()
        weights: dict[int, torch.Tensor] = {}
        keep = not rank0_only or self._collectives.rank == 0
        for state in self._states:
            whole = self._gather_weights(state)
            if keep:
                pieces = zip(state.group.parameters, state.group.pieces(whole), strict=True)
                weights |= {parameter.index: piece.clone() for parameter, piece in pieces}
        if not keep:
            return {}
        return {
            name: weights[index] if index is not None else self.module.get_buffer(name).detach().cpu().clone()
            for name, index in self._state_names.items()
        }

    def load_client_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what a commit carried, as the last act of `initialize`."""
        counters = state["counters"]
        self.global_steps = self.resumed_step = counters["global_steps"]
        self.skipped_steps = counters["skipped_steps"]
        self.micro_steps = counters["micro_steps"]
        self._clock.now = counters["clock"]
        self._update_counts = list(state["update_counts"])
        self._scaler.load_state_dict(state["scaler"])
        if state["optimizer"] is not None:  # None: of another optimizer
            self.optimizer.load_settings(state["optimizer"])
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.client_state = state["user"]
        client_state.restore_random_states(state["random"], self.device)

    def commit_initial_state(self) -> None:
        """Commits what is staged: the initial weights as step 0, or the resumed step in another layout as the next."""
        self._commits.begin(self._client_state())
        self._commits.wait()

    def close(self) -> None:
        """Waits for the last commit, leaves the job, and stops the daemon that belongs to it. Idempotent.

        Every rank should close at about the same time: the job's own daemon ends when its rank does.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        with self._resources:
            self.wait_for_commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TrainerClientError:
            if error is None:
                raise
            log.exception("closing the engine failed too")

    # A step's parts

    def _gradient_scale(self, norm: torch.Tensor) -> float:
        """The factor that unscales and clips, in the fp32 arithmetic of `torch.nn.utils.clip_grad_norm_`."""
        scale = torch.ones((), dtype=torch.float32)
        if self._gradient_clipping > 0:
            scale = torch.clamp(self._gradient_clipping / (norm + _CLIP_EPSILON), max=1.0)
        return float(scale / self._scaler.scale)

    def _hand_over(self, scale: float, present: Sequence[bool]) -> None:
        """Gives the store the gradients, in forward order, with the hyper-parameters of each shard."""
        for index, is_present in enumerate(present):
            self._update_counts[index] += is_present
        table = _HyperParameterTable(self.optimizer.hyper_parameters, self._update_counts)
        updates = []
        for group, leased in self._gradients.hand_over():
            indices = [group.parameters[shard.slot].index for shard in group.shards]
            chosen = [table.row_of(index) if present[index] else -1 for index in indices]
            updates.append(
                GroupUpdate(group=group.name, gradient=leased, scale=scale, hyper_parameters_of_shard=chosen)
            )
        if updates:
            self._store.apply_gradients(self._commits.next, table.rows, updates)

    def _client_state(self) -> bytes:
        return client_state.encode(
            {
                "counters": {
                    "global_steps": self.global_steps,
                    "skipped_steps": self.skipped_steps,
                    "micro_steps": self.micro_steps,
                    "clock": self._clock.now,
                },
                "update_counts": self._update_counts,
                "scaler": self._scaler.state_dict(),
                "optimizer": self.optimizer.settings(),
                "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
                "random": client_state.random_states(self.device),
                "user": self.client_state,
            }
        )

    def _gather_weights(self, state: GroupStates) -> torch.Tensor:
        """The group's fp32 weights [layout.numel] on the CPU. A collective."""
        chunk = state.read(state.group.weight_kind)
        whole = torch.empty(state.group.layout.numel, dtype=chunk.dtype, device=self.device)
        self._collectives.all_gather_flat(whole, chunk)
        return whole.float().cpu()

    def _report(self) -> None:
        if self._collectives.rank == 0 and self._steps_per_print and self.global_steps % self._steps_per_print == 0:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            log.info(
                "step=%d skipped=%d lr=%s norm=%s", self.global_steps, self.skipped_steps, rates, self._global_grad_norm
            )

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._hooks.phase is Phase.BACKWARD:
            raise RuntimeError("the engine was called from within a backward pass")
        if self._hooks.phase is Phase.FAILED:
            raise RuntimeError("a backward pass has failed: restart the job, it resumes from the last commit")


class _HyperParameterTable:
    """The distinct hyper-parameters of a step; most parameters of a model share one row."""

    def __init__(
        self, lookup: Callable[[int, int], pb.ApplyGradientsRequest.HyperParameters], update_counts: Sequence[int]
    ) -> None:
        self.rows: list[pb.ApplyGradientsRequest.HyperParameters] = []
        self._lookup = lookup
        self._update_counts = update_counts
        self._known: dict[bytes, int] = {}

    def row_of(self, parameter: int) -> int:
        row = self._lookup(parameter, self._update_counts[parameter])
        number = self._known.setdefault(row.SerializeToString(deterministic=True), len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError("the model's weights are in the store: call engine.full_state_dict() instead of state_dict()")
