"""Measures whether memory grows with the number of layers, at one host budget: everything on NVMe, GPT-2 of one width.

The host budget is 512 MiB for every depth, from 0.15 to 2.4 billion parameters, so the gradients of the deeper models
do not fit into it. Each depth trains with and without clipping by norm, and with one and with four micro-batches in a
step. Blocks are checkpointed, and their boundaries wait in the store. Ranks keep no copies of gradients. `compute` is
forward and backward alone in bf16. `plain` is PyTorch with everything in memory, up to `--plain-up-to` parameters. With
`--deepspeed`, DeepSpeed has everything on NVMe, with small buckets and sub-groups, because it runs out of memory with
its defaults, and only as far as the disk has room for both. `--memory-limit` is a hard limit of the kernel for trainer
and daemon together, and for DeepSpeed. In all contestants malloc gives blocks from 256 KiB on back to the system when
they are freed, because it would keep the more of them the more layers there are. The result is one JSON object:

- `machine`, `provenance`, `parameters`, `host_budget_bytes`, `memory_limit_bytes` (null: none)
- `cases`: `clip`, `accumulation`, `provenance` (cases may be measured one by one), and `sizes`: `parameters`, `layers`,
  and the figures of `compute`, `plain`, `nvme` and `DeepSpeed` (`benchmarks.training.result`; their ratios are to
  `compute`)
- `flatness`: for each case the largest proportional memory of `trainer`, `daemon` and `total` over all depths, divided
  by the smallest

Run as a module from the root of the repository: `python -m benchmarks.training.depth`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from benchmarks import plots
from benchmarks.common import machine, report
from benchmarks.common.measure import BenchmarkError, Progress, Threads, prefixed
from benchmarks.training import bf16_emulation
from benchmarks.training.contestant_process import RunningContestant
from benchmarks.training.deepspeed_environment import DeepSpeedEnvironment, DeepSpeedUnavailableError, prepare
from benchmarks.training.entries import COMPUTE, PLAIN, deepspeed, ours
from benchmarks.training.heat import Heat
from benchmarks.training.result import summaries
from benchmarks.training.task import HEAD_WIDTH, TrainingTask
from paramserver.contract.sizes import Size

DEFAULT_DIRECTORY = Path(__file__).parents[2] / "build" / "bench"
GIB = 1 << 30
# Two versions of 14 bytes, and a gradient in bf16.
DISK_BYTES_PER_PARAMETER = 30.1
# The files of the disk probes.
PROBES_BYTES = 4 * GIB
# DeepSpeed's files: the parameter in bf16, its master weight, two moments and a gradient in fp32.
PEER_DISK_BYTES_PER_PARAMETER = 18
# Boundaries of at least so many bytes go to the store. Those of the benchmark have 512 KiB.
SMALLEST = 256 << 10
# A freed gradient of some MiB stays in malloc's heap if a small block was placed behind it: 4 MiB more for each layer.
RETURNING_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
# The clipping and the number of micro-batches of each case.
CASES = ((0.0, 1), (1.0, 1), (0.0, 4), (1.0, 4))
KEPT = report.HERE / "results" / "depth.json"

FULL_BUDGET = 512 << 20
FULL = tuple(
    TrainingTask(layers=layers, hidden=1024, batch=1, tokens=256, vocab=50257, checkpoints=True)
    for layers in (8, 20, 43, 91, 186)
)
QUICK_BUDGET = 6 << 20
QUICK = tuple(
    TrainingTask(layers=layers, hidden=HEAD_WIDTH, batch=1, tokens=32, vocab=512, checkpoints=True)
    for layers in (4, 16)
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def nvme(task: TrainingTask, budget: int) -> RunningContestant:
    """Return the entry with everything on NVMe, boundaries in the store, and ranks that keep no copies of gradients."""
    entry = ours("nvme", task, task.gpt2_parameters, "nvme", durability="step", host_budget_bytes=budget, deferred=True)

    def config(directory: Path) -> Mapping[str, Any]:
        values = entry.config_in(directory)
        section = {**values["paramserver"], "kept_gradients": 0, "activations": {"offload": True, "smallest": SMALLEST}}
        return {**values, "paramserver": section}

    return replace(entry, config_in=config)


def measure(
    tasks: Sequence[TrainingTask],
    budget: int,
    directory: Path,
    *,
    rounds: int,
    steps: int,
    plain_up_to: int,
    chosen: Collection[tuple[float, int]],
    memory_limit: int | None = None,
    peer: DeepSpeedEnvironment | None = None,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Measure all depths in the chosen CASES, and yield the result so far after each of them; see the module.

    The other cases are those of the kept results.

    Raises:
        BenchmarkError: the disk has too little room, or this project cannot be run.
    """
    needed = PROBES_BYTES + int(DISK_BYTES_PER_PARAMETER * max(task.gpt2_parameters for task in tasks))
    machine.check_free_bytes(directory, needed, "the deepest model", "choose another one, or fewer --sizes")
    cases = _kept_cases(budget, memory_limit, chosen)
    for clip, accumulation in chosen:
        sizes = []
        for task in (replace(task, clip=clip, accumulation=accumulation) for task in tasks):
            size = task.gpt2_parameters
            entries = [COMPUTE, *([PLAIN] if size <= plain_up_to else [])]
            entries.append(replace(nvme(task, budget), memory_limit=memory_limit))
            problem = None if peer is None else _lack_of_disk(size, directory)
            if peer is not None and problem is None:
                other = deepspeed("DeepSpeed", task, size, "nvme", peer, deferred=True, frugal=True)
                entries.append(replace(other, memory_limit=memory_limit))
            entries = [replace(each, environment={**each.environment, **RETURNING_MALLOC}) for each in entries]
            label = f"{size / 1e6:.1f} M, clip {clip:g}, {accumulation} micro-batches"
            heat = Heat(task, directory, threads=Threads(), progress=prefixed(progress, label))
            found = summaries(heat.run(entries, rounds=rounds, steps=steps), task)
            if problem is not None:
                found["DeepSpeed"] = {"not_run": problem}
            sizes.append({"parameters": size, "layers": task.layers, "hidden": task.hidden} | found)
            case = {"clip": clip, "accumulation": accumulation, "sizes": sizes, "flatness": _flatness(sizes)}
            cases[clip, accumulation] = case | {"provenance": machine.provenance()}
            yield {
                "parameters": {"rounds": rounds, "steps": steps, "batch": tasks[0].batch, "tokens": tasks[0].tokens}
                | {"precision": bf16_emulation.precision_in_words()},
                "host_budget_bytes": budget,
                "memory_limit_bytes": memory_limit,
                "cases": [cases[case] for case in CASES if case in cases],
            }


