"""A plan as JSON and as tables for a terminal. This module has the words of the output.

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
from trainer_client.plan.memory import DAEMON_BYTES, RANK_ALLOWANCE, RANK_BYTES
from trainer_client.plan.plan import Plan, PlannedJob, Suggestion
from trainer_client.plan.step_time import DEVICE_UPDATE
from trainer_client.training.step.recall_depth import MOST_STAYING

GIB = float(1 << 30)


def _assumptions(job: PlannedJob, plan: Plan) -> list[str]:
    """Return the assumptions behind the estimated figures, as sentences."""
    device = job.device
    lines = [
        f"The rates are {job.rates.rates_from}; the time of forward and backward is {job.rates.compute_from}.",
        "Activations are those of one micro-batch of the model as it is built here, in train mode, without "
        "fragmentation of the allocator.",
        f"A rank's buffers of libraries take {shown_size(RANK_ALLOWANCE)}; the process itself "
        f"{shown_size(RANK_BYTES[device])} of host memory, the daemon {shown_size(DAEMON_BYTES[device])} besides its "
        "budget.",
        f"{plan.time.traffic.hit:.0%} of the parameters that pass through host memory are still there at their next "
        f"use, and {plan.time.traffic.states_hit:.0%} of the optimizer states on NVMe at their next update.",
        "No bound of the step has the time of this library's Python, of waits, latencies and checksums, of threads "
        "that share processors, or of what a script does beside forward, backward and step.",
    ]
    if device != "cpu" and plan.time.traffic.updated_on_device and not plan.time.resources[DEVICE_UPDATE]:
        lines.append("The rate at which a GPU updates states is not known, so the bounds leave these updates out.")
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
    return lines + _about_boundaries(plan)


def _about_boundaries(plan: Plan) -> list[str]:
    """Return the assumptions about boundaries of activation checkpoints; [] if all boundaries stay on the device."""
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


def to_dict(job: PlannedJob, plan: Plan, change: Suggestion | None, best: Plan | None) -> dict[str, Any]:
    """Return all figures of a plan as a dict that can be written as JSON."""
    memory, ranks = plan.memory, plan.world.ranks
    return {
        "parameters": plan.layout.parameters,
        "world": {"ranks_per_node": ranks, "nodes": plan.world.nodes},
        "batch": asdict(plan.batch),
        "device": job.device,
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
        "capacities": asdict(job.capacities),
        "rates": asdict(job.rates.of(plan.world)),
        "fits": plan.fits,
        "shortages": [asdict(shortage) for shortage in plan.shortages],
        "change": None if change is None else {"what": change.what, "config": dict(change.plan.config)},
        "step": {
            **_bounds(plan),
            "resources": dict(plan.time.resources),
            "binding": plan.time.binding,
            "tokens": plan.time.tokens,
            "hiding_tokens": plan.time.hiding_tokens,
            "traffic": asdict(plan.time.traffic),
            "flops": plan.rehearsal.flops,
        },
        "best": None if best is None else {**_bounds(best), "config": dict(best.config)},
        "assumptions": _assumptions(job, plan),
    }


def _bounds(plan: Plan) -> dict[str, float]:
    return {"overlapped_seconds": plan.time.overlapped_seconds, "serial_seconds": plan.time.serial_seconds}


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Print a plan, given as the dict that `to_dict` returns."""
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
    console.print(f"A step takes {_bounds_in_words(step)}; {step['binding']} takes longest.", style="bold")
    console.print(_time_table(step))
    hiding = step["hiding_tokens"]
    if hiding is not None:
        console.print(
            f"NVMe, links and the store's updates are hidden behind compute from {hiding:,} tokens a step on; this "
            f"step has {step['tokens']:,}."
        )
    if found["best"] is not None:
        console.print(f"A step of the best placement that was found takes {_bounds_in_words(found['best'])}:")
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


def _time_table(step: Mapping[str, Any]) -> Table:
    table = Table("resource", "seconds", title="The least seconds of a step")
    for name, seconds in sorted(step["resources"].items(), key=lambda item: -item[1]):
        if seconds:
            table.add_row(name, f"{seconds:.4f}")
    return table


def _bounds_in_words(found: Mapping[str, Any]) -> str:
    return (
        f"{found['overlapped_seconds']:.3f} s if everything overlaps, {found['serial_seconds']:.3f} s if nothing does"
    )


def _print_config(console: Console, config: Mapping[str, Any]) -> None:
    console.print_json(json.dumps(config))


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:,.3f}" if nbytes < 100 * GIB else f"{nbytes / GIB:,.0f}"
