"""The training config: the part of DeepSpeed's config that this version honours, and the section `paramserver`.

Owns the names, types and defaults of the keys, and the messages for keys that are refused. A key is honoured with
DeepSpeed's meaning or refused by its full dotted name: no key is parsed and ignored. Must never read the environment on
its own: functions that depend on the environment take it as an argument.
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

# These keys are for a daemon that the job starts. A daemon that an operator runs has them in its own config.
_DAEMON_KEYS = ("state_dir", "host_budget", "nvme_budget")
# These keys are for a daemon that the job does not start.
_CREDENTIAL_KEYS = ("token_file", "tls", "insecure")

# The keys for which "auto" is a value. As the value of another key, "auto" is a placeholder that a tool has not
# replaced.
_AUTO_KEYS = ("paramserver.resume", "paramserver.gather", "paramserver.gradient_reduction")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# The config may write "nvme" instead of {"nvme": 1.0}.
HomeShares = Annotated[dict[Home, Fraction], BeforeValidator(lambda v: {v: 1.0} if isinstance(v, str) else v)]
DTypeName = Literal["fp32", "bf16", "fp16"]


class Bf16Section(Section):
    """Training with parameters in bf16."""

    enabled: bool = False


class Fp16Section(Section):
    """DeepSpeed's loss scaling. A `loss_scale` of 0 chooses dynamic scaling."""

    enabled: bool = False
    loss_scale: NonNegativeFloat = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    min_loss_scale: PositiveFloat = 1.0


class OffloadSection(Section):
    """The offload of one kind of state, to host memory ("cpu") or NVMe."""

    device: Literal["none", "cpu", "nvme"]
    # The ranks do not compare this path. They compare the state directory that is derived from it: see
    # `TrainingConfig.daemon_values`.
    nvme_path: Annotated[Path | None, Agreement.NONE] = None


class OffloadOptimizerSection(OffloadSection):
    """The offload of optimizer states. The part `ratio` is offloaded, and the rest stays on the device."""

    ratio: Fraction = 1.0


class ZeroSection(Section):
    """DeepSpeed's ZeRO.

    Parameters and optimizer states without an offload section, or with the device "none", stay on the trainer's device.
    """

    stage: Literal[0, 1, 2, 3] = 0
    offload_param: OffloadSection | None = None
    offload_optimizer: OffloadOptimizerSection | None = None
    stage3_max_live_parameters: PositiveInt | None = None


class PlacementSection(Section):
    """The home of each kind of state, or the fraction that each home has of it; see PlacementPolicy."""

    parameters: HomeShares | None = None
    gradients: HomeShares | None = None
    optimizer: HomeShares | None = None


class DataTypesSection(Section):
    """The types of accumulated data.

    `grad_accum_dtype` is the type of gradients between two micro-batches; null stands for the parameter's type.
    """

    grad_accum_dtype: DTypeName | None = None