def _kept_cases(
    budget: int, memory_limit: int | None, measured_anew: Collection[tuple[float, int]]
) -> dict[tuple[float, int], dict[str, Any]]:
    """Return the cases of the kept results that are not measured anew, if they had the same budget and limit."""
    if not KEPT.exists():
        return {}
    kept = json.loads(KEPT.read_text())
    if (kept["host_budget_bytes"], kept["memory_limit_bytes"]) != (budget, memory_limit):
        return {}
    cases = {(case["clip"], case["accumulation"]): {"provenance": kept["provenance"]} | case for case in kept["cases"]}
    return {key: case for key, case in cases.items() if key not in measured_anew}


def _lack_of_disk(parameters: int, directory: Path) -> str | None:
    """Return why DeepSpeed cannot run beside this project; None if the disk has room for both."""
    needed = PROBES_BYTES + int((DISK_BYTES_PER_PARAMETER + PEER_DISK_BYTES_PER_PARAMETER) * parameters)
    try:
        machine.check_free_bytes(directory, needed, "a model beside DeepSpeed's")
    except BenchmarkError as error:
        return str(error)
    return None


def _flatness(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by process the largest memory over all depths, divided by the smallest."""
    memory = [size["nvme"]["memory"] for size in sizes]
    return {
        part: round(max(each[part] for each in memory) / min(each[part] for each in memory), 4)
        for part in ("trainer", "daemon", "total")
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: a table for each case."""
    shape = result["parameters"]
    texts = [
        f"GPT-2 of one width, blocks checkpointed, {shape['batch']} x {shape['tokens']} tokens in a micro-batch, "
        f"{shape['precision']}, AdamW; everything on NVMe, boundaries of checkpoints in the store, each step durable, "
        f"`host_budget` {result['host_budget_bytes'] / GIB:.2f} GiB for every depth, no copies of gradients in the "
        "rank. `compute` is forward and backward alone, `plain` PyTorch with everything in memory. Memory is "
        "proportional (PSS), the largest that was seen, with "
        + " ".join(f"`{name}={value}`" for name, value in RETURNING_MALLOC.items())
        + " for all."
    ]
    if result["memory_limit_bytes"] is not None:
        texts.append(
            f"By a limit of the kernel, trainer and daemon had at most {result['memory_limit_bytes'] / GIB:g} GiB "
            "together, and so had DeepSpeed, where it ran."
        )
    header = (
        *("layers", "parameters", "s/step", "plain, s", "compute, s", "I/O, s"),
        *("trainer, GiB", "daemon, GiB", "both, GiB", "GB read", "GB written", "DeepSpeed, s", "its memory, GiB"),
    )
    for case in result["cases"]:
        clipped = f"clipping at {case['clip']:g}" if case["clip"] else "no clipping"
        flatness, made = case["flatness"], case["provenance"]
        rows = [_row(size) for size in case["sizes"]]
        texts += [
            f"**{clipped}, accumulation {case['accumulation']}** ({made['date']}, commit {made['git_commit']}). From "
            f"depth to depth memory differs by a factor of {flatness['total']:.2f} (trainer {flatness['trainer']:.2f}, "
            f"daemon {flatness['daemon']:.2f}).",
            report.table(header, rows),
        ]
        texts += [
            f"DeepSpeed with {size['layers']} layers: {size['DeepSpeed']['not_run']}"
            for size in case["sizes"]
            if size.get("DeepSpeed", {}).get("not_run") is not None
        ]
    texts.append("![memory and seconds over parameters](results/depth.svg)")
    return "\n\n".join(texts)


def _row(size: Mapping[str, Any]) -> list[str | None]:
    ours_, plain, other = size["nvme"], size.get("plain"), size.get("DeepSpeed")
    if other is not None and other["not_run"] is not None:
        other = None
    return [
        str(size["layers"]),
        f"{size['parameters'] / 1e6:.0f} M",
        f"{ours_['median']:.2f}",
        None if plain is None or plain["not_run"] is not None else f"{plain['median']:.2f}",
        f"{size['compute']['median']:.2f}",
        f"{ours_['roofline']['io'] or 0.0:.2f}",
        *(f"{ours_['memory'][part] / GIB:.2f}" for part in ("trainer", "daemon", "total")),
        *(f"{ours_[key] / 1e9:.1f}" for key in ("read_per_step", "written_per_step")),
        None if other is None else f"{other['median']:.2f}",
        None if other is None else f"{other['memory']['total'] / GIB:.2f}",
    ]


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(Size).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"--memory-limit {text}: write a number of bytes, such as 3GiB") from error


