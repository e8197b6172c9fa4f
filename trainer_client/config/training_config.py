"""The training config: the part of DeepSpeed's that this version honours, and the section `paramserver`.

Owns the names, types and defaults of the keys, and the messages for those that are refused. A key is honoured with
DeepSpeed's meaning or refused by its full dotted name: nothing is parsed and ignored. Must never read the environment
on its own: who needs it gets it as an argument.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic import ValidationError as PydanticError

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.durability import DURABILITY_PATTERN
from trainer_client.config.home import Home
from trainer_client.errors import ConfigError
from trainer_client.optimizers.registry import OPTIMIZERS, AnyOptimizerSection, why_refused
from trainer_client.section import Agreement, Section
from trainer_client.transport.credentials import Credentials

DEFAULT_STATE_DIR = "paramserver-state"

# Keys that belong to the daemon's own config as soon as it is not this job's child.
_DAEMON_KEYS = ("state_dir", "host_budget", "nvme_budget")
# And these are for a daemon that is not.
_CREDENTIAL_KEYS = ("token_file", "tls", "insecure")

# Where "auto" is a value of ours, not of a tool that fills configs in.
_AUTO_KEYS = ("paramserver.resume", "paramserver.gather", "paramserver.gradient_reduction")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# "nvme" is short for {"nvme": 1.0}.
HomeShares = Annotated[dict[Home, Fraction], BeforeValidator(lambda v: {v: 1.0} if isinstance(v, str) else v)]
DTypeName = Literal["fp32", "bf16", "fp16"]


class Bf16Section(Section):
    enabled: bool = False


class Fp16Section(Section):
    """DeepSpeed's loss scaling; `loss_scale` 0 means dynamic."""

    enabled: bool = False
    loss_scale: NonNegativeFloat = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    min_loss_scale: PositiveFloat = 1.0


class OffloadSection(Section):
    device: Literal["none", "cpu", "nvme"]
    # The state directory that follows from it is compared: see `TrainingConfig.daemon_values`.
    nvme_path: Annotated[Path | None, Agreement.NONE] = None


class OffloadOptimizerSection(OffloadSection):
    """`ratio` is the part of the optimizer's states that is offloaded; the rest stays on the device."""

    ratio: Fraction = 1.0


class ZeroSection(Section):
    """Without an offload section, or with device "none", its state stays on the device."""

    stage: Literal[0, 1, 2, 3] = 0
    offload_param: OffloadSection | None = None
    offload_optimizer: OffloadOptimizerSection | None = None
    stage3_max_live_parameters: PositiveInt | None = None


class PlacementSection(Section):
    """Where each kind of state lives: one home, or the fraction of each; see PlacementPolicy."""

    parameters: HomeShares | None = None
    gradients: HomeShares | None = None
    optimizer: HomeShares | None = None


class DataTypesSection(Section):
    """`grad_accum_dtype`: of gradients between micro-batches; null: of the parameter."""

    grad_accum_dtype: DTypeName | None = None


class TlsSection(Section):
    """PEM files for a daemon that has `tls_certificate`: all three, or none."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class UnitsSection(Section):
    """What is gathered and released together; see unit_policy.py. Neither key: the repeated blocks of the model."""

    classes: tuple[str, ...] = ()
    max_parameters: PositiveInt | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if value == "blocks":
            return {}
        if isinstance(value, Mapping):
            return value
        raise ValueError('write "blocks", {"classes": [names]} or {"max_parameters": elements}')


class DataSection(Section):
    """Of the loader that `initialize(training_data=...)` returns: the order of the samples follows from `seed` and the
    epoch; without `shuffle` it is the dataset's. `workers`: processes that load ahead; 0: the loop itself loads."""

    seed: NonNegativeInt = 0
    shuffle: bool = True
    # Nodes have different processors, and the order of the samples does not depend on it.
    workers: Annotated[NonNegativeInt, Agreement.NONE] = 0


class TraceSection(Section):
    """Of a trace of `steps` steps from the `first_step`-th of this run on (from 1); by default the first ones, which
    are like no others, are left out. `file` is rank 0's; the others' have their number before the suffix."""

    file: Path
    first_step: PositiveInt = 3
    steps: PositiveInt = 2

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


