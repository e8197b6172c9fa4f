"""A plot of the result of `benchmarks.training.scale`: seconds per step and memory over the size of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GIB = 1 << 30


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot to `path` as SVG."""
    millions = [size["parameters"] / 1e6 for size in result["sizes"]]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    _lines(
        seconds,
        millions,
        "seconds per step",
        {
            "on NVMe": [size["nvme"]["median"] for size in result["sizes"]],
            "roofline": [size["nvme"]["roofline"]["seconds"] for size in result["sizes"]],
            "forward and backward alone": [size["compute"]["median"] for size in result["sizes"]],
        },
    )
    _lines(
        memory,
        millions,
        "GiB, proportional",
        {
            "trainer and daemon": [size["nvme"]["memory"]["total"] / GIB for size in result["sizes"]],
            "daemon": [size["nvme"]["memory"]["daemon"] / GIB for size in result["sizes"]],
            "states in memory (16 bytes per parameter)": [16 * size["parameters"] / GIB for size in result["sizes"]],
        },
    )
    # The file has no date and fixed element ids, so that the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "paramserver", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(axes: Axes, millions: list[float], label: str, values: dict[str, list[float]]) -> None:
    for name, line in values.items():
        axes.plot(millions, line, marker="o", label=name)
    axes.set_xlabel("million parameters")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