def _arguments(
    sizes: int, memory_limit: str, deepspeed_dir: Path | None, clips: Sequence[float], accumulations: Sequence[int]
) -> str:
    """Return the options that repeat the result, as the variable of make's target."""
    options = f" --sizes {sizes}" if sizes < len(FULL) else ""
    options += "".join(f" --clip {each:g}" for each in clips)
    options += "".join(f" --accumulation {each}" for each in accumulations)
    options += f" --memory-limit {memory_limit}" if memory_limit else ""
    options += " --deepspeed DIR" if deepspeed_dir is not None else ""
    return f"OPTIONS='{options.strip()}'" if options else ""


def _chosen(clips: Sequence[float], accumulations: Sequence[int]) -> list[tuple[float, int]]:
    """Return the CASES with one of the limits and one of the numbers of micro-batches; an empty list stands for all."""
    for name, wanted, known in (
        ("--clip", clips, sorted({clip for clip, _ in CASES})),
        ("--accumulation", accumulations, sorted({accumulation for _, accumulation in CASES})),
    ):
        if unknown := {*wanted} - {*known}:
            raise typer.BadParameter(f"{name} {min(unknown):g}: there are cases with {known} only")
    return [
        (clip, accumulation)
        for clip, accumulation in CASES
        if (not clips or clip in clips) and (not accumulations or accumulation in accumulations)
    ]