class ParamserverSection(Section):
    """Where the store is and how the job uses it.

    `address` is `unix:/path` or `host:port` of a daemon that an operator runs. Without it (and without
    $PARAMSERVER_ADDRESS) the job starts its own daemon under `state_dir` (default: `nvme_path`, else
    ./paramserver-state) with these budgets per node. Credentials are for the former only; see Credentials. `peers` are
    further stores that have parts of the job and no rank of this run: they are only read.
    `reattach_timeout_seconds` is how long a run outlives its daemon, 0: not at all; see transport/attachments.py.
    `may_thaw` has patterns of FQNs: of parameters that are frozen, and in no parameter group, and may be trained later.
    """

    # Each node has a daemon of its own, and may have several. Whether there is an address at all is compared: see
    # `TrainingConfig.daemon_values`. Credentials belong to the address, and what is in
    # their files must not leave the rank.
    address: Annotated[str | None, Agreement.NONE] = None
    token_file: Annotated[Path | None, Agreement.NONE] = None
    tls: Annotated[TlsSection, Agreement.NONE] = TlsSection()
    insecure: Annotated[bool, Agreement.NONE] = False
    job: Annotated[str, Field(min_length=1)] = "default"
    peers: tuple[str, ...] = ()
    # As `nvme_path`.
    state_dir: Annotated[Path | None, Agreement.NONE] = None
    host_budget: Annotated[ByteSize, Agreement.NODE] = ByteSize(1 << 30)
    nvme_budget: Annotated[ByteSize, Agreement.NODE] = ByteSize(64 << 30)
    resume: Literal["auto", "never", "must"] = "auto"
    units: UnitsSection = UnitsSection()
    gather: Literal["auto", "collective", "store"] = "auto"
    collective_timeout_seconds: PositiveFloat = 1800.0
    reattach_timeout_seconds: NonNegativeFloat = 300.0
    kept_gradients: ByteSize = ByteSize(1 << 30)
    data: DataSection = DataSection()
    durability: Annotated[str, Field(pattern=DURABILITY_PATTERN)] = "step"
    may_thaw: tuple[str, ...] = ()
    placement: PlacementSection = PlacementSection()
    gradient_reduction: Literal["auto", "micro_batch", "boundary"] = "auto"
    gradient_clipping_value: PositiveFloat | None = None
    max_consecutive_skipped_steps: PositiveInt | None = None
    early_updates: bool = True
    # A rank writes its trace on its own.
    trace: Annotated[TraceSection | None, Agreement.NONE] = None


