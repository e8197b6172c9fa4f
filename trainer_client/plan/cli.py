"""The verb `paramserver plan`: its options, its measurements and its result."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from torch import nn

from paramserver.contract.device_reads import FindHits
from paramserver.contract.optimizer_threads import MOST_BY_DEFAULT, by_default
from paramserver.contract.printable import printable
from paramserver.contract.sizes import Size
from paramserver.contract.store_need import FindNeed
from trainer_client.config.config_file import read_config_file
from trainer_client.config.loading import load_config
from trainer_client.config.older_names import with_todays_names
from trainer_client.config.paramserver import configured_device_kind
from trainer_client.errors import ConfigError, TrainerClientError
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.layout import World
from trainer_client.plan.machine import Capacities, Overhead, Rates, capacities_here, shared_rate
from trainer_client.plan.memory import RANK_BYTES
from trainer_client.plan.model import build, find_builder
from trainer_client.plan.model_inputs import make_batch
from trainer_client.plan.nodes import NODES, Node, find_node
from trainer_client.plan.overhead import probe_overhead, small_config
from trainer_client.plan.plan import Job, Plan, best_placement, plan, smallest_change, with_budgets
from trainer_client.plan.printing import assumptions, show, to_dict
from trainer_client.plan.probe import probe
from trainer_client.plan.real_pass import RealPass, can_be_real
from trainer_client.plan.rehearsal import Rehearsal, rehearse

DEFAULT_CONFIG: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "paramserver-state"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "paramserver-state"},
    },
}
_DEFAULT_TOKENS = 2048
_PUBLISHED = "those of the node as published, where they are not given, and of this daemon as measured on CPUs"
# Without a probe, the bytes that a rank is assumed to copy in a second, those that it copies into fresh memory, and the
# elements that it updates. They suit two server processors of 2020 and later.
_COPY, _FRESH_COPY, _UPDATE = 10e9, 2e9, 300e6

# Keys about a daemon that an operator runs. `insecure` is also for a collector of traces.
_OPERATORS_KEYS = ("address", "token_file", "tls", "insecure")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_RATE = "bytes per second, as 5GB; without it, measured here"


@app.command()
def plan_job(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A config.json of Hugging Face, a directory with one, or MODULE:CALLABLE."
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="The training config. [bf16, AdamW, stage 3, everything on nvme]")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help=f"A node as published, in place of this machine: {', '.join(NODES)}. Other options win."),
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node. [the GPUs of --node, or 1]", metavar="N")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes, each with a store.", metavar="N")] = 1,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample. [2048, or as many as the model has positions]")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            help="MODULE:CALLABLE of (samples, tokens) that returns the arguments of forward. [input_ids, labels]"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [as paramserver.device says here]")] = None,
    hbm: Annotated[str | None, typer.Option(help="Memory of one rank's device. [this machine's]")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Host memory of a node. [this machine's]")] = None,
    nvme_capacity: Annotated[str | None, typer.Option(help="NVMe of a node. [what is free around --dir]")] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Of the daemon, in place of the config's, as for one that an operator runs.")
    ] = None,
    nvme_budget: Annotated[str | None, typer.Option(help="Of the daemon, likewise.")] = None,
    nvme_read: Annotated[str | None, typer.Option(help=f"Of a node, {_RATE}.")] = None,
    nvme_write: Annotated[str | None, typer.Option(help=f"Of a node, {_RATE}.")] = None,
    nvme_both: Annotated[
        str | None,
        typer.Option(help="Each way while it does both. [as if a device divided its time, if both are given]"),
    ] = None,
    device_link: Annotated[str | None, typer.Option(help=f"Between host memory and a device, {_RATE}.")] = None,
    collective: Annotated[
        str | None, typer.Option(help=f"Of a buffer that all ranks gather, {_RATE}; several nodes need it.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="Floating-point operations per second of a rank. [the operations are timed]")
    ] = None,
    optimizer_threads: Annotated[
        int | None,
        typer.Option(min=1, help="The daemon's key. [as the daemon would choose]", metavar="N"),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where the state would be; it is probed, and left as it was. [as the config says]"),
    ] = None,
    with_probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Measure what is not given.")] = True,
    search: Annotated[bool, typer.Option("--search/--no-search", help="Look for the best placement.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON for programs.")] = False,
) -> None:
    """Say how many bytes a job takes on each tier and rank, whether it fits, and what bounds its step.

    Nothing is trained: the model is built without memory, laid out as `initialize` does it, and run once without
    values. A probe of some seconds times the operations of a step, copies, collectives and the directory's NVMe. On the
    CPU it also trains a small job, which shows the time of the library's own code.

    Exit status: 0 if the job fits, 3 if it does not, 2 for wrong options or a config that would be refused.
    """
    try:
        published = None if node is None else find_node(node)
        ranks = nproc_per_node or (1 if published is None else published.gpus)
        found = _plan(
            figures=context.obj,
            node=published,
            source=model,
            raw=_for_own_daemon(
                dict(DEFAULT_CONFIG) if config is None else read_config_file(config),
                {"host_budget": host_budget, "nvme_budget": nvme_budget},
            ),
            world=World(ranks=ranks, nodes=nnodes),
            tokens=tokens,
            inputs=inputs,
            device=device,
            sizes={"device": hbm, "host": host_memory, "nvme": nvme_capacity},
            rates={
                "nvme_read": nvme_read,
                "nvme_write": nvme_write,
                "nvme_both": nvme_both,
                "device_link": device_link,
                "collective": collective,
            },
            flops=flops,
            optimizer_threads=optimizer_threads,
            directory=directory,
            with_probe=with_probe,
            search=search,
        )
    except TrainerClientError as error:
        typer.echo(f"paramserver: {printable(str(error))}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found))
    else:
        # Paths and names are printed as they are, because rich would take "[a]" in them for markup.
        show(Console(markup=False, emoji=False), found)
    raise typer.Exit(0 if found["fits"] else 3)


def main(arguments: list[str], find_need: FindNeed, find_hits: FindHits) -> None:
    """Run the verb with these arguments, and end the process with its exit status.

    Args:
        find_need: computes the bytes that a job takes of a store.
        find_hits: says which reads of a rank find their bytes on its device.
    """
    app(arguments, prog_name="paramserver plan", obj=(find_need, find_hits))


def _plan(
    *,
    figures: tuple[FindNeed, FindHits],
    node: Node | None,
    source: str,
    raw: Mapping[str, Any],
    world: World,
    tokens: int | None,
    inputs: str | None,
    device: str | None,
    sizes: Mapping[str, str | None],
    rates: Mapping[str, str | None],
    flops: float | None,
    optimizer_threads: int | None,
    directory: Path | None,
    with_probe: bool,
    search: bool,
) -> dict[str, Any]:
    """Return the figures of a plan, as `to_dict` makes them, for these options. It can raise ConfigError."""
    device = _device_of(device, node, world, raw)
    if flops is not None and not (flops > 0 and math.isfinite(flops)):
        raise ConfigError(f"--flops {flops:g} is not a rate: write a number above 0, for example 4e14")
    raw = with_todays_names(raw)
    find_need, find_hits = figures
    builder = find_builder(source)
    shape = build(builder)
    sequence = tokens or _sequence(shape)
    batch = make_batch(shape, inputs)

    @functools.cache
    def rehearsed(
        samples: int, dtype: torch.dtype | None, offload: OffloadRule | None, autocast_dtype: torch.dtype | None
    ) -> Rehearsal:
        return rehearse(builder, lambda _: batch(samples, sequence), dtype, offload, autocast_dtype)

    given = {name: _size(f"--{name.replace('_', '-')}", text) for name, text in rates.items() if text is not None}
    if directory is None:
        directory = load_config(raw, {}, {parameter.dtype for parameter in shape.parameters()}).state_dir()
    here = capacities_here(directory, world.ranks) if node is None else node.capacities()
    job = Job(
        # Laying out a model does not change it, so all plans use the same model.
        build=lambda: shape,
        rehearse=rehearsed,
        compute_seconds=lambda rehearsal: 0.0,
        overhead=_NO_OVERHEAD,
        world=world,
        capacities=_capacities(here, sizes, device, world.ranks),
        rates=_UNKNOWN if node is None else _rates(node.rates(world), given),
        rates_in=None if node is None else lambda other: _rates(node.rates(other), given),
        devices=1 if node is None else node.devices,
        find_need=find_need,
        find_hits=find_hits,
        sequence=sequence,
        device=device,
        store_has_cores=device != "cpu",
        optimizer_threads=optimizer_threads or _optimizer_threads(node),
    )
    if node is not None:
        return _plan_as_published(job, raw, node.flops if flops is None else flops, search=search)
    return _plan_as_measured(job, raw, source, inputs, given, flops, directory, with_probe=with_probe, search=search)


def _device_of(option: str | None, node: Node | None, world: World, raw: Mapping[str, Any]) -> str:
    """Return the kind of device that ranks compute on, "cpu" or "cuda"; `option` is that of the command line.

    Raises:
        ConfigError: the node has no such device, or too few for the ranks, or the kind is not known.
    """
    device = option or ("cuda" if node is not None else configured_device_kind(raw))
    if node is not None and (device == "cpu" or world.ranks > node.gpus):
        raise ConfigError(
            f"--node has {node.gpus} GPUs, each with one rank: leave --device out, and give --nproc-per-node up to "
            f"{node.gpus} and --nnodes for more ranks"
        )
    if device not in RANK_BYTES:
        raise ConfigError(
            f"--device {device}: write {' or '.join(RANK_BYTES)}, because what a rank takes was estimated for these"
        )
    return device


def _plan_as_published(job: Job, raw: Mapping[str, Any], flops: float, *, search: bool) -> dict[str, Any]:
    """Return the figures of a plan for a node as published, without a measurement.

    Args:
        flops: the floating-point operations that a rank makes in a second.
    """
    job = replace(job, compute_seconds=lambda rehearsal: rehearsal.flops / flops)
    wanted = plan(job, raw)
    if not {"host_budget", "nvme_budget"} & raw.get("paramserver", {}).keys():
        wanted = with_budgets(job, wanted)
    return _result(job, wanted, (_PUBLISHED, f"that of {flops:.3g} FLOPs a second"), raw, search=search)


def _plan_as_measured(
    job: Job,
    raw: Mapping[str, Any],
    source: str,
    inputs: str | None,
    given: Mapping[str, int],
    flops: float | None,
    directory: Path,
    *,
    with_probe: bool,
    search: bool,
) -> dict[str, Any]:
    """Return the figures of a plan for this machine.

    Args:
        source, inputs: the model and the option `--inputs`, from which another process makes them anew.
        given: the rates that the options give; the others are measured.
        flops: the floating-point operations that a rank makes in a second; None: its computation is timed.
        directory: the directory that is probed.
    """
    # The first plan is made before anything is measured, because it checks the config and finds the operations of a
    # step.
    first = plan(job, raw)
    real_pass = RealPass(
        source=source,
        inputs=inputs,
        samples=first.batch.micro,
        tokens=job.sequence,
        dtype=first.dtype,
        autocast_dtype=first.autocast_dtype,
    )
    whole = sum(planned.group.whole_bytes for planned in first.layout.groups)
    is_real = job.device == "cpu" and can_be_real(first.rehearsal, whole, job.capacities.host, job.world.ranks)
    job, sources = _with_rates(
        job,
        first.rehearsal,
        given,
        flops,
        directory,
        real_pass if is_real else None,
        dtype=first.dtype,
        with_probe=with_probe,
    )
    if with_probe and job.device == "cpu":
        job = replace(job, overhead=_overhead_of(first, directory, beyond_operations=not is_real))
    found = _result(job, plan(job, raw), sources, raw, search=search)
    found["assumptions"].append(f"Where it is not given, NVMe is that of the file system of {directory}.")
    return found


def _result(
    job: Job, wanted: Plan, sources: tuple[str, str], raw: Mapping[str, Any], *, search: bool
) -> dict[str, Any]:
    """Return all figures of a plan, with the change that makes it fit and the best placement."""
    change = None if wanted.fits else smallest_change(job, wanted)
    best = best_placement(job, raw) if search else None
    return to_dict(wanted, job.capacities, job.rates, assumptions(wanted, job.overhead, *sources), change, best)


def _with_rates(
    job: Job,
    rehearsal: Rehearsal,
    given: Mapping[str, int],
    flops: float | None,
    directory: Path,
    real_pass: RealPass | None,
    *,
    dtype: torch.dtype | None,
    with_probe: bool,
) -> tuple[Job, tuple[str, str]]:
    """Return the job with the rates of its machine, and two phrases: the sources of the rates and of the compute time.

    Raises:
        ConfigError: a rate is not given, and the options forbid to measure it.
    """
    measured, seconds, rates_from = _UNKNOWN, 0.0, "given"
    if missing := _missing_rates(job, given, flops):
        _check_measurable(job, missing, with_probe=with_probe)
        measured, seconds = probe(
            {} if flops is not None else rehearsal.operations,
            real_pass=real_pass if flops is None else None,
            dtype=dtype,
            ranks=job.world.ranks,
            threads=_threads(job.world.ranks),
            directory=None if {"nvme_read", "nvme_write"} <= given.keys() else directory,
            device=job.device,
            optimizer_threads=job.optimizer_threads,
        )
        rates_from = "measured here, with all ranks of a node at once, where they are not given"

    def compute_seconds(other: Rehearsal) -> float:
        if flops is not None:
            return other.flops / flops
        # A micro-batch of another size or precision is assumed to run at the same floating-point operations per second.
        return seconds * (other.flops / rehearsal.flops if rehearsal.flops else 1.0)

    if flops is not None:
        compute_from = f"that of {flops:.3g} FLOPs a second"
    else:
        compute_from = (
            "that of a real pass here" if real_pass is not None else "the sum of its operations, each timed here"
        )
    rates = _rates(measured, given)
    if job.device == "cuda":
        # The probe has measured the CPU's rate of updates.
        rates = replace(rates, device_update=None)
    with_them = replace(job, rates=rates, compute_seconds=compute_seconds)
    return with_them, (rates_from, compute_from)


def _missing_rates(job: Job, given: Mapping[str, int], flops: float | None) -> list[str]:
    """Return the names of the rates that a plan needs and that are not given, as those of options."""
    needed = {"nvme_read", "nvme_write"}
    needed |= {"device_link"} if job.device == "cuda" else set()
    needed |= {"collective"} if job.world.size > 1 else set()
    return [*sorted(needed - given.keys()), *([] if flops is not None else ["flops"])]


def _check_measurable(job: Job, missing: Sequence[str], *, with_probe: bool) -> None:
    """Raise ConfigError if the missing rates of a job cannot be measured here."""
    if not with_probe or (job.device == "cuda" and not torch.accelerator.is_available()):
        why = "this machine has no GPU to measure" if with_probe else "--no-probe measures nothing"
        raise ConfigError(f"{why}: give {', '.join('--' + name.replace('_', '-') for name in missing)}, too")
    if job.world.nodes > 1 and "collective" in missing:
        raise ConfigError(
            f"--nnodes {job.world.nodes}: this machine cannot measure the network between nodes: give --collective, too"
        )


def _for_own_daemon(raw: dict[str, Any], budgets: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the config for a daemon with these budgets.

    For a budget of None, the config's value or the default is used.

    The address of an operator's daemon is left out, because a config with one has no budgets.
    """
    given = {name: budget for name, budget in budgets.items() if budget is not None}
    section = raw.get("paramserver", {})
    if not isinstance(section, Mapping):
        return raw
    left_out = set(_OPERATORS_KEYS) - ({"insecure"} if section.get("telemetry") is not None else set())
    kept = {key: value for key, value in section.items() if key not in left_out}
    return {**raw, "paramserver": {**kept, **given}}