def _peer(directory: Path | None, progress: Progress) -> DeepSpeedEnvironment | None:
    """Return DeepSpeed's environment, if it was asked for. Raise BenchmarkError if it has none with NVMe here."""
    if directory is None:
        return None
    try:
        environment = prepare(directory, progress)
    except DeepSpeedUnavailableError as error:
        raise BenchmarkError(f"DeepSpeed cannot be set up: {error}") from error
    if environment.nvme_problem is not None:
        raise BenchmarkError(f"DeepSpeed cannot use NVMe here: {environment.nvme_problem}")
    return environment


@app.command(help=__doc__)
def main(
    directory: Annotated[Path, typer.Option("--dir", help="Where states go; they are removed.")] = DEFAULT_DIRECTORY,
    sizes: Annotated[int, typer.Option(min=1, max=len(FULL), help="How many, from the smallest on.")] = len(FULL),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the warm-up.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a turn; the first does not count.")] = 3,
    clips: Annotated[
        list[float] | None,
        typer.Option("--clip", help="Only the cases with this limit of the norm, 0 or 1; repeatable. The others stay."),
    ] = None,
    accumulations: Annotated[
        list[int] | None,
        typer.Option(
            "--accumulation", help="Only the cases with so many micro-batches, 1 or 4; repeatable. The others stay."
        ),
    ] = None,
    plain_up_to: Annotated[int, typer.Option(help="The most parameters with which `plain` runs.")] = 700_000_000,
    memory_limit: Annotated[
        str, typer.Option(help="Memory of trainer and daemon together, and of DeepSpeed, as 3GiB; needs root.")
    ] = "",
    deepspeed_dir: Annotated[
        Path | None, typer.Option("--deepspeed", help="DeepSpeed's environment, set up if need be; none: without it.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, one round: to see that it works.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object, not a table.")] = False,
    results: Annotated[bool, typer.Option("--results", help="Update benchmarks/RESULTS.md and results/.")] = False,
) -> None:
    """Run the benchmark, and print its result or the error that ended it."""
    console = Console(stderr=True)
    clips, accumulations = clips or [], accumulations or []
    chosen = _chosen(clips, accumulations)
    tasks, budget, rounds, steps = (QUICK, QUICK_BUDGET, 1, 2) if quick else (FULL[:sizes], FULL_BUDGET, rounds, steps)
    result = report.run(
        "depth",
        "Memory by depth of the model",
        "bench-depth",
        lambda: measure(
            tasks,
            budget,
            directory,
            rounds=rounds,
            steps=steps,
            plain_up_to=plain_up_to,
            chosen=chosen,
            memory_limit=_bytes(memory_limit) if memory_limit else None,
            peer=_peer(deepspeed_dir, console.print),
            progress=console.print,
        ),
        markdown,
        directory=directory,
        as_json=as_json,
        results=results,
        arguments=_arguments(sizes, memory_limit, deepspeed_dir, clips, accumulations),
    )
    if results:
        plots.draw("depth", result, report.HERE / "results" / "depth.svg")


if __name__ == "__main__":
    app()
