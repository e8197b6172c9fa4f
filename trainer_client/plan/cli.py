"""The verb `paramserver plan`: its options, its measurements and its result."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import nn

from paramserver.contract.device_reads import FindHits
from paramserver.contract.printable import printable
from paramserver.contract.store_need import FindNeed
from trainer_client.config.config_file import read_config_file
from trainer_client.config.loading import load_config
from trainer_client.config.older_names import with_todays_names
from trainer_client.config.paramserver import configured_device_kind
from trainer_client.errors import ConfigError, TrainerClientError
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.known_rates import NO_RATES, GivenRates, published_rates, rates_here, size_of
from trainer_client.plan.layout import World
from trainer_client.plan.machine import Capacities, capacities_here
from trainer_client.plan.memory import RANK_BYTES
from trainer_client.plan.model import build, find_builder
from trainer_client.plan.model_inputs import make_batch
from trainer_client.plan.nodes import NODES, Node, find_node
from trainer_client.plan.plan import PlannedJob, best_placement, plan, smallest_change, with_budgets
from trainer_client.plan.printing import show, to_dict
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

# The config's keys about a daemon that an operator runs, which a plan leaves out. It keeps `insecure` if the config has
# a collector of traces, because the key applies to the collector, too.
_OPERATORS_KEYS = ("address", "token_file", "tls", "insecure")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_RATE = "bytes per second, as 5GB; without it, measured here"

# The types of the options, in the order of the arguments of `plan_job`.
_Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A config.json of Hugging Face, a directory with one, or MODULE:CALLABLE."),
]
_Config = Annotated[Path | None, typer.Option(help="The training config. [bf16, AdamW, stage 3, everything on nvme]")]
_Node = Annotated[
    str | None,
    typer.Option(help=f"A node as published, in place of this machine: {', '.join(NODES)}. Other options win."),
]
_Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks on each node. [the GPUs of --node, or 1]", metavar="N")]
_Nodes = Annotated[int, typer.Option(min=1, help="Nodes, each with a store.", metavar="N")]
_Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a sample. [2048, or as many as the model has positions]")
]
_Inputs = Annotated[
    str | None,
    typer.Option(
        help="MODULE:CALLABLE of (samples, tokens) that returns the arguments of forward. [input_ids, labels]"
    ),
]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda. [as paramserver.device says here]")]
_Hbm = Annotated[str | None, typer.Option(help="Memory of one rank's device. [this machine's]")]
_HostMemory = Annotated[str | None, typer.Option(help="Host memory of a node. [this machine's]")]
_NvmeCapacity = Annotated[str | None, typer.Option(help="NVMe of a node. [what is free around --dir]")]
_HostBudget = Annotated[
    str | None, typer.Option(help="Of the daemon, in place of the config's, as for one that an operator runs.")
]
_NvmeBudget = Annotated[str | None, typer.Option(help="Of the daemon, likewise.")]
_NvmeRate = Annotated[str | None, typer.Option(help=f"Of a node, {_RATE}.")]
_NvmeBoth = Annotated[
    str | None, typer.Option(help="Each way while it does both. [as if a device divided its time, if both are given]")
]
_DeviceLink = Annotated[str | None, typer.Option(help=f"Between host memory and a device, {_RATE}.")]
_Collective = Annotated[
    str | None, typer.Option(help=f"Of a buffer that all ranks gather, {_RATE}; several nodes need it.")
]
_Flops = Annotated[
    float | None, typer.Option(help="Floating-point operations per second of a rank. [the operations are timed]")
]
_OptimizerThreads = Annotated[
    int | None, typer.Option(min=1, help="The daemon's key. [as the daemon would choose]", metavar="N")
]
_Directory = Annotated[
    Path | None,
    typer.Option("--dir", help="Where the state would be; it is probed, and left as it was. [as the config says]"),
]
_Probe = Annotated[bool, typer.Option("--probe/--no-probe", help="Measure what is not given.")]
_Search = Annotated[bool, typer.Option("--search/--no-search", help="Look for the best placement.")]
_Json = Annotated[bool, typer.Option("--json", help="Print all figures as JSON for programs.")]


@app.command()
def plan_job(
    context: typer.Context,
    model: _Model,
    config: _Config = None,
    node: _Node = None,
    nproc_per_node: _Ranks = None,
    nnodes: _Nodes = 1,
    tokens: _Tokens = None,
    inputs: _Inputs = None,
    device: _Device = None,
    hbm: _Hbm = None,
    host_memory: _HostMemory = None,
    nvme_capacity: _NvmeCapacity = None,
    host_budget: _HostBudget = None,
    nvme_budget: _NvmeBudget = None,
    nvme_read: _NvmeRate = None,
    nvme_write: _NvmeRate = None,
    nvme_both: _NvmeBoth = None,
    device_link: _DeviceLink = None,
    collective: _Collective = None,
    flops: _Flops = None,
    optimizer_threads: _OptimizerThreads = None,
    directory: _Directory = None,
    with_probe: _Probe = True,
    search: _Search = True,
    as_json: _Json = False,
) -> None:
    """Say how many bytes a job takes on each tier and rank, whether it fits, and what bounds its step.

    Nothing is trained: the model is built without memory, laid out as `initialize` does it, and run once without
    values. A probe of some seconds times the operations of a step, updates, copies, collectives and the directory's
    NVMe. The step takes between the longest of its parts and their sum, beside what no rate has.

    Exit status: 0 if the job fits, 3 if it does not, 2 for wrong options or a config that would be refused.
    """
    sizes = {"device": hbm, "host": host_memory, "nvme": nvme_capacity}
    budgets = {"host_budget": host_budget, "nvme_budget": nvme_budget}
    rates = {"nvme_read": nvme_read, "nvme_write": nvme_write, "nvme_both": nvme_both}
    rates |= {"device_link": device_link, "collective": collective}
    try:
        published = None if node is None else find_node(node)
        raw = dict(DEFAULT_CONFIG) if config is None else read_config_file(config)
        found = _plan(
            context.obj,
            source=model,
            inputs=inputs,
            tokens=tokens,
            raw=with_todays_names(_for_own_daemon(raw, budgets)),
            world=World(ranks=nproc_per_node or (1 if published is None else published.gpus), nodes=nnodes),
            node=published,
            device=device,
            sizes=sizes,
            given=GivenRates.of(rates, flops, optimizer_threads, with_probe=with_probe),
            directory=directory,
            search=search,
        )
    except TrainerClientError as error:
        typer.echo(f"paramserver: {printable(str(error))}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(found))
    else:
        # Markup is off, because paths and names are printed, in which rich would take "[a]" for markup.
        show(Console(markup=False, emoji=False), found)
    raise typer.Exit(0 if found["fits"] else 3)


def main(arguments: list[str], find_need: FindNeed, find_hits: FindHits) -> None:
    """Run the verb with these arguments, and end the process with its exit status.

    Args:
        find_need: the daemon's function that computes the bytes that a job takes in a store.
        find_hits: the daemon's function that says which reads of a rank find their bytes in device copies.
    """
    app(arguments, prog_name="paramserver plan", obj=(find_need, find_hits))


def _plan(
    figures: tuple[FindNeed, FindHits],
    *,
    source: str,
    inputs: str | None,
    tokens: int | None,
    raw: Mapping[str, Any],
    world: World,
    node: Node | None,
    device: str | None,
    sizes: Mapping[str, str | None],
    given: GivenRates,
    directory: Path | None,
    search: bool,
) -> dict[str, Any]:
    """Plan the job that the options of the verb describe, and return the figures as `to_dict` makes them.

    It can raise ConfigError.
    """
    kind = _device_of(device, node, world, raw)
    builder = find_builder(source)
    shape = build(builder)
    sequence = tokens or _sequence(shape)
    batch = make_batch(shape, inputs)

    @functools.cache
    def rehearsed(
        samples: int, dtype: torch.dtype | None, offload: OffloadRule | None, autocast_dtype: torch.dtype | None
    ) -> Rehearsal:
        return rehearse(builder, lambda _: batch(samples, sequence), dtype, offload, autocast_dtype)

    if directory is None:
        directory = load_config(raw, {}, {parameter.dtype for parameter in shape.parameters()}).state_dir()
    here = capacities_here(directory, world.ranks) if node is None else node.capacities()
    find_need, find_hits = figures
    job = PlannedJob(
        # All plans of a call use the same model, because to plan the model's layout changes nothing but the dtype of
        # its buffers.
        build=lambda: shape,
        rehearse=rehearsed,
        world=world,
        capacities=_capacities(here, sizes, kind, world.ranks),
        rates=NO_RATES if node is None else published_rates(node, given),
        find_need=find_need,
        find_hits=find_hits,
        sequence=sequence,
        device=kind,
    )
    # The first plan is made before any rate is measured, because it checks the config and finds the operations of a
    # step, whose time is measured afterwards.
    wanted = plan(job, raw)
    if node is None:
        rates = rates_here(given, wanted.rehearsal, world, dtype=wanted.dtype, device=kind, directory=directory)
        job = replace(job, rates=rates)
        wanted = plan(job, raw)
    elif not {"host_budget", "nvme_budget"} & raw.get("paramserver", {}).keys():
        wanted = with_budgets(job, wanted)
    found = to_dict(
        job,
        wanted,
        change=None if wanted.fits else smallest_change(job, wanted),
        best=best_placement(job, raw) if search else None,
    )
    if node is None:
        found["assumptions"].append(f"Where it is not given, NVMe is that of the file system of {directory}.")
    return found


def _device_of(option: str | None, node: Node | None, world: World, raw: Mapping[str, Any]) -> str:
    """Return the kind of device that ranks compute on, "cpu" or "cuda"; `option` is the value of --device.

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


