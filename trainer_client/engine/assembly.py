"""The assembly of an engine: from an opened job to an engine at its newest step.

This module owns the order in which the engine's parts are made, which is the order of their first calls to the store.
It must never leave an engine behind after an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from paramserver.contract.durability import REPLICATED
from paramserver.contract.otlp import DISABLED_VARIABLE, is_disabled
from paramserver.contract.replica_names import name_replica
from paramserver.contract.sizes import shown_size
from trainer_client.base.device import CPU
from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.config.training_config import TrainingConfig
from trainer_client.copying.follow import DaemonPlace, FollowerOrder
from trainer_client.engine.changes import StateChanges
from trainer_client.engine.engine import Engine
from trainer_client.engine.training_loop import EngineParts, TrainingLoop
from trainer_client.errors import ConfigError
from trainer_client.training.access import StateAccess
from trainer_client.training.model.plain_state import PlainState
from trainer_client.training.report.reporter import Reporter
from trainer_client.training.report.step_export import StepExport
from trainer_client.training.report.step_report import RankPlace
from trainer_client.training.report.step_trace import StepTrace
from trainer_client.training.run.backward_passes import BackwardPasses
from trainer_client.training.run.checkpoints import Checkpoints
from trainer_client.training.run.commits import Commits
from trainer_client.training.run.context import RankContext, Resources, UserObjects
from trainer_client.training.run.extra_states import ExtraStates
from trainer_client.training.run.job import Job
from trainer_client.training.run.made_with import MadeWith
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.run.replicas import FollowerProcess, Followers, choose_holders
from trainer_client.training.run.resume_notice import new_job_line, record_run, resume_line
from trainer_client.training.run.run_state import RunState
from trainer_client.training.run.settlement import Settlement
from trainer_client.training.run.state_offload import StateOffload
from trainer_client.training.step.activations import Activations
from trainer_client.training.step.early_updates import EarlyUpdates
from trainer_client.training.step.gradients import Gradients, ReductionSchedule
from trainer_client.training.step.hooks import UnitHooks
from trainer_client.training.step.in_place import InPlaceChanges
from trainer_client.training.step.precision import LossScaler, PrecisionPolicy
from trainer_client.training.step.recompute_choice import RecomputeChoice
from trainer_client.training.step.reduction_order import ReductionOrder
from trainer_client.training.step.residency import Residency
from trainer_client.training.step.small_reads import SmallReads
from trainer_client.training.step.trace import Clock
from trainer_client.training.step.training_step import Clipping, TrainingStep
from trainer_client.training.step.updates import Updates
from trainer_client.training.whole_parameters import WholeParameters

log = logging.getLogger(__name__)

# The ranks of a run together ask the store to fetch at most 1 / _PREFETCH_SHARE of its host tier ahead of use, so that
# most of the host tier stays free for other bytes.
_PREFETCH_SHARE = 4


def make_engine(user: UserObjects, rank: RankContext, job: Job, sizes: BatchSizes, resources: Resources) -> Engine:
    """Return an engine at the job's newest step, or at step 0 of a new job. All ranks must call this.

    Args:
        resources: the engine takes them over, and closes them when it is closed.
    """
    made_with = record_run(user, rank, job)
    loop = TrainingLoop(user, rank, _make_parts(user, rank, job, sizes, made_with, resources))
    changes = StateChanges(loop)
    engine = Engine(loop, changes, resources)
    try:
        if rank.collectives.rank == 0:
            log.info("placement, bytes of each rank: %s", loop.placement())
        if job.resumed_state is None:
            line = new_job_line(rank)
        else:
            loop.take_over(job.resumed_state)
            line = resume_line(user, rank, job, sizes, made_with, job.resumed_state)
        if rank.collectives.rank == 0:
            # The line about a new or resumed job is logged as a warning, because Python prints warnings even if the
            # user has configured no logging.
            log.warning("%s", line)
        if job.handed_over_step is not None:
            changes.commit_initial_state()
        loop.parts.in_place.note()
        rank.log_context.step = loop.global_steps + 1
        rank.store.settle(job.layout)
    except BaseException:
        engine.close_without_commit()
        raise
    return engine


def _make_parts(
    user: UserObjects, rank: RankContext, job: Job, sizes: BatchSizes, made_with: MadeWith, resources: Resources
) -> EngineParts:
    """Make the parts of an engine, and install the hooks on the model.

    The constructors of the trace and of the reporter call the store, in this order.
    """
    scaler = LossScaler.of(rank.settings)
    in_place = InPlaceChanges(job.states, rank.collectives)
    gradients, updates, step = _make_step(user, rank, job, scaler, in_place)
    traces = _make_traces(rank, resources.all)
    clock = Clock()
    residency = _make_residency(rank, job)
    # `close` of the lanes ends the copies to and from the device. The engine calls it before it ends the session,
    # because the copies read and write leased ranges, and the end of the session ends the leases.
    resources.all.callback(job.lanes.close)
    for unit in job.units:
        # The units unmap shared memory before the session ends, because memory that a unit still maps cannot be
        # freed.
        resources.all.callback(unit.unmap)
    micro_batches = MicroBatches(
        sizes,
        ReductionSchedule.of(rank.settings),
        user.data,
        is_managed=rank.settings.managed_gradient_accumulation,
    )
    commits = _make_commits(rank, job, resources)
    passes = BackwardPasses(step, scaler, micro_batches, commits)
    activations = _make_activations(rank, job, resources.all) if rank.settings.offloads_activations else None
    hooks = UnitHooks(
        units=job.units,
        gradients=gradients,
        updates=updates,
        residency=residency,
        lanes=job.lanes,
        reduction_order=ReductionOrder(sum(len(unit.uses) for unit in job.units), rank.collectives),
        compute_dtype=PrecisionPolicy.of(rank.settings).compute_dtype,
        clock=clock,
        recorder=rank.recorder,
        user_backward=passes,
        is_running_again=lambda: activations is not None and activations.is_running_again,
        small_reads=_make_small_reads(user, rank, job, commits),
    )
    hooks.install()
    if activations is not None:
        activations.watch(unit.module for unit in job.units if not unit.is_root and unit.tile is None)
    access = _make_access(user, rank, job, gradients, scaler)
    return EngineParts(
        tiling=job.tiling,
        states=job.states,
        in_place=in_place,
        gather=job.gather,
        micro_batches=micro_batches,
        hooks=hooks,
        step=step,
        scaler=scaler,
        access=access,
        whole_parameters=WholeParameters(job.units, access, rank.collectives),
        commits=commits,
        passes=passes,
        run_state=_make_run_state(user, rank, job, made_with, micro_batches, step, scaler, clock),
        checkpoints=Checkpoints(user, rank, job.states, leads_store=job.leads_store),
        offload=StateOffload(job.states, gradients),
        device_copies=job.device_copies,
        activations=activations,
        reporter=_make_reporter(user, rank, job, residency, traces),
    )


def _make_step(
    user: UserObjects, rank: RankContext, job: Job, scaler: LossScaler, in_place: InPlaceChanges
) -> tuple[Gradients, Updates, TrainingStep]:
    clipping = Clipping(norm=rank.settings.gradient_clipping, value=rank.settings.paramserver.gradient_clipping_value)
    early = EarlyUpdates(rank.store.gradients, are_final=rank.settings.paramserver.early_updates == "final")
    gradients = Gradients(
        job.units,
        job.states,
        early,
        rank.store,
        rank.collectives,
        job.lanes,
        exact_norms=clipping.norm > 0,
        mean=rank.settings.gradient_allreduce_op == "mean",
    )
    rank.store.gradients.expect(sum(state.given_gradient_bytes for state in job.states))
    updates = Updates(job.states, early, rank.store, rank.collectives)
    step = TrainingStep(
        gradients=gradients,
        updates=updates,
        optimizer=user.optimizer,
        scaler=scaler,
        clipping=clipping,
        early=early,
        changes=in_place,
        begins_early=bool(rank.settings.paramserver.early_updates),
        parameters=len(user.parameters),
        required=() if _may_be_unused(rank.settings) else user.parameters,
    )
    return gradients, updates, step


def _make_commits(rank: RankContext, job: Job, resources: Resources) -> Commits:
    settlement = Settlement(
        rank.store,
        rank.collectives,
        _keep_replicas(rank, job, resources),
        leads_store=job.leads_store,
        spans_nodes=job.sharers < rank.collectives.world_size,
    )
    resources.all.callback(settlement.close)
    return Commits(
        rank.store,
        job.states,
        job.buffers,
        job.lanes,
        rank.settings.paramserver.durability,
        newest=job.resumed_step,
        handed_over=job.handed_over_step,
        settlement=settlement,
    )


def _has_replicated_parts(rank: RankContext, job: Job) -> bool:
    """Return whether the job has replicas and its ranks use several daemons.

    In this case each daemon has only a part of the job, and each part has replicas of its own.
    """
    return bool(rank.settings.paramserver.replicas) and job.sharers < rank.collectives.world_size


def _keep_replicas(rank: RankContext, job: Job, resources: Resources) -> Followers:
    """Start the followers that copy this rank's part of the job to holders, if the config asks for replicas.

    Only one rank of each daemon, the one whose `job.leads_store` is True, starts followers.

    Raises:
        ConfigError: the config names too few other daemons; or the job's parts are on several stores, and the
            durability of the config does not have commits wait for the replicas.
    """
    section, store = rank.settings.paramserver, rank.store
    part = job.part if _has_replicated_parts(rank, job) else None
    if part is not None and section.durability != REPLICATED:
        raise ConfigError(
            f"paramserver.durability = {section.durability!r}: the ranks of this job use several daemons, and after a "
            "loss it can go on only from a step that all of these have, so commits have to wait for all replicas; set "
            f'it to "{REPLICATED}", or paramserver.replicas to 0'
        )
    followers = []
    if section.replicas and job.leads_store:
        addresses = section.replica.addresses
        holders = choose_holders(addresses, section.replicas, store.epoch, store.credentials, is_ring=part is not None)
        for holder in holders:
            order = FollowerOrder(
                job=section.job,
                origin=DaemonPlace.of(store.address, store.credentials),
                holder=DaemonPlace.of(holder, store.credentials),
                finish_seconds=section.replica.timeout_seconds,
                held_as=None if part is None else name_replica(section.job, part),
                bytes_a_second=section.replica.bandwidth,
            )
            followers.append(FollowerProcess(order.to_json(), holder))
            resources.apart.callback(followers[-1].stop)
    replicas = Followers(
        followers,
        are_waited_for=section.durability == REPLICATED,
        timeout_seconds=section.replica.timeout_seconds,
    )
    resources.all.callback(replicas.close)
    return replicas


def _may_be_unused(settings: TrainingConfig) -> bool:
    """Return whether a step may leave parameters without a gradient. As with DeepSpeed, the key counts at stage 2."""
    section = settings.zero_optimization
    return section.ignore_unused_parameters or section.stage != 2


def _make_traces(rank: RankContext, resources: ExitStack) -> Sequence[StepTrace | StepExport]:
    """Make the trace that goes to a file and the one that goes to an OTLP collector, if the config has them."""
    section, number = rank.settings.paramserver, rank.collectives.rank
    traces: list[StepTrace | StepExport] = []
    if section.trace is not None:
        traces.append(StepTrace(section.trace, rank.recorder, rank.store, number))
    if section.telemetry is not None and is_disabled():
        log.info("no spans go to %s, because $%s is true", section.telemetry.endpoint, DISABLED_VARIABLE)
    elif section.telemetry is not None:
        traces.append(StepExport(section.telemetry, rank.recorder, rank.store, job=section.job, rank=number))
    for trace in traces:
        resources.callback(trace.close)
    return traces


def _make_residency(rank: RankContext, job: Job) -> Residency:
    return Residency(
        job.units,
        rank.store.leases,
        prefetch_bytes=rank.store.arena_bytes // (_PREFETCH_SHARE * job.sharers),
        kept_elements=rank.settings.zero_optimization.stage3_max_live_parameters,
        is_alone=job.sharers == 1,
        recorder=rank.recorder,
        stopwatch=job.lanes.stopwatch,
    )


def _make_activations(rank: RankContext, job: Job, resources: ExitStack) -> Activations:
    section, checkpoints = rank.settings.paramserver.activations, rank.settings.activation_checkpointing
    if rank.collectives.rank == 0:
        log.info(
            "boundaries of activation checkpoints of at least %s go to the store between forward and backward; "
            "%s of them, and the newest, stay on the device",
            *map(shown_size, (section.smallest, section.kept)),
        )
    activations = Activations(
        rank.store,
        job.lanes,
        rank.recorder,
        rank.collectives.device,
        kept_bytes=section.kept,
        smallest_bytes=section.smallest,
        choice=RecomputeChoice(section.recompute, rank.collectives),
        synchronizes=checkpoints.synchronize_checkpoint_boundary,
        profiles=checkpoints.profile and rank.collectives.rank == 0,
    )
    resources.callback(activations.close)
    return activations


def _make_small_reads(user: UserObjects, rank: RankContext, job: Job, commits: Commits) -> SmallReads:
    """Return the object that says which small parameters the script may read outside of forwards.

    Parameters up to the thresholds of the config may be read if all ranks use one store. Otherwise no parameter may be
    read, because this rank cannot read the parts that are in the stores of other ranks.
    """
    zero = rank.settings.zero_optimization
    world_size = rank.collectives.world_size
    meets_after_steps = world_size == 1 or job.gather.is_one_sided

    def wait_for_step() -> bool:
        if not meets_after_steps:
            commits.wait()
        return meets_after_steps or not commits.is_behind

    return SmallReads(
        user.parameters if job.sharers == world_size else (),
        largest=zero.stage3_param_persistence_threshold,
        total=zero.stage3_model_persistence_threshold,
        leases=rank.store.leases,
        world_size=world_size,
        wait_for_step=wait_for_step,
    )


def _make_access(
    user: UserObjects, rank: RankContext, job: Job, gradients: Gradients, scaler: LossScaler
) -> StateAccess:
    return StateAccess(
        model=user.module,
        states=job.states,
        gradients=gradients,
        scaler=scaler,
        collectives=rank.collectives,
    )


def _make_run_state(
    user: UserObjects,
    rank: RankContext,
    job: Job,
    made_with: MadeWith,
    micro_batches: MicroBatches,
    step: TrainingStep,
    scaler: LossScaler,
    clock: Clock,
) -> RunState:
    return RunState(
        names=[parameter.fqn for parameter in user.parameters],
        step=step,
        scaler=scaler,
        optimizer=user.optimizer,
        lr_scheduler=user.lr_scheduler,
        clock=clock,
        micro_batches=micro_batches,
        data=user.data,
        device=rank.collectives.device,
        plain=PlainState(user.module, user.parameters, job.buffers.names),
        large_buffers=job.buffers,
        extra_states=ExtraStates(user.module, is_loud=rank.collectives.rank == 0),
        made_with=made_with if rank.collectives.rank == 0 else None,
        rolled_back=job.rolled_back,
    )


def _make_reporter(
    user: UserObjects, rank: RankContext, job: Job, residency: Residency, traces: Sequence[StepTrace | StepExport]
) -> Reporter:
    place = RankPlace(
        parameters=sum(parameter.shape.numel() for parameter in user.parameters),
        world_size=rank.collectives.world_size,
        sharers=job.sharers,
        data_plane=rank.store.plane.name,
        is_on_device=rank.collectives.device.type != CPU,
    )
    return Reporter(rank.recorder, residency.counters, rank.store, place, traces)