_UNKNOWN = Rates(
    copy=_COPY,
    fresh_copy=_FRESH_COPY,
    device_link=_COPY,
    nvme_read=1.0,
    nvme_write=1.0,
    nvme_both=1.0,
    update=_UPDATE,
    device_update=_UPDATE,
    collective=None,
)


_NO_OVERHEAD = Overhead(per_unit=0.0, per_step=0.0)


def _optimizer_threads(node: Node | None) -> int:
    """Return the number of threads of a daemon whose configuration names none."""
    return MOST_BY_DEFAULT if node is not None else by_default(len(os.sched_getaffinity(0)))


def _threads(ranks: int) -> int:
    """Return the number of threads of each rank, as `paramserver launch` sets it."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _overhead_of(wanted: Plan, directory: Path, *, beyond_operations: bool) -> Overhead:
    """Measure the time of the library's own code in small steps of the same kind as a plan's."""
    placement = next((one.placement for one in wanted.layout.groups if one.group.trainable), None)
    if placement is None:
        return _NO_OVERHEAD
    config = small_config(
        stage=wanted.settings.zero_optimization.stage,
        homes=(placement.parameters.value, placement.optimizer.value),
        dtype=wanted.dtype,
        durability=wanted.settings.paramserver.durability,
    )
    ranks = wanted.world.ranks
    return probe_overhead(
        config,
        dtype=wanted.dtype,
        beyond_operations=beyond_operations,
        ranks=ranks,
        threads=_threads(ranks),
        directory=directory,
    )


def _rates(measured: Rates, given: Mapping[str, int]) -> Rates:
    values = {name: float(value) for name, value in given.items()}
    if "nvme_both" not in values and {"nvme_read", "nvme_write"} <= values.keys():
        values["nvme_both"] = shared_rate(values["nvme_read"], values["nvme_write"])
    return replace(measured, **values)


_SIZE_OPTIONS = {"device": "--hbm", "host": "--host-memory", "nvme": "--nvme-capacity"}


def _capacities(here: Capacities, sizes: Mapping[str, str | None], device: str, ranks: int) -> Capacities:
    given = {name: _size(_SIZE_OPTIONS[name], text) for name, text in sizes.items() if text is not None}
    if device != "cpu" and here.is_cpu and "device" not in given:
        raise ConfigError("this machine has no GPU: give --hbm, the memory of one")
    found = replace(here, **given, is_cpu=device == "cpu")
    return replace(found, device=found.host // ranks) if found.is_cpu else found


def _sequence(model: nn.Module) -> int:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(_DEFAULT_TOKENS, positions) if isinstance(positions, int) else _DEFAULT_TOKENS


def _size(option: str, text: str) -> int:
    with suppress(ValidationError, OverflowError):
        if (nbytes := int(TypeAdapter(Size).validate_python(text))) > 0:
            return nbytes
    raise ConfigError(f"{option} {text!r} is not a size above 0: write for example 80GiB, or 5GB for a second")
