"""Pictures of the results: `python -m benchmarks.plots` makes results/NAME.svg of results/NAME.json.

Each picture names its machine and commit. It has no background, and its colours have contrast on white and on black, so
that one file serves light and dark pages. This module must never show a figure that is not in the JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).with_name("results")
GIB = 1 << 30
# Greys and colours with a contrast of at least 3 to 1 on white and on the dark theme's background.
INK = "#808080"
COLOURS = ("#2f81f7", "#d9730d", "#2f9e5f", "#a371f7")
WIDTH_INCHES = 9.0

STYLE: dict[Any, Any] = {
    # The file has no random element ids, and its text is text, so that the same figures give the same file.
    "svg.hashsalt": "paramserver",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "grid.color": INK,
    "grid.alpha": 0.3,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}


def draw(name: str, result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of the benchmark `name` to `path` as SVG."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHTS_INCHES.get(name, 4.4)), layout="constrained")
        PICTURES[name](figure, result)
        figure.supxlabel(_origin(result), fontsize=8, color=INK)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _origin(result: Mapping[str, Any]) -> str:
    machine, made = result["machine"], result["provenance"]
    return (
        f"{machine['cpu']}, {machine['cpu_count']} CPUs, {machine['memory_bytes'] / GIB:.0f} GiB, "
        f"{machine['file_system']} on {machine['device']} · commit {made['git_commit'] or 'unknown'} · "
        f"{made['date'][:10]}"
    )


def _step(figure: Figure, result: Mapping[str, Any]) -> None:
    seconds, memory = figure.subplots(1, 2, sharey=True)
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for heat in ("nvme", "host"):
        for name, found in result["heats"][heat].items():
            if found["not_run"] is None:
                rows.append((f"plain PyTorch, beside {heat}" if name == "plain" else name, found))
    names = [name for name, _ in rows]
    medians = [found["median"] for _, found in rows]
    reach = [
        [found["median"] - found["least"] for _, found in rows],
        [found["most"] - found["median"] for _, found in rows],
    ]
    colours = [_colour_of(name) for name in names]
    seconds.barh(names, medians, xerr=reach, color=colours, ecolor=INK, capsize=3)
    seconds.set_xlabel("seconds per step: median, least and most")
    memory.barh(names, [found["memory"]["total"] / GIB for _, found in rows], color=colours)
    memory.set_xlabel("GiB of memory, trainer and daemon")
    seconds.invert_yaxis()
    for axes in (seconds, memory):
        axes.grid(visible=False, axis="y")


def _colour_of(name: str) -> str:
    return INK if name.startswith("plain") else COLOURS[1] if name.startswith("DeepSpeed") else COLOURS[0]


def _scale(figure: Figure, result: Mapping[str, Any]) -> None:
    sizes = result["sizes"]
    millions = [size["parameters"] / 1e6 for size in sizes]
    seconds, memory = figure.subplots(1, 2)
    _lines(
        seconds,
        millions,
        "seconds per step",
        {
            "on NVMe": [size["nvme"]["median"] for size in sizes],
            "roofline": [size["nvme"]["roofline"]["seconds"] for size in sizes],
            "forward and backward alone": [size["compute"]["median"] for size in sizes],
        },
    )
    _lines(
        memory,
        millions,
        "GiB, proportional",
        {
            "trainer and daemon": [size["nvme"]["memory"]["total"] / GIB for size in sizes],
            "daemon": [size["nvme"]["memory"]["daemon"] / GIB for size in sizes],
            "states in memory (16 bytes per parameter)": [16 * size["parameters"] / GIB for size in sizes],
        },
    )
    for axes in (seconds, memory):
        axes.set_xlabel("million parameters")


def _depth(figure: Figure, result: Mapping[str, Any]) -> None:
    memory, seconds = figure.subplots(1, 2)
    millions = [size["parameters"] / 1e6 for size in result["cases"][0]["sizes"]]
    lines: dict[str, dict[str, list[float]]] = {"memory": {}, "seconds": {}}
    for case in result["cases"]:
        name = f"{'clipped' if case['clip'] else 'not clipped'}, accumulation {case['accumulation']}"
        lines["memory"][name] = [size["nvme"]["memory"]["total"] / GIB for size in case["sizes"]]
        lines["seconds"][name] = [size["nvme"]["median"] for size in case["sizes"]]
    _lines(memory, millions, "GiB, trainer and daemon, proportional", lines["memory"])
    _lines(seconds, millions, "seconds per step", lines["seconds"])
    for axes in (memory, seconds):
        axes.set_xlabel("million parameters")


def _storage(figure: Figure, result: Mapping[str, Any]) -> None:
    cases = result["cases"]
    _pairs(
        figure.subplots(),
        [name.replace("_", " ") for name in cases],
        {
            "fio": [case["fio"]["median_gb_per_second"] for case in cases.values()],
            "the engine, which verifies each byte": [case["ours"]["median_gb_per_second"] for case in cases.values()],
        },
        "GB/s",
    )


def _dataplane(figure: Figure, result: Mapping[str, Any]) -> None:
    latency, bandwidth = figure.subplots(1, 2)
    sizes = result["local"]["lease_latency"]["sync"]
    _pairs(
        latency,
        [f"{size} MiB" for size in sizes],
        {
            "echo by bare gRPC": [calls["echo"]["p50"] for calls in sizes.values()],
            "lease of a shard": [calls["lease"]["p50"] for calls in sizes.values()],
        },
        "µs, median",
    )
    local, remote = result["local"]["same_node"], result["remote"]
    _pairs(
        bandwidth,
        ["same node", "remote read", "remote write"],
        {
            "memcpy, or bare TCP": [
                local["memcpy_gb_per_second"],
                *(remote[way]["tcp"]["median_gb_per_second"] for way in ("read", "write")),
            ],
            "the store": [
                local["gb_per_second"],
                *(remote[way]["ours"]["median_gb_per_second"] for way in ("read", "write")),
            ],
        },
        "GB/s",
    )


def _lines(axes: Axes, over: Sequence[float], label: str, values: Mapping[str, Sequence[float]]) -> None:
    for name, line in values.items():
        axes.plot(over, line, marker="o", markersize=4, label=name)
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _legend(axes, columns=1)


def _pairs(axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[float]], label: str) -> None:
    """Draw groups of upright bars, one of each group for each series."""
    width = 0.8 / len(values)
    for number, (name, heights) in enumerate(values.items()):
        left = [place + (number - (len(values) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(left, heights, width=0.92 * width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=0 if len(groups) < 5 else 30, ha="center")
    axes.set_ylabel(label)
    axes.grid(visible=False, axis="x")
    _legend(axes, columns=1 if len(groups) < 5 else len(values))


def _legend(axes: Axes, *, columns: int) -> None:
    """Put the legend above the axes, where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns)


PICTURES: Mapping[str, Callable[[Figure, Mapping[str, Any]], None]] = {
    "step": _step,
    "scale": _scale,
    "depth": _depth,
    "storage": _storage,
    "dataplane": _dataplane,
}
# A picture with fewer names needs less height.
HEIGHTS_INCHES = {"step": 3.8}


def main() -> None:
    """Draw all results that have a picture."""
    for name in PICTURES:
        path = RESULTS / f"{name}.json"
        draw(name, json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
