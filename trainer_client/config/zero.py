"""The section `zero_optimization`: ZeRO's stage, and the offload of parameters and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt

from paramserver.contract.places import Place
from trainer_client.section import Agreement, Section
from trainer_client.standing import Refused, WithoutEffect, is_absent

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

_BY_UNIT = "parameters are gathered and gradients are reduced unit by unit: see paramserver.units"
_STORE_READS = "the store reads ahead in the order that it has recorded, as far as paramserver.host_budget allows"
_UNITS_STAY = "a unit stays gathered between two uses as stage3_max_live_parameters says"
_STORE_MEMORY = "the store's memory is one shared arena of paramserver.host_budget, without buffers per tensor"
_OPTIMIZER_IN_STORE = "the store's optimizer threads overlap reading, updating and writing by themselves"
_ONE_COPY = "each shard has one owner, so that every rank gathers from all ranks or from the store"
_STORE_CHECKPOINTS = "steps are committed in the store with their fp32 master weights"
_QUANTIZED = "weights and gradients go between ranks in their own dtype, because quantized ones change results"
_UNQUANTIZED = "remove it; to send less, set communication_data_type"


class OffloadSection(Section):
    """The offload of one kind of state, to host memory ("cpu") or NVMe."""

    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="`none`, `cpu` or `nvme`")
    # The ranks do not compare this path. They compare the state directory that is derived from it: see
    # `TrainingConfig.daemon_values`.
    nvme_path: Annotated[Place | None, Agreement.NONE] = Field(
        default=None,
        description="state directory of the job's own daemon, if the device is `nvme`; both sections have the same",
    )
    pin_memory: Annotated[bool, WithoutEffect(why=_STORE_MEMORY), Field(description="use page-locked host memory")] = (
        True
    )
    buffer_count: Annotated[
        int, WithoutEffect(why=_STORE_MEMORY), Field(description="number of buffers between host memory and NVMe")
    ] = 5
    buffer_size: Annotated[
        int, WithoutEffect(why=_STORE_MEMORY), Field(description="size of these buffers, in elements")
    ] = 100_000_000
    max_in_cpu: Annotated[
        int, WithoutEffect(why=_STORE_READS), Field(description="elements that host memory keeps of what is on NVMe")
    ] = 1_000_000_000


class OffloadParamSection(OffloadSection):
    """The offload of parameters."""


class OffloadOptimizerSection(OffloadSection):
    """The offload of optimizer states. The part `ratio` is offloaded, and the rest stays on the device."""

    ratio: Fraction = Field(default=1.0, description="the part that is offloaded; the rest stays on the device")
    buffer_count: Annotated[
        int, WithoutEffect(why=_STORE_MEMORY), Field(description="number of buffers between host memory and NVMe")
    ] = 4
    pipeline_read: Annotated[
        bool, WithoutEffect(why=_OPTIMIZER_IN_STORE), Field(description="read the next tile during an update")
    ] = False
    pipeline_write: Annotated[
        bool, WithoutEffect(why=_OPTIMIZER_IN_STORE), Field(description="write the last tile during an update")
    ] = False
    fast_init: Annotated[
        bool,
        WithoutEffect(why="the store initialises states by itself"),
        Field(description="initialise states on NVMe faster"),
    ] = False
    super_offload: Annotated[
        bool, WithoutEffect(why=_OPTIMIZER_IN_STORE), Field(description="offload as suits Grace Hopper machines")
    ] = False
    cpuadam_cores_perc: Annotated[
        float,
        WithoutEffect(why="the daemon's optimizer_threads say how many cores update"),
        Field(description="part of the cores that update, with super_offload"),
    ] = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether one of DeepSpeed's keys asks for reads or writes that run during an update."""
        return self.pipeline_read or self.pipeline_write


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list)]
"""Names, of which a single one may be written without the list."""


class LeafModuleSection(Section):
    """The modules that are gathered as a whole at stage 3."""

    classes: Names = Field(
        default=[],
        description="modules of these classes are gathered as a whole at stage 3: they are [units](models.md)",
    )
    names: Names = Field(default=[], description="modules with these names, as in `model.named_modules()`")
    name_suffixes: Names = Field(default=[], description="modules whose names end so")


