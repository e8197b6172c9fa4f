"""The section `paramserver`: the store, and how the job uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from paramserver.contract.address import check_collector, crosses_a_network_in_the_clear
from paramserver.contract.durability import DURABILITY_PATTERN, REPLICATED, durable_every_steps, parse_durability
from paramserver.contract.places import Place
from paramserver.contract.replica_names import replicated_job
from paramserver.contract.sizes import Size
from trainer_client.base.device import AUTO, check_setting, kind_of
from trainer_client.base.section import Agreement, Section
from trainer_client.config.checkpoints import CheckpointsSection
from trainer_client.config.home import Home
from trainer_client.config.tiling import TilingSection
from trainer_client.config.zero import Fraction

# The shares of a kind of tensor in each home. The config may write "nvme" instead of {"nvme": 1.0}.
HomeShares = Annotated[dict[Home, Fraction], BeforeValidator(lambda v: {v: 1.0} if isinstance(v, str) else v)]


class PlacementSection(Section):
    """The home of each kind of state, or the fraction that each home has of it; see PlacementPolicy."""

    parameters: HomeShares | None = Field(
        default=None,
        description='`device`, `host`, `nvme`, or the fraction of each: `{"host": 0.3, "nvme": 0.7}`; null: as the '
        "`offload` sections say",
    )
    gradients: HomeShares | None = Field(
        default=None,
        description="as `parameters`; those on `nvme` leave host memory as soon as they are complete; null: `device` "
        "where the optimizer's states are there, else `host`",
    )
    optimizer: HomeShares | None = Field(
        default=None, description="as `parameters`; null: as the `offload` sections say"
    )


class TlsSection(Section):
    """The PEM files for a daemon that has `tls_certificate`: either all three are given, or none."""

    ca: Path | None = Field(
        default=None,
        description="PEM authorities of its certificate; TCP is encrypted with this and the next two; null: "
        "`$PARAMSERVER_TLS_CA`",
    )
    certificate: Path | None = Field(
        default=None, description="PEM certificate of this client; null: `$PARAMSERVER_TLS_CERTIFICATE`"
    )
    key: Path | None = Field(default=None, description="PEM key of it; null: `$PARAMSERVER_TLS_KEY`")


class ActivationsSection(Section):
    """The boundaries of activation checkpoints in the store: [large models](large-models.md#activations)."""

    offload: bool | None = Field(
        default=None,
        description="whether boundaries leave the device between forward and backward; null: as "
        "`activation_checkpointing.cpu_checkpointing` says",
    )
    kept: Size = Field(
        default=ByteSize(0),
        description="bytes of boundaries that stay on the device nevertheless, those that backward needs first",
    )
    smallest: Size = Field(default=ByteSize(1 << 20), description="boundaries with fewer bytes stay on the device")
    recompute: bool | Literal["auto"] = Field(
        default="auto",
        description="whether each second boundary is computed again instead of being moved; `auto`: if steps are "
        "measured to take less time with it, or the store has no room for all",
    )


class UnitsSection(Section):
    """The units, which are gathered and released as a whole; see unit_policy.py.

    Without either key, the units are the repeated blocks of the model.
    """

    classes: tuple[str, ...] = Field(
        default=(),
        description='names of classes whose modules are units; `"units": "blocks"` means the repeated blocks: '
        "[models](models.md)",
    )
    max_parameters: PositiveInt | None = Field(
        default=None, description="elements of the largest modules that are units"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if value == "blocks":
            return {}
        if isinstance(value, Mapping):
            return value
        raise ValueError('write "blocks", {"classes": [names]} or {"max_parameters": elements}')


class DataSection(Section):
    """The loader that `initialize(training_data=...)` returns.

    The order of the samples follows from `seed` and the epoch; without `shuffle` it is the dataset's own order.
    `workers` is the number of processes that load samples ahead; with 0 the training loop itself loads them.
    """

    seed: NonNegativeInt = Field(default=0, description="of the order of `training_data`")
    shuffle: bool = Field(default=True, description="false: in the order of the dataset")
    # Ranks may have different numbers of data-loading workers, because nodes have different processors and the order of
    # the samples does not depend on the number of workers.
    workers: Annotated[NonNegativeInt, Agreement.NONE] = Field(default=0, description="processes that load ahead")


class TraceSection(Section):
    """A trace of `steps` steps of this run, beginning with step `first_step` of the run (counted from 1).

    The default leaves out the first two steps, because they differ from all others. `file` is the file of rank 0; the
    file names of the other ranks have the rank's number before the suffix.
    """

    file: Path = Field(
        description='`"trace": "step.json"` for short: a trace of some steps, for ui.perfetto.dev: '
        "[performance](performance.md)"
    )
    first_step: PositiveInt = Field(default=3, description="of this run, from 1")
    steps: PositiveInt = Field(default=2, description="how many")

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


class TelemetrySection(Section):
    """Traces of steps for an OpenTelemetry collector, to which this rank sends its spans.

    The daemon sends spans of its own to the collector that its key `otlp_endpoint` names. If the job starts the daemon,
    the daemon gets the address of this collector.
    """

    endpoint: Annotated[str, AfterValidator(check_collector)] = Field(
        description='`"telemetry": "http://HOST:4317"` for short: the collector that gets a trace of steps: '
        "[performance](performance.md#opentelemetry)"
    )
    every_steps: PositiveInt = Field(default=1, description="the first of so many steps is traced; 1: all")

    @model_validator(mode="before")
    @classmethod
    def _from_address(cls, value: Any) -> Any:
        return {"endpoint": value} if isinstance(value, str) else value


class InferenceSection(Section):
    """The engine for inference that `initialize` returns if it gets no optimizer: [inference](inference.md)."""

    step: NonNegativeInt | None = Field(
        default=None, description="the committed step whose weights are used; null: the newest one"
    )
    # Ranks may have different values of `host_bytes`, because nodes have different stores.
    host_bytes: Annotated[Size | None, Agreement.NONE] = Field(
        default=None,
        description="most bytes of the store's host memory that the weights in use may take; null: 13/16 of the budget "
        "of the job's own daemon, 3/4 of that of a running one",
    )


class ReplicaSection(Section):
    """The daemons that hold the job's replicas. Credentials are those for the job's own daemon."""

    addresses: tuple[str, ...] = Field(
        default=(),
        description="daemons on other nodes, preferred ones first; the job's own may be among them, and is left out. A "
        "start reads a newer step from them",
    )
    timeout_seconds: PositiveFloat = Field(
        default=300.0,
        description="how long a commit waits for the replicas with `durability` `replicated`, and the end of a run for "
        "those that are well",
    )
    bandwidth: Annotated[Size, Field(ge=1 << 20)] | None = Field(
        default=None,
        description="most bytes that a follower sends in a second, at least `1MiB`, so that replicas leave the network "
        "to training; each replica of each daemon has this limit of its own; null: no limit",
    )


class ParamserverSection(Section):
    """The section `paramserver` of the training config: this library's own keys, beside those of DeepSpeed."""

    # Ranks may have different device indexes in `device`. The ranks compare only the kinds of devices that they have
    # chosen, which must be the same.
    device: Annotated[str, AfterValidator(check_setting), Agreement.NONE] = Field(
        default=AUTO,
        description="`auto`, `cpu`, or a kind of accelerator without or with its index, as `cuda` or `cuda:1`: the "
        "device of each rank; see [Device](#device)",
    )
    # Ranks may have different daemon addresses, because each node has a daemon of its own, or several. The ranks
    # compare only whether there is an address: see `TrainingConfig.daemon_values`. Credentials are not compared,
    # because they belong to the address, and the contents of their files must not leave the rank.
    address: Annotated[str | None, Agreement.NONE] = Field(
        default=None,
        description="`unix:/path/paramserver.sock` or `host:port` of a running daemon; null: `$PARAMSERVER_ADDRESS`, "
        "else the job starts one",
    )
    token_file: Annotated[Path | None, Agreement.NONE] = Field(
        default=None,
        description="file of the token for that daemon, if it asks for one; null: `$PARAMSERVER_TOKEN_FILE`",
    )
    tls: Annotated[TlsSection, Agreement.NONE] = Field(default=TlsSection(), description="encryption of TCP")
    insecure: Annotated[bool, Agreement.NONE] = Field(
        default=False, description="let the token, and spans for a collector, cross a network in the clear"
    )
    job: Annotated[str, Field(min_length=1)] = Field(
        default="default",
        description="name of the job in the store; an engine without an optimizer has [a rule of its own]"
        "(inference.md#where-the-weights-come-from) where it is left out",
    )
    peers: tuple[str, ...] = Field(
        default=(),
        description="addresses of further stores that have parts of the job and no rank of this run; the run only "
        "reads them: [resume](resume.md)",
    )
    # `state_dir` is not compared between ranks, like `nvme_path`. The ranks compare the state directory that is derived
    # from both keys.
    state_dir: Annotated[Place | None, Agreement.NONE] = Field(
        default=None,
        description="directory of the job's own daemon, with a [path](daemon.md#configuration) of at most 489 bytes, "
        "which is made if its parent exists; the next two are of this daemon, too; null: `nvme_path`, else "
        "`paramserver-state`",
    )
    host_budget: Annotated[Size, Agreement.NODE] = Field(default=ByteSize(1 << 30), description='bytes, or `"512MiB"`')
    nvme_budget: Annotated[Size, Agreement.NODE] = Field(default=ByteSize(64 << 30), description='bytes, or `"1TiB"`')
    resume: Literal["auto", "never", "must", "anew"] = Field(
        default="auto",
        description="`never`: the job must be new; `must`: it must have a committed step; `anew`: begin in a new job "
        "beside it; where it is left out, programs that import `deepspeed` begin anew: "
        "[resume](resume.md#which-job-a-start-has)",
    )
    hyper_parameters: Literal["stored", "config"] = Field(
        default="stored",
        description="which learning rates, betas, weight decays and settings of a schedule count where a job goes on: "
        "the `stored` ones, or those of the `config` and the optimizer of this start, with the stored count of steps: "
        "[resume](resume.md#what-is-said-at-the-start)",
    )
    initial_weights: Literal["exact", "rounded"] = Field(
        default="exact",
        description="what the fp32 master weights of a new job begin with: the `exact` values of the model, or these "
        "`rounded` to the dtype of the forward, as DeepSpeed's do",
    )
    units: UnitsSection = Field(default=UnitsSection(), description="what is gathered as a whole")
    tiling: TilingSection = Field(default=TilingSection(), description="layers larger than the memory for them")
    activations: ActivationsSection = Field(
        default=ActivationsSection(), description="boundaries of activation checkpoints in the store"
    )
    gather: Literal["auto", "collective", "store"] = Field(
        default="auto",
        description="`collective`: all-gather between ranks; `store`: each rank reads all from its node's store",
    )
    pin_arena: Literal["auto"] | bool = Field(
        default="auto",
        description="register the memory that this rank shares with the store with its GPU, so that copies go on "
        "beside the host; `auto`: where that is possible, with one warning where it fails; true: a rank without a CUDA "
        "device is an error: [performance](performance.md#gpus)",
    )
    # Ranks may have different values of `gpu_budget`, because their devices may have different memory.
    gpu_budget: Annotated[Size, Agreement.NONE] = Field(
        default=ByteSize(0),
        description="memory of each rank's GPU in which the store keeps parameters that are needed again before an "
        "update changes them, frozen ones above all, so that they are not fetched and copied again; "
        "[on GPUs](gpus.md#the-gpu-tier)",
    )
    collective_timeout_seconds: PositiveFloat = Field(
        default=1800.0,
        description="after it, a rank that waits for others raises an error that says where each rank is",
    )
    reattach_timeout_seconds: NonNegativeFloat = Field(
        default=300.0,
        description="how long a run waits for the next daemon when its own is gone; 0: it ends: "
        "[resume](resume.md#the-daemon-is-restarted-under-a-run)",
    )
    kept_gradients: Size = Field(
        default=ByteSize(1 << 30),
        description="most bytes of gradients, and of first values, that a rank keeps until their commit is there, to "
        "hand them to the next daemon: [resume](resume.md#the-daemon-is-restarted-under-a-run)",
    )
    checkpoints: CheckpointsSection = Field(
        default=CheckpointsSection(),
        description="which checkpoints of `save_checkpoint` stay: [checkpoints](checkpoints.md#retention)",
    )
    data: DataSection = Field(default=DataSection(), description="the loader of `training_data`")
    durability: Annotated[str, Field(pattern=DURABILITY_PATTERN)] = Field(
        default="step", description="see [Durability](#durability)"
    )
    replicas: NonNegativeInt = Field(
        default=0, description="how many other daemons keep each committed step as well: [replicas](replicas.md)"
    )
    replica: ReplicaSection = Field(default=ReplicaSection(), description="where the replicas are")
    may_thaw: tuple[str, ...] = Field(
        default=(),
        description="patterns of names: frozen parameters, in no parameter group, that may be trained later",
    )
    placement: PlacementSection = Field(default=PlacementSection(), description="the home of each kind of state")
    gradient_reduction: Literal["auto", "micro_batch", "boundary"] = Field(
        default="auto",
        description="over the ranks: each `micro_batch`, or once at the `boundary` of a step; `auto`: the latter in "
        "stages 0 and 1",
    )
    gradient_clipping_value: PositiveFloat | None = Field(
        default=None, description="limit of each element of the gradient"
    )
    max_consecutive_skipped_steps: PositiveInt | None = Field(
        default=None, description="so many steps in a row with a gradient that is not finite are an error"
    )
    early_updates: bool | Literal["final"] = Field(
        default=True,
        description="the store begins to update a unit in the backward pass, as soon as its gradient is final; "
        '`"final"`: and frees gradients that do not fit into memory when they are used, because nothing changes '
        "between backward and step; see [engine](engine.md#early-updates)",
    )
    inference: InferenceSection = Field(default=InferenceSection(), description="an engine without an optimizer")
    # Ranks may have different `trace` sections, because each rank writes its own trace.
    trace: Annotated[TraceSection | None, Agreement.NONE] = Field(default=None, description="a trace of some steps")
    # Ranks may have different `telemetry` sections, because each rank sends its own spans, and nodes may have
    # collectors of their own.
    telemetry: Annotated[TelemetrySection | None, Agreement.NONE] = Field(
        default=None, description="traces of steps for an OpenTelemetry collector"
    )

    @property
    def durable_every(self) -> int:
        """The number of steps from one durable commit to the next; 0 if no commit is durable."""
        return durable_every_steps(parse_durability(self.durability))

    @field_validator("job")
    @classmethod
    def _check_job(cls, job: str) -> str:
        if (replicated := replicated_job(job)) is not None:
            raise ValueError(f"job {job!r} is the name of a replica of job {replicated!r}; choose another name")
        return job

    @model_validator(mode="after")
    def _check_replicas(self) -> ParamserverSection:
        if len(set(self.replica.addresses)) < self.replicas:
            raise ValueError(
                f"replicas {self.replicas} needs as many daemons on other nodes, and replica.addresses names "
                f"{len(set(self.replica.addresses))}: write their addresses there, HOST:PORT"
            )
        if self.durability == REPLICATED and not self.replicas:
            raise ValueError(
                'durability "replicated" waits for replicas, and there are none: set replicas to 1, and '
                'replica.addresses to daemons on other nodes; or write "step"'
            )
        return self

    @model_validator(mode="after")
    def _check_collector(self) -> ParamserverSection:
        if self.telemetry is not None and crosses_a_network_in_the_clear(self.telemetry.endpoint) and not self.insecure:
            raise ValueError(
                f"telemetry.endpoint {self.telemetry.endpoint} is on another machine, and names of jobs and tensors "
                "would cross a network in the clear: use https://, a collector on this machine, or set "
                "paramserver.insecure to true on a network that you trust"
            )
        return self


def configured_device_kind(raw: Mapping[str, Any]) -> str:
    """Return the kind of device that `paramserver.device` means on this machine, for a config that is not parsed yet.

    Raises:
        ConfigError: torch finds no device of this kind.
    """
    section = raw.get("paramserver")
    return kind_of(str(section.get("device", AUTO)) if isinstance(section, Mapping) else AUTO)
