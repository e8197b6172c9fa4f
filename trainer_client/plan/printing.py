"""A plan as JSON and as tables for a terminal. This module owns the words of the output.

It must never compute a figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from paramserver.contract.sizes import shown_size
from trainer_client.plan.machine import Capacities, Overhead, Rates
from trainer_client.plan.memory import DAEMON_BYTES, RANK_ALLOWANCE, RANK_BYTES
from trainer_client.plan.plan import Change, Plan
from trainer_client.plan.step_time import ASIDE_FACTOR, MAPPED_BYTES_PER_SECOND, STORE_SECONDS_PER_BYTE
from trainer_client.step.recall_depth import MOST_STAYING

GIB = float(1 << 30)
GB = 1e9


def assumptions(plan: Plan, overhead: Overhead, rates_from: str, compute_from: str) -> list[str]:
    """Return the assumptions behind the estimated figures, as sentences."""
    device = plan.memory.device
    lines = [
        f"The rates are {rates_from}; the time of forward and backward is {compute_from}.",
        "Activations are those of one micro-batch of the model as it is built here, in train mode, without "
        "fragmentation of the allocator.",
        f"A rank's buffers of libraries take {shown_size(RANK_ALLOWANCE)}; the process itself "
        f"{shown_size(RANK_BYTES[device])} of host memory, the daemon {shown_size(DAEMON_BYTES[device])} besides its "
        "budget.",
        f"The store takes {STORE_SECONDS_PER_BYTE * GB:.2f} CPU seconds for each GB that it reads or writes.",
        f"{plan.time.traffic.hit:.0%} of the parameters that pass through host memory are still there at their next "
        f"use, and {plan.time.traffic.states_hit:.0%} of the optimizer states on NVMe at their next update.",
        "The step neither evaluates, nor logs, nor waits for data.",
    ]
    if plan.settings.paramserver.gpu_budget and device != "cpu":
        lines.append(
            f"{plan.time.traffic.device_hit:.0%} of the bytes of parameters that a rank reads are copies on its device "
            "(paramserver.gpu_budget), which nothing has to move."
        )
    if replicas := plan.settings.paramserver.replicas:
        lines.append(
            f"The {replicas} replicas (paramserver.replicas) are left out: each holder needs the room that the store "
            "of a node has here once more, the store itself a third version on NVMe while a step is read, and a step's "
            "changes cross the network."
        )
    lines += _about_boundaries(plan)
    if in_memory := plan.time.traffic.updated_in_memory:
        aside = plan.time.traffic.updated_aside / in_memory
        lines.append(
            "Updates of states in host memory take the time of the threads of the store and, besides, that of host "
            f"memory, which more threads do not shorten; {aside:.0%} of them begin before the step is voted for "
            f"(paramserver.early_updates) and take {ASIDE_FACTOR:.1f} times as long."
        )
    if overhead.per_unit:
        lines.append(
            f"This library's code takes {overhead.per_unit * 1e3:.1f} ms for each unit besides forward and backward, "
            f"and {overhead.per_step * 1e3:.1f} ms a step, as in a small job that was run here; the daemon works for "
            f"{overhead.store_per_unit * 1e3:.1f} ms for each unit and {overhead.store_per_step * 1e3:.1f} ms a step "
            "beside it."
        )
    else:
        lines.append("This library's code takes no time besides forward and backward.")
    if device == "cpu":
        lines.append(
            "Ranks on the CPU copy, communicate and compute one after the other, and mapping costs "
            f"{1e9 / MAPPED_BYTES_PER_SECOND:.2f} s for each GB; without spare processors the store's work adds to it."
        )
    else:
        lines.append("Compute, transfers, NVMe and collectives overlap completely: the longest one is the step.")
    return lines


def _about_boundaries(plan: Plan) -> list[str]:
    """Return the assumptions about boundaries of activation checkpoints, if the config moves them to the store."""
    if not plan.settings.offloads_activations:
        return []
    smallest = int(plan.settings.paramserver.activations.smallest)
    saved, moved = plan.rehearsal.saved_boundary_bytes, sum(plan.rehearsal.boundaries)
    spilled, again = plan.memory.store.spilled_boundary_bytes, plan.rehearsal.again_boundary_bytes
    if not moved and not again:
        return [
            "No boundary of an activation checkpoint leaves the device: the model as it is built here saves "
            f"{shown_size(saved)} in boundaries of at least {shown_size(smallest)}, and the newest stays. A model "
            "with checkpoints can be given as MODULE:CALLABLE."
        ]
    return [
        f"A rank saves {shown_size(saved)} of boundaries of activation checkpoints in a forward. "
        + (
            f"It frees {shown_size(again)} of them, which the block before computes again in backward. "
            if again
            else ""
        )
        + "All others but the newest, and but paramserver.activations.kept, move to the store, "
        f"{shown_size(moved)}, and come back in the backward pass. The memory of the rank is counted as if the newest "
        f"{MOST_STAYING} stayed. Whether one or two stay is measured by the rank.",
        f"{shown_size(spilled)} of boundaries of all ranks find no room in the host budget, if the ranks move theirs "
        "at the same time. NVMe writes them once in each forward, the oldest first, and reads them once in its "
        "backward."
        if spilled
        else "Boundaries stay in host memory, where they find room in what the rest of a step leaves.",
        "The budgets of the store have room for all boundaries that move; others would stay on the device.",
    ]


def to_dict(
    plan: Plan,
    capacities: Capacities,
    rates: Rates,
    notes: list[str],
    change: Change | None,
    best: Plan | None,
) -> dict[str, Any]:
    """Return all figures of a plan as types that JSON has."""
    memory, ranks = plan.memory, plan.world.ranks
    return {
        "parameters": plan.layout.parameters,
        "world": {"ranks_per_node": ranks, "nodes": plan.world.nodes},
        "batch": asdict(plan.batch),
        "device": memory.device,
        "rank": {
            "lines": [asdict(line) for line in memory.rank],
            "bytes": memory.rank_bytes,
            "state_bytes": plan.layout.rank_bytes(),
        },
        "store": asdict(memory.store)
        | {
            "host_bytes": memory.store.host_bytes,
            "host_budget": memory.host_budget,
            "nvme_budget": memory.nvme_budget,
        },
        "node": {"host_bytes": memory.node_host_bytes(ranks), "nvme_bytes": memory.store.nvme_bytes},
        "capacities": asdict(capacities),
        "rates": asdict(rates),
        "fits": plan.fits,
        "shortages": [asdict(shortage) for shortage in plan.shortages],
        "change": None if change is None else {"what": change.what, "config": dict(change.plan.config)},
        "step": {
            "seconds": plan.time.seconds,
            "resources": dict(plan.time.resources),
            "binding": plan.time.binding,
            "roofline_fraction": plan.time.roofline_fraction,
            "tokens": plan.time.tokens,
            "hiding_tokens": plan.time.hiding_tokens,
            "traffic": asdict(plan.time.traffic),
            "store_cpu_seconds": plan.time.store_cpu_seconds,
            "store_threads": plan.time.store_threads,
            "flops": plan.rehearsal.flops,
        },
        "best": None if best is None else {"seconds": best.time.seconds, "config": dict(best.config)},
        "assumptions": notes,
    }


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Print a plan, which is the object that `to_dict` returns."""
    world, step = found["world"], found["step"]
    console.print(
        f"{found['parameters'] / 1e6:,.1f} M parameters; {world['ranks_per_node']} ranks on each of {world['nodes']} "
        f"nodes, {found['batch']['micro']} x {found['batch']['accumulation']} samples each"
    )
    console.print(_rank_table(found))
    console.print(_node_table(found))
    if found["fits"]:
        console.print("It fits.", style="bold")
    for shortage in found["shortages"]:
        key = f" ({shortage['key']})" if shortage["key"] else ""
        console.print(
            f"It does not fit: {shortage['what']}{key} is {shown_size(shortage['present'])}, needed are "
            f"{shown_size(shortage['needed'])}.",
            style="bold",
        )
    if not found["fits"]:
        change = found["change"]
        console.print("No change that was tried makes it fit." if change is None else f"It fits with: {change['what']}")
        if change is not None:
            _print_config(console, change["config"])
    console.print(_time_table(found))
    hiding = step["hiding_tokens"]
    if hiding is not None:
        console.print(
            f"NVMe, links and the store's work are hidden behind compute from {hiding:,} tokens a step on; this step "
            f"has {step['tokens']:,}."
        )
    if found["device"] != "cpu" and step["store_cpu_seconds"]:
        threads = step["store_threads"]
        console.print(
            f"The store of a node works for {step['store_cpu_seconds']:.2f} CPU seconds a step. "
            + (
                f"With optimizer_threads of {threads} or more its updates are not what binds the step."
                if threads
                else ""
            )
        )
    if found["best"] is not None:
        console.print(f"The best placement that was found takes {found['best']['seconds']:.3f} s a step:")
        _print_config(console, found["best"]["config"])
    console.print("Assumptions:")
    for note in found["assumptions"]:
        console.print(f"- {note}")