class TlsSection(Section):
    """The PEM files for a daemon that has `tls_certificate`: either all three are given, or none."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class UnitsSection(Section):
    """The units, which are gathered and released as a whole; see unit_policy.py.

    Without either key, the units are the repeated blocks of the model.
    """

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
    """The loader that `initialize(training_data=...)` returns.

    The order of the samples follows from `seed` and the epoch; without `shuffle` it is the dataset's. `workers` is the
    number of processes that load ahead; with 0 the training loop itself loads.
    """

    seed: NonNegativeInt = 0
    shuffle: bool = True
    # Ranks may differ, because nodes have different processors and the order of the samples does not depend on workers.
    workers: Annotated[NonNegativeInt, Agreement.NONE] = 0


class TraceSection(Section):
    """A trace of `steps` steps of this run, beginning with step `first_step` of the run (counted from 1).

    The default leaves out the first two steps, because they differ from all others. `file` is the file of rank 0; the
    file names of the other ranks have the rank's number before the suffix.
    """

    file: Path
    first_step: PositiveInt = 3
    steps: PositiveInt = 2

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str | Path) else value


class ParamserverSection(Section):
    """The store and how the job uses it.

    Attributes:
        address: `unix:/path` or `host:port` of a daemon that an operator runs. Without it (and without
            $PARAMSERVER_ADDRESS) the job starts a daemon of its own.
        token_file, tls, insecure: only for a daemon that an operator runs; see Credentials.
        state_dir: the directory of the job's own daemon; by default `nvme_path`, else ./paramserver-state.
        host_budget, nvme_budget: the budgets of the job's own daemon on each node.
        peers: further stores that have parts of the job and no rank of this run. The run only reads them.
        reattach_timeout_seconds: how long a run waits for the next daemon after it has lost its daemon; with 0 the run
            fails at once. See transport/attachments.py.
        may_thaw: patterns for the FQNs of parameters that are frozen and in no parameter group, and may be trained
            later.
    """

    # Ranks may have different addresses, because each node has a daemon of its own, or several. The ranks only compare
    # whether there is an address: see `TrainingConfig.daemon_values`. Credentials belong to the address, and the
    # contents of their files must not leave the rank.
    address: Annotated[str | None, Agreement.NONE] = None
    token_file: Annotated[Path | None, Agreement.NONE] = None
    tls: Annotated[TlsSection, Agreement.NONE] = TlsSection()
    insecure: Annotated[bool, Agreement.NONE] = False
    job: Annotated[str, Field(min_length=1)] = "default"
    peers: tuple[str, ...] = ()
    # As with `nvme_path`, the ranks compare the directory that is derived from this path.
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
    # Each rank writes its trace on its own, so ranks may differ.
    trace: Annotated[TraceSection | None, Agreement.NONE] = None


class TrainingConfig(Section):
    """The whole config."""

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: NonNegativeFloat = 0.0
    # Ranks may differ, because only rank 0 prints.
    steps_per_print: Annotated[PositiveInt | None, Agreement.NONE] = 10
    bf16: Bf16Section = Bf16Section()
    fp16: Fp16Section = Fp16Section()
    data_types: DataTypesSection = DataTypesSection()
    communication_data_type: DTypeName | None = None
    optimizer: AnyOptimizerSection | None = Field(default=None, discriminator="type")
    zero_optimization: ZeroSection = ZeroSection()
    paramserver: ParamserverSection = ParamserverSection()

    def store_address(self, environ: Mapping[str, str]) -> str | None:
        """Return the address of a daemon that an operator runs, or None if the job has to start one."""
        return self.paramserver.address or environ.get(ADDRESS_VARIABLE) or None

    def daemon_values(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the values on which the ranks of a node must agree, as JSON by key.

        They must agree because one of these ranks starts a daemon that all of them use.
        """
        if self.store_address(environ) is not None:
            return {f"paramserver.address (or ${ADDRESS_VARIABLE})": json.dumps("given")}
        directory = {"paramserver.state_dir (or nvme_path)": json.dumps(str(self.state_dir().absolute()))}
        return dict(self.values(Agreement.NODE)) | directory

    def credentials(self, environ: Mapping[str, str]) -> Credentials:
        """Return the credentials for a daemon that an operator runs; a key of the config overrides the environment.

        Raises:
            ConfigError: only some of the three TLS files are given.
        """
        section, fallback = self.paramserver, Credentials.from_environment(environ)
        return Credentials(
            token_file=section.token_file or fallback.token_file,
            tls_ca=section.tls.ca or fallback.tls_ca,
            tls_certificate=section.tls.certificate or fallback.tls_certificate,
            tls_key=section.tls.key or fallback.tls_key,
            insecure=section.insecure,
        )

    def state_dir(self) -> Path:
        """Return the state directory of the job's own daemon."""
        nvme_path = next(iter(self.nvme_paths().values()), None)
        return self.paramserver.state_dir or nvme_path or Path(DEFAULT_STATE_DIR)

    def nvme_paths(self) -> dict[str, Path]:
        """Return the `nvme_path` keys of DeepSpeed that are given, with their paths."""
        zero = self.zero_optimization
        sections = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
        return {
            f"zero_optimization.{name}.nvme_path": section.nvme_path
            for name, section in sections.items()
            if section is not None and section.nvme_path is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """DeepSpeed's three batch sizes, for which `train = micro * accumulation * world size` holds."""

    train: int
    micro: int
    accumulation: int


def load_config(source: Mapping[str, Any] | str | Path, environ: Mapping[str, str]) -> TrainingConfig:
    """Read and check the config, and return it.

    Args:
        source: the config as a dict, or the path of a JSON file.
        environ: the environment of the process; only its PARAMSERVER_ variables are read.

    Raises:
        ConfigError: the message names each refused key in full, its value, and what to write instead.
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
    """Return DeepSpeed's three batch sizes.

    The micro or the train batch size alone, or any two of the three, determine the others.

    Raises:
        ConfigError: the given sizes contradict each other, or both the micro and the train batch size are missing.
    """
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
    """Return a sentence about a dotted key for one of pydantic's errors."""
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
    """Return pydantic's location as keys, without the optimizer's name, which is a value and not a key."""
    return [str(part) for index, part in enumerate(location) if not (index == 1 and part in OPTIMIZERS)]


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """Return the honoured keys of the section that holds the key at `location`."""
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
    """Check the keys that restrict each other. Raises ConfigError, naming the keys and the remedy."""
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
