"""The keys of the config about logs, trackers and profilers."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from trainer_client.section import Agreement, Section
from trainer_client.standing import WithoutEffect

_TRACKERS = "the library writes to no tracker: log engine.step_report() and the loss from your loop"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_PROFILERS = "steps_per_print and paramserver.trace show what a step costs"


def _never_if_infinite(value: Any) -> Any:
    """Return null for an infinite number of steps, which means that nothing is printed."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _require_level(value: str | None) -> str | None:
    if value is not None and value.lower() not in _LEVELS:
        raise ValueError(f"write one of {', '.join(_LEVELS)}")
    return value


class TensorBoardSection(Section):
    """DeepSpeed's monitor for TensorBoard."""

    enabled: bool = Field(default=False, description="whether to write events")
    output_path: str = Field(default="", description="where to")
    job_name: str = Field(default="DeepSpeedJobName", description="folder in output_path")


class WandbSection(Section):
    """DeepSpeed's monitor for Weights & Biases."""

    enabled: bool = Field(default=False, description="whether to send values")
    group: str | None = Field(default=None, description="group of the run")
    team: str | None = Field(default=None, description="team")
    project: str = Field(default="deepspeed", description="project")


class CometSection(Section):
    """DeepSpeed's monitor for Comet."""

    enabled: bool = Field(default=False, description="whether to send values")
    samples_log_interval: int = Field(default=100, description="samples between two values")
    project: str | None = Field(default=None, description="project")
    workspace: str | None = Field(default=None, description="workspace")
    api_key: str | None = Field(default=None, description="key of the API", repr=False)
    experiment_name: str | None = Field(default=None, description="name of the experiment")
    experiment_key: str | None = Field(default=None, description="key of the experiment")
    online: bool | None = Field(default=None, description="whether to send, or to write files")
    mode: str | None = Field(default=None, description="whether the experiment is new")


class CsvSection(Section):
    """DeepSpeed's monitor for CSV files."""

    enabled: bool = Field(default=False, description="whether to write values")
    output_path: str = Field(default="", description="where to")
    job_name: str = Field(default="DeepSpeedJobName", description="folder in output_path")


class FlopsProfilerSection(Section):
    """DeepSpeed's profiler of floating-point operations."""

    enabled: bool = Field(default=False, description="whether to profile")
    recompute_fwd_factor: float = Field(default=0.0, description="operations that are computed again, as a factor")
    profile_step: int = Field(default=1, description="step that is profiled")
    module_depth: int = Field(default=-1, description="depth of the modules shown")
    top_modules: int = Field(default=1, description="modules shown")
    detailed: bool = Field(default=True, description="whether to show each module")
    output_file: str | None = Field(default=None, description="where to write")


class CommsLoggerSection(Section):
    """DeepSpeed's log of collectives."""

    enabled: bool = Field(default=False, description="whether to log")
    verbose: bool = Field(default=False, description="whether to log each collective")
    prof_all: bool = Field(default=True, description="whether to log all kinds")
    prof_ops: tuple[str, ...] = Field(default=(), description="kinds to log")
    debug: bool = Field(default=False, description="whether to log who calls")


class ThroughputTimerSection(Section):
    """DeepSpeed's timer of samples per second."""

    enabled: bool = Field(default=True, description="whether to measure")
    synchronized: bool = Field(default=True, description="whether to wait for the device")


class TimersSection(Section):
    """DeepSpeed's timers."""

    throughput: ThroughputTimerSection = Field(
        default=ThroughputTimerSection(), description="the timer of samples per second"
    )


class MonitoringKeys(Section):
    """The keys of the config that say what is logged and measured."""

    # The value may differ between ranks, because only rank 0 prints.
    steps_per_print: Annotated[PositiveInt | None, Agreement.NONE, BeforeValidator(_never_if_infinite)] = Field(
        default=10,
        description="steps between log lines, which say what the [step cost](performance.md); null or infinite: none",
    )
    wall_clock_breakdown: Annotated[
        bool, WithoutEffect(why=_PROFILERS), Field(description="log the times of forward, backward and step")
    ] = False
    memory_breakdown: Annotated[bool, WithoutEffect(why=_PROFILERS), Field(description="log the memory in use")] = False
    dump_state: Annotated[
        bool, WithoutEffect(why=_PROFILERS), Field(description="print the engine's state at the start")
    ] = False
    timers: Annotated[
        TimersSection, WithoutEffect(why=_PROFILERS), Field(description="the timer of samples per second")
    ] = TimersSection()
    flops_profiler: Annotated[
        FlopsProfilerSection, WithoutEffect(why=_PROFILERS), Field(description="the profiler of operations")
    ] = FlopsProfilerSection()
    comms_logger: Annotated[
        CommsLoggerSection, WithoutEffect(why=_PROFILERS), Field(description="the log of collectives")
    ] = CommsLoggerSection()
    log_level: Annotated[str | None, Agreement.NONE, AfterValidator(_require_level)] = Field(
        default=None,
        description="level of the loggers `trainer_client` and `DeepSpeed`: debug, info, warning, error or critical; "
        "null: as the program has set it",
    )
    vocabulary_size: Annotated[
        int | None,
        WithoutEffect(why="DeepSpeed only warns about some sizes"),
        Field(description="size of the vocabulary"),
    ] = None
    tensorboard: Annotated[
        TensorBoardSection, WithoutEffect(why=_TRACKERS), Field(description="monitor for TensorBoard")
    ] = TensorBoardSection()
    wandb: Annotated[WandbSection, WithoutEffect(why=_TRACKERS), Field(description="monitor for Weights & Biases")] = (
        WandbSection()
    )
    comet: Annotated[CometSection, WithoutEffect(why=_TRACKERS), Field(description="monitor for Comet")] = (
        CometSection()
    )
    csv_monitor: Annotated[CsvSection, WithoutEffect(why=_TRACKERS), Field(description="monitor for CSV files")] = (
        CsvSection()
    )