def _rank_table(found: Mapping[str, Any]) -> Table:
    where = "private memory" if found["device"] == "cpu" else "device memory"
    table = Table("one rank", "GiB", "figure", "because", title=f"A rank's {where} at the worst moment of a step")
    for line in found["rank"]["lines"]:
        table.add_row(line["what"], _gib(line["nbytes"]), "exact" if line["is_exact"] else "estimate", line["why"])
    table.add_row("all", _gib(found["rank"]["bytes"]), "", "", style="bold")
    return table


def _node_table(found: Mapping[str, Any]) -> Table:
    store = found["store"]
    table = Table("one node", "GiB", "because", title="The store of a node, exact but for other jobs")
    gradients = "of all ranks, until their updates"
    if store["spilled_gradient_bytes"]:
        gradients = "of all ranks; of those that go to NVMe, the largest that are in use at once"
    rows = (
        ("host: placed there", "home_bytes", "copies that are never evicted"),
        ("host: gradients", "gradient_bytes", gradients),
        ("host: boundaries", "boundary_host_bytes", "of activation checkpoints of all ranks, from forward to backward"),
        ("host: units in use", "units_bytes", f"the {store['units']} largest that are leased at once"),
        ("host: buffers", "buffer_bytes", "of the optimizer"),
        (
            "host budget, at least",
            "least_host_budget",
            "with it the daemon admits the job, and one boundary of each rank",
        ),
        ("host budget", "host_budget", "taken in full; what is left holds parameters that pass through"),
        ("nvme: one version", "version_bytes", "of all states"),
        ("nvme: gradients", "spilled_gradient_bytes", "of all ranks, placed there or without room in the host budget"),
        ("nvme: boundaries", "spilled_boundary_bytes", "those that find no room in host memory"),
        (
            "nvme: reserved",
            "nvme_bytes",
            "the committed and the pending version of what is written each step, gradients, boundaries",
        ),
        ("nvme budget", "nvme_budget", ""),
    )
    for what, key, why in rows:
        table.add_row(what, _gib(store[key]), why)
    host, disk = found["node"]["host_bytes"], found["capacities"]["nvme"]
    table.add_row("host memory, all", f"{_gib(host)} of {_gib(found['capacities']['host'])}", "ranks, store and daemon")
    table.add_row("nvme, all", f"{_gib(store['nvme_bytes'])} of {_gib(disk)}", "")
    return table


def _time_table(found: Mapping[str, Any]) -> Table:
    step = found["step"]
    table = Table("resource", "seconds", title=f"A step: {step['seconds']:.3f} s, bound by {step['binding']}")
    for name, seconds in sorted(step["resources"].items(), key=lambda item: -item[1]):
        if seconds:
            table.add_row(name, f"{seconds:.4f}")
    return table


def _print_config(console: Console, config: Mapping[str, Any]) -> None:
    console.print_json(json.dumps(config))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.3f}" if nbytes < 100 * GIB else f"{nbytes / GIB:,.0f}"