class ZeroSection(Section):
    """DeepSpeed's ZeRO.

    Parameters and optimizer states without an offload section, or with the device "none", stay on the trainer's device.
    """

    stage: Literal[0, 1, 2, 3] = Field(default=0, description="0, 1, 2 or 3: [stages](engine.md)")
    offload_param: OffloadParamSection | None = Field(default=None, description="offload of parameters; stage 3")
    offload_optimizer: OffloadOptimizerSection | None = Field(
        default=None, description="offload of optimizer states; stages 1 to 3"
    )
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        default=None,
        description="elements that may stay gathered between two uses; null or 0: "
        "[only what takes no memory](models.md)",
    )
    overlap_comm: Annotated[
        bool | None,
        WithoutEffect(why="gradients are reduced during the backward pass, in the order in which they are ready"),
        Field(description="reduce gradients during the backward pass"),
    ] = None
    contiguous_gradients: Annotated[
        bool,
        WithoutEffect(why="the gradients of a unit always lie in one buffer"),
        Field(description="copy gradients into one buffer"),
    ] = True
    reduce_scatter: Annotated[
        bool,
        WithoutEffect(why="gradients are always reduced with reduce-scatter"),
        Field(description="reduce gradients with reduce-scatter instead of all-reduce"),
    ] = True
    reduce_bucket_size: Annotated[
        int, WithoutEffect(why=_BY_UNIT), Field(description="elements that are reduced at a time")
    ] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[
        bool, WithoutEffect(why=_BY_UNIT), Field(description="reduce buckets of several ranks together")
    ] = True
    allgather_partitions: Annotated[
        bool, WithoutEffect(why=_BY_UNIT), Field(description="gather with all-gather instead of broadcasts")
    ] = True
    allgather_bucket_size: Annotated[
        int, WithoutEffect(why=_BY_UNIT), Field(description="elements that are gathered at a time")
    ] = 500_000_000
    stage3_allgather_sequential: Annotated[
        bool, WithoutEffect(why=_BY_UNIT), Field(description="gather parameters one after another")
    ] = False
    stage3_use_all_reduce_for_fetch_params: Annotated[
        bool, WithoutEffect(why=_BY_UNIT), Field(description="gather with all-reduce")
    ] = False
    stage3_module_granularity_threshold: Annotated[
        int, WithoutEffect(why=_BY_UNIT), Field(description="gather modules with small parts as a whole")
    ] = 0
    leaf_module: LeafModuleSection = Field(default=LeafModuleSection(), description="leaf modules")
    round_robin_gradients: Annotated[
        bool, WithoutEffect(why=_BY_UNIT), Field(description="spread copies of gradients to the CPU over the ranks")
    ] = False
    sub_group_size: Annotated[
        int,
        WithoutEffect(why="the store updates tiles that fit the processor's cache"),
        Field(description="elements that the optimizer updates at a time"),
    ] = 1_000_000_000
    # transformers and TRL write 0.9 times the square of the hidden size, which need not be a whole number.
    stage3_prefetch_bucket_size: Annotated[
        float, WithoutEffect(why=_STORE_READS), Field(description="elements that are gathered ahead of use")
    ] = 50_000_000
    stage3_param_persistence_threshold: int = Field(
        default=100_000,
        ge=0,
        description="parameters of up to this many elements may be read outside of a forward, as in "
        "`model.scale.item()`; see [models](models.md#reading-small-parameters)",
    )
    stage3_model_persistence_threshold: int = Field(
        default=2**63 - 1, ge=0, description="most elements of all these parameters together"
    )
    stage3_max_reuse_distance: Annotated[
        int, WithoutEffect(why=_UNITS_STAY), Field(description="keep parameters that are used again this soon")
    ] = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        default=False,
        description="whether the Trainer of transformers and Accelerate write whole weights; `save_16bit_model()` "
        "always does",
    )
    load_from_fp32_weights: Annotated[
        bool, WithoutEffect(why=_STORE_CHECKPOINTS), Field(description="load master weights in fp32")
    ] = True
    elastic_checkpoint: Annotated[
        bool, WithoutEffect(why=_STORE_CHECKPOINTS), Field(description="checkpoints for other numbers of ranks")
    ] = False
    pipeline_loading_checkpoint: Annotated[
        bool, WithoutEffect(why=_STORE_CHECKPOINTS), Field(description="load checkpoints in a pipeline")
    ] = False
    ignore_unused_parameters: bool = Field(
        default=True,
        description="leave a parameter without a gradient as it is; false: at stage 2, `step()` raises an error that "
        "names the parameters that no rank has used",
    )
    find_unused_parameters: Annotated[
        bool,
        WithoutEffect(why="a parameter that got no gradient is left as it is"),
        Field(description="the same, in earlier versions"),
    ] = False
    cpu_offload_use_pin_memory: Annotated[
        bool, WithoutEffect(why=_STORE_MEMORY), Field(description="use page-locked host memory, in earlier versions")
    ] = False
    legacy_stage1: Annotated[
        bool, WithoutEffect(why="there is one implementation of stage 1"), Field(description="the old stage 1")
    ] = False
    grad_hooks: Annotated[
        bool,
        WithoutEffect(why="paramserver.gradient_reduction says when gradients are reduced"),
        Field(description="reduce gradients during the backward pass at stage 1"),
    ] = True
    zero_hpz_partition_size: Annotated[
        int, WithoutEffect(why=_ONE_COPY), Field(description="ranks that share a second copy of the parameters")
    ] = 1
    mics_shard_size: Annotated[
        int, WithoutEffect(why=_ONE_COPY), Field(description="ranks among which a copy of the model is divided")
    ] = -1
    mics_hierarchical_params_gather: Annotated[
        bool, WithoutEffect(why=_ONE_COPY), Field(description="gather within nodes first")
    ] = False
    memory_efficient_linear: Annotated[
        bool, WithoutEffect(why="torch's linear is always used"), Field(description="DeepSpeed's linear layer")
    ] = True
    override_module_apply: Annotated[
        bool,
        WithoutEffect(why="Module.apply() is torch's, also within zero.Init"),
        Field(description="gather parameters in Module.apply()"),
    ] = True
    log_trace_cache_warnings: Annotated[
        bool,
        WithoutEffect(why="step reports show when the recorded order was wrong"),
        Field(description="log when the recorded order of modules was wrong"),
    ] = False
    enable_sanity_checks: bool = Field(
        default=False,
        description="a change within `GatheredParameters` that no rank keeps is an error; false: a warning",
    )
    save_muon_momentum_buffer_in_memory: Annotated[
        bool, WithoutEffect(why="the store has no Muon"), Field(description="keep Muon's momentum in memory")
    ] = False
    zero_quantized_weights: Annotated[
        bool, Refused(why=_QUANTIZED, instead=_UNQUANTIZED), Field(description="gather quantized weights")
    ] = False
    zero_quantized_nontrainable_weights: Annotated[
        bool, Refused(why=_QUANTIZED, instead=_UNQUANTIZED), Field(description="keep frozen weights quantized")
    ] = False
    zero_quantized_gradients: Annotated[
        bool, Refused(why=_QUANTIZED, instead=_UNQUANTIZED), Field(description="reduce quantized gradients")
    ] = False
    zeropp_loco_param: Annotated[
        Mapping[str, Any] | None,
        Refused(why=_QUANTIZED, instead=_UNQUANTIZED, unless=is_absent),
        Field(description="correct errors of quantized gradients (LoCo)"),
    ] = None
    zenflow: Annotated[
        Mapping[str, Any] | None,
        Refused(
            why="ZenFlow updates with gradients of earlier steps, which changes results",
            instead="remove it; early updates overlap the backward pass without that",
            unless=is_absent,
        ),
        Field(description="update important gradients first, the others later"),
    ] = None