class TrainingConfig(Section):
    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: NonNegativeFloat = 0.0
    # Rank 0 alone prints.
    steps_per_print: Annotated[PositiveInt | None, Agreement.NONE] = 10
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: DTypeName | None = None
    optimizer: AnyOptimizerSection | None = Field(default=None, discriminator="type")
    zero_optimization: ZeroSection = ZeroSection()
    paramserver: ParamserverSection = ParamserverSection()

    def store_address(self, environ: Mapping[str, str]) -> str | None:
        """The address of a daemon that is not ours to start; None: start one for the job."""
        return self.paramserver.address or environ.get(ADDRESS_VARIABLE) or None

    def daemon_values(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what the ranks of a node must agree on, because one of them starts a daemon that all of them use: the
        values as JSON, by key."""
        if self.store_address(environ) is not None:
            return {f"paramserver.address (or ${ADDRESS_VARIABLE})": json.dumps("given")}
        directory = {"paramserver.state_dir (or nvme_path)": json.dumps(str(self.state_dir().absolute()))}
        return dict(self.values(Agreement.NODE)) | directory

    def credentials(self, environ: Mapping[str, str]) -> Credentials:
        """What to show to that daemon; the config goes before the environment. Raises ConfigError for half of TLS."""
        section, fallback = self.paramserver, Credentials.from_environment(environ)
        return Credentials(
            token_file=section.token_file or fallback.token_file,
            tls_ca=section.tls.ca or fallback.tls_ca,
            tls_certificate=section.tls.certificate or fallback.tls_certificate,
            tls_key=section.tls.key or fallback.tls_key,
            insecure=section.insecure,
        )

    def state_dir(self) -> Path:
        """The state directory of the job's own daemon."""
        nvme_path = next(iter(self.nvme_paths().values()), None)
        return self.paramserver.state_dir or nvme_path or Path(DEFAULT_STATE_DIR)

    def nvme_paths(self) -> dict[str, Path]:
        """DeepSpeed's keys for the state directory, as far as they are given."""
        zero = self.zero_optimization
        sections = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
        return {
            f"zero_optimization.{name}.nvme_path": section.nvme_path
            for name, section in sections.items()
            if section is not None and section.nvme_path is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """`train = micro * accumulation * world size`."""

    train: int
    micro: int
    accumulation: int


def load_config(source: Mapping[str, Any] | str | Path, environ: Mapping[str, str]) -> TrainingConfig:
    """Validates a config.

    Args:
        source: the config as a dict, or the path of a JSON file.
        environ: the process environment (the variables of PARAMSERVER_ matter).

    Raises:
        ConfigError: names each refused key in full, its value, and what to write instead.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read_json(Path(source))
    problems = [f'{path} is "auto": write the value itself' for path in _auto_keys(raw) if path not in _AUTO_KEYS]
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        config = TrainingConfig.model_validate(raw)
    except PydanticError as error:
        raise ConfigError("\n".join(_explain(detail) for detail in error.errors())) from None
    _check_together(config, environ)
    return config


def resolve_batch_sizes(config: TrainingConfig, world_size: int) -> BatchSizes:
    """Completes DeepSpeed's triple: any one of micro and train batch size, or any two of the three, give the rest."""
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if micro is None and train is None:
        raise ConfigError("write train_batch_size or train_micro_batch_size_per_gpu: neither is there")
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if train != micro * accumulation * world_size or not micro or not accumulation:
        raise ConfigError(
            f"train_batch_size = {train} is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
            f"world size = {micro} * {accumulation} * {world_size}: change one of them, or leave one out"
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"config {path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds a {type(raw).__name__}: write a JSON object")
    return raw


def _auto_keys(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{path}.")
        elif value == "auto":
            yield path


def _explain(detail: Any) -> str:
    """One error of pydantic's as a sentence about a dotted key."""
    path = ".".join(_keys_of(detail["loc"]))
    value = detail["input"]
    if detail["type"].startswith("union_tag"):
        if detail["type"].endswith("not_found"):
            reason = f"is missing: write one of {', '.join(OPTIMIZERS)}"
        else:
            given = detail["ctx"]["tag"]
            reason = f"= {given!r} is refused: {why_refused(given)}"
        return f"{path}.type {reason}"
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(detail["loc"])
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        return f"{path} is not honoured by this version; {hint} (honoured here: {', '.join(known)})"
    if path == "zero_optimization.stage":
        return f"zero_optimization.stage is {value!r}: write 0, 1, 2 or 3"
    return f"{path} is missing" if detail["type"] == "missing" else f"{path} = {value!r} is refused: {detail['msg']}"


def _keys_of(location: tuple[int | str, ...]) -> list[str]:
    """pydantic's location without the optimizer's name, which is the value of a key."""
    return [str(part) for index, part in enumerate(location) if not (index == 1 and part in OPTIMIZERS)]


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """The honoured keys of the section that holds `location`."""
    section: type[BaseModel] = TrainingConfig
    for part in location[:-1]:
        if part in OPTIMIZERS:
            section = OPTIMIZERS[str(part)].section
            continue
        annotation = section.model_fields[str(part)].annotation
        candidates = (annotation, *get_args(annotation))
        section = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(section.model_fields)


def _check_together(config: TrainingConfig, environ: Mapping[str, str]) -> None:
    """What no single key can tell."""
    if config.bf16.enabled and config.fp16.enabled:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: choose one")
    if config.gradient_clipping and config.paramserver.gradient_clipping_value is not None:
        raise ConfigError(
            f"gradient_clipping = {config.gradient_clipping} (by norm) and paramserver.gradient_clipping_value = "
            f"{config.paramserver.gradient_clipping_value} (by value) are both given: choose one"
        )
    units = config.paramserver.units
    if units.classes and units.max_parameters:
        raise ConfigError("paramserver.units.classes and paramserver.units.max_parameters are both set: choose one")
    paths = config.nvme_paths()
    if len(set(paths.values())) > 1:
        listed = ", ".join(f"{key} = {str(path)!r}" for key, path in paths.items())
        raise ConfigError(f"the store has one directory, but {listed}: write the same path in both")
    address = config.store_address(environ)
    if address is None:
        if unused := [f"paramserver.{key}" for key in _CREDENTIAL_KEYS if key in config.paramserver.model_fields_set]:
            raise ConfigError(
                f"{', '.join(unused)}: the job starts a daemon of its own, which asks for none; set "
                "paramserver.address, or remove it"
            )
        return
    config.credentials(environ)
    origin = "paramserver.address" if config.paramserver.address else f"${ADDRESS_VARIABLE}"
    ours = [f"paramserver.{key}" for key in _DAEMON_KEYS if key in config.paramserver.model_fields_set]
    if refused := [*paths, *ours]:
        raise ConfigError(
            f"{', '.join(refused)}: the daemon at {address} ({origin}) has its own config for this; remove it here"
        )
