"""Markdown tables of the result of `benchmarks.training.step`."""

from __future__ import annotations

from typing import Any

from benchmarks.common import report

GB = 1e9
MIB = 1 << 20


def markdown(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables."""
    task = result["parameters"]
    clipping = f"clipped to a norm of {task['clip']:g}" if task["clip"] else "not clipped"
    introduction = (
        f"GPT-2 of {task['layers']} layers x {task['hidden']} ({task['parameters'] / 1e6:.1f} M parameters, vocabulary "
        f"{task['vocab']}), {task['batch']} x {task['tokens']} tokens, {task['precision']}, AdamW, "
        f"gradients {clipping}. `nvme` has {task['nvme_host_budget_bytes'] // MIB} MiB of host memory and makes each "
        "step durable, `host, durable` too; `host` and `device` are in memory only, as plain PyTorch. `tuned malloc` "
        "is glibc's, set as docs/performance.md has it. Each heat ran beside plain PyTorch, taking turns; `ratio` is "
        "the median over rounds of a contestant's step to plain PyTorch's in the same round. Memory is proportional "
        "(PSS), the largest that was seen, of trainer and daemon. This project's losses are those of plain PyTorch, "
        "bit for bit."
    )
    roofline = (
        "T_roof is the larger one of plain PyTorch's step and the time that the disk alone takes for the bytes of a "
        "step, in both directions at once, with "
        f"{task['probe_threads']['read']} threads that read and {task['probe_threads']['write']} that write 4 MiB each "
        "past the page cache; measured before and after each turn, the better of the two."
    )
    return "\n\n".join((introduction, _steps(result), roofline, _costs(result), *_targets(result), *_absent(result)))


def _rows(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the figures of each contestant that ran, plain PyTorch once per heat."""
    return [
        (f"plain PyTorch, beside `{heat}`" if name == "plain" else f"`{name}`", figures)
        for heat, contestants in result["heats"].items()
        for name, figures in contestants.items()
        if figures["not_run"] is None
    ]


def _steps(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{figures['median']:.3f}",
            f"{figures['least']:.2f} to {figures['most']:.2f}",
            f"{figures['ratio']:.2f}",
            *(f"{figures[part]:.2f}" for part in ("forward", "backward", "update")),
            f"{figures['tokens_per_second']:.0f}",
            f"{figures['memory']['total'] / MIB:.0f}",
            f"{figures['memory']['ratio']:.2f}",
        ]
        for name, figures in _rows(result)
    ]
    return report.table(
        ("", "s/step", "spread", "ratio", "forward", "backward", "update", "tokens/s", "MiB", "ratio of MiB"), rows
    )


def _costs(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{figures['read_per_step'] / GB:.2f}",
            f"{figures['written_per_step'] / GB:.2f}",
            f"{figures['cpu_per_step']['trainer']:.2f}",
            f"{figures['cpu_per_step']['daemon']:.2f}",
            None if figures["roofline"]["io"] is None else f"{figures['roofline']['io']:.2f}",
            f"{figures['roofline']['seconds']:.2f}",
            f"{figures['roofline']['fraction']:.2f}",
        ]
        for name, figures in _rows(result)
    ]
    return report.table(
        (
            "",
            "GB read",
            "GB written",
            "CPU s, trainer",
            "CPU s, daemon",
            "I/O alone, s",
            "T_roof, s",
            "T_roof / T_step",
        ),
        rows,
    )


def _targets(result: dict[str, Any]) -> list[str]:
    rows = [
        [target["name"], f"{target['measured']:.2f}", f"{target['wanted']:.2f}", "yes" if target["met"] else "no"]
        for target in result["targets"]
    ]
    return [report.table(("", "measured", "at most", "met"), rows)] if rows else []


def _absent(result: dict[str, Any]) -> list[str]:
    return [
        f"`{name}` was not run: {figures['not_run']}"
        for contestants in result["heats"].values()
        for name, figures in contestants.items()
        if figures["not_run"] is not None
    ]
