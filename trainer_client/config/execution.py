"""The keys of the config about how DeepSpeed runs a model, and how it writes checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer_client.section import Section
from trainer_client.standing import Refused, WithoutEffect, is_absent

_USERS_CHOICE = "the model runs as it is: call torch.utils.checkpoint or torch.compile in it"
_IN_THE_ARENA = "boundaries that are moved lie in the store's host memory, which has their exact sizes"
_COMMITS = "a checkpoint is a step that the ranks commit together in the store"


class ActivationCheckpointingSection(Section):
    """The boundaries of activation checkpoints, whether DeepSpeed's functions make them or torch's."""

    partition_activations: Annotated[
        bool,
        WithoutEffect(why="no ranks share an activation, because there is no model parallelism"),
        Field(description="divide boundaries among model-parallel ranks"),
    ] = False
    cpu_checkpointing: bool = Field(
        default=False,
        description="move boundaries to the store's host memory, and to NVMe where that is full: "
        "[large models](large-models.md#activations)",
    )
    contiguous_memory_optimization: Annotated[
        bool, WithoutEffect(why=_IN_THE_ARENA), Field(description="copy boundaries into one buffer")
    ] = False
    number_checkpoints: Annotated[
        int | None, WithoutEffect(why=_IN_THE_ARENA), Field(description="boundaries that the buffer is for")
    ] = None
    synchronize_checkpoint_boundary: bool = Field(
        default=False, description="wait for the device at each boundary that is moved"
    )
    profile: bool = Field(default=False, description="log bytes and waits of the boundaries of each step")


class CompileSection(Section):
    """DeepCompile and, in earlier versions, the arguments of `torch.compile`."""

    enabled: bool | None = Field(default=None, description="in earlier versions, whether to compile")
    disable: bool = Field(default=False, description="in earlier versions, whether not to compile")
    backend: str = Field(default="inductor", description="in earlier versions, torch's backend")
    kwargs: Mapping[str, Any] = Field(default={}, description="in earlier versions, arguments of the backend")
    deepcompile: bool = Field(default=False, description="whether DeepCompile runs")
    free_activation: bool = Field(default=False, description="free activations early")
    free_activation_threshold: int = Field(default=10_485_760, description="of this size in bytes")
    offload_activation: bool = Field(default=False, description="move activations to host memory")
    offload_activation_pin_memory: bool = Field(default=True, description="which is page-locked")
    offload_opt_states: bool = Field(default=False, description="move optimizer states to host memory")
    offload_parameters: bool = Field(default=False, description="move parameters to host memory")
    double_buffer: bool = Field(default=True, description="use two buffers")
    symmetric_memory: bool = Field(default=False, description="use symmetric memory")
    debug_log: bool = Field(default=False, description="write the graphs")
    sync_before_reduce: bool = Field(default=False, description="wait for the device")
    sync_after_reduce: bool = Field(default=False, description="wait for the device")
    sync_before_allgather: bool = Field(default=False, description="wait for the device")
    sync_after_allgather: bool = Field(default=False, description="wait for the device")
    keep_int_input_tensors: bool = Field(default=True, description="keep integer inputs")
    keep_all_input_tensors: bool = Field(default=False, description="keep all inputs")
    passes: tuple[str, ...] | None = Field(default=None, description="passes of the compiler")


class CheckpointWriterSection(Section):
    """The writer of DeepSpeed's checkpoints."""

    type: str | None = Field(default=None, description="kind of writer")
    decoupled: bool = Field(default=False, description="write in another process")
    io_buffer_size: int = Field(default=67_108_864, description="bytes of its buffer")
    io_buffer_double: bool = Field(default=True, description="use two buffers")
    io_multiplier: int = Field(default=1, description="number of files")
    show_statistics: bool = Field(default=False, description="log the rates")
    data_parallel: str | None = Field(default=None, description="which ranks write")


class ParallelWriteSection(Section):
    """How pipeline stages write checkpoints."""

    pipeline_stage: bool = Field(default=False, description="write stages in parallel")


class CheckpointSection(Section):
    """DeepSpeed's checkpoints."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
        Field(description="of `save_checkpoint`: compare the tags of ranks: `Ignore`, `Warn`, `Fail`"),
    ] = "Warn"
    use_node_local_storage: Annotated[
        bool, WithoutEffect(why=_COMMITS), Field(description="write to disks of the nodes")
    ] = False
    parallel_write: Annotated[
        ParallelWriteSection, WithoutEffect(why=_COMMITS), Field(description="how pipeline stages write")
    ] = ParallelWriteSection()
    checkpoint_serialization: Annotated[
        bool, WithoutEffect(why=_COMMITS), Field(description="use torch's zip format")
    ] = True
    writer: Annotated[CheckpointWriterSection | None, WithoutEffect(why=_COMMITS), Field(description="the writer")] = (
        None
    )
    load_universal: bool = Field(
        default=False,
        description="without a tag, `load_checkpoint` reads `latest_universal` instead of `latest`",
    )


class NebulaSection(Section):
    """Azure's Nebula."""

    enabled: bool = Field(default=False, description="whether to save with Nebula")
    persistent_storage_path: str | None = Field(default=None, description="where to")
    persistent_time_interval: int = Field(default=100, description="seconds between two saves")
    num_of_version_in_retention: int = Field(default=2, description="versions that are kept")
    enable_nebula_load: bool = Field(default=True, description="whether to load with Nebula")
    nebula_load_path: str | None = Field(default=None, description="where from")


class ExecutionKeys(Section):
    """The keys of the config about running the model and writing checkpoints."""

    activation_checkpointing: ActivationCheckpointingSection = Field(
        default=ActivationCheckpointingSection(),
        description="what becomes of the boundaries of activation checkpoints; the model makes them",
    )
    compile: Annotated[CompileSection, WithoutEffect(why=_USERS_CHOICE), Field(description="DeepCompile")] = (
        CompileSection()
    )
    graph_harvesting: Annotated[
        bool, WithoutEffect(why="kernels are launched one by one"), Field(description="capture CUDA graphs")
    ] = False
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="DeepSpeed's checkpoints")
    nebula: Annotated[
        NebulaSection,
        Refused(why="checkpoints are steps in the store", instead="remove it, and see docs/resume.md"),
        Field(description="checkpoints by Azure's Nebula"),
    ] = NebulaSection()
    datastates_ckpt: Annotated[
        Mapping[str, Any] | bool | None,
        Refused(
            why="checkpoints are steps in the store",
            instead="remove it, and see docs/resume.md",
            unless=is_absent,
        ),
        Field(description="checkpoints by DataStates"),
    ] = None