class AioSection(Section):
    """DeepSpeed's asynchronous I/O."""

    block_size: int = Field(default=1_048_576, description="bytes of a request")
    queue_depth: int = Field(default=8, description="requests under way")
    intra_op_parallelism: int = Field(default=1, description="threads of a request")
    thread_count: int = Field(default=1, description="threads, in earlier versions")
    single_submit: bool = Field(default=False, description="submit requests one by one")
    overlap_events: bool = Field(default=True, description="submit and complete at the same time")
    use_gds: bool = Field(default=False, description="GPUDirect Storage")


class ZeroKeys(Section):
    """The keys of the config about ZeRO."""

    zero_optimization: ZeroSection = Field(default=ZeroSection(), description="ZeRO")
    zero_allow_untested_optimizer: Annotated[
        bool,
        WithoutEffect(why="the store's optimizers work at every stage, and others are refused"),
        Field(description="use ZeRO with optimizers that DeepSpeed has not tested"),
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        bool,
        WithoutEffect(why="the store always runs its own kernels"),
        Field(description="refuse other optimizers than DeepSpeed's on the CPU"),
    ] = True
    allgather_size: Annotated[
        int, WithoutEffect(why=_BY_UNIT), Field(description="elements that are gathered at a time, in earlier versions")
    ] = 500_000_000
    aio: Annotated[
        AioSection,
        WithoutEffect(why="the daemon has its own I/O threads: io_read_threads and io_write_threads"),
        Field(description="requests of I/O to NVMe"),
    ] = AioSection()