def _for_own_daemon(raw: dict[str, Any], budgets: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the config for a daemon of the job's own with the given budgets.

    For a budget of None, the config's value or the default is used.

    The address of an operator's daemon is left out, because a config with an address may not have budgets.
    """
    given = {name: budget for name, budget in budgets.items() if budget is not None}
    section = raw.get("paramserver", {})
    if not isinstance(section, Mapping):
        return raw
    left_out = set(_OPERATORS_KEYS) - ({"insecure"} if section.get("telemetry") is not None else set())
    kept = {key: value for key, value in section.items() if key not in left_out}
    return {**raw, "paramserver": {**kept, **given}}


_SIZE_OPTIONS = {"device": "--hbm", "host": "--host-memory", "nvme": "--nvme-capacity"}


def _capacities(here: Capacities, sizes: Mapping[str, str | None], device: str, ranks: int) -> Capacities:
    given = {name: size_of(_SIZE_OPTIONS[name], text) for name, text in sizes.items() if text is not None}
    if device != "cpu" and here.is_cpu and "device" not in given:
        raise ConfigError("this machine has no GPU: give --hbm, the memory of one")
    found = replace(here, **given, is_cpu=device == "cpu")
    return replace(found, device=found.host // ranks) if found.is_cpu else found


def _sequence(model: nn.Module) -> int:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(_DEFAULT_TOKENS, positions) if isinstance(positions, int) else _DEFAULT_TOKENS
