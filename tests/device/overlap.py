"""How much of a training step's copies run beside its computation, in virtual time: links and kernels have set speeds.

`python -m tests.device.overlap` prints JSON; `make bench-overlap` keeps it in benchmarks/RESULTS.md. Virtual time
follows from the order of calls, streams and events alone, so the figures are the same on each machine.

A GPT-2 of many small blocks trains with its states in the store, or with all of them on the device, from where each
step's commit copies them. The kernels take the time that their products need at
a set speed. The links are so fast that a step's computation takes RATIO times as long as its copies in one direction,
for each of the ratios. The control is the same program with all lanes on the stream of the computation.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch
from transformers import GPT2Config

from tests.device import lag
from tests.device.held_commits import commits_held
from tests.device.training_on_lanes import train
from tests.integration.support import training
from tests.integration.support.daemon import Daemon
from tests.integration.support.model_runs import config_of
from tests.integration.support.training import Run
from trainer_client import Engine
from trainer_client.base.lanes import device_lanes
from trainer_client.training.run.commits import Commits
from trainer_client.training.step.training_step import TrainingStep

LAYERS = 24
STEPS = 4
RATIOS = (4.0, 2.0, 1.25, 0.5)
KERNEL_FLOPS_PER_SECOND = 1e12
TIERS = {"nvme": "nvme", "host": "cpu", "device": "none"}
_COPIES = {"in": lag.Engine.TO_DEVICE, "out": lag.Engine.TO_HOST}


@contextmanager
def on_one_stream() -> Iterator[None]:
    """Have all lanes use the stream of the computation, so that nothing overlaps."""

    def share(lane: device_lanes.Lane, device: torch.device) -> None:
        lane.stream = torch.accelerator.current_stream(device)

    with mock.patch.object(device_lanes.Lane, "__init__", share):
        yield


@contextmanager
def commits_in_virtual_time() -> Iterator[None]:
    """Have a thread copy the states of a commit when the next forward begins, and the wait for the copies count.

    The thread goes on beside the trainer, so the scheduler decides whether its copies are issued before or after the
    script reads the loss of the step, and that must not show in virtual time. The thread therefore waits for the next
    forward, and that for the thread. Neither this wait nor the thread's looks whether a copy is done take virtual time.
    The trainer waits for the commit before each step, at whose begin it reads a norm, so that all other work is done
    then, too.
    """
    wait, forward, may_copy = Commits.wait, Engine.forward, Event()

    def issue_copies(commits: Commits) -> None:
        may_copy.set()
        commits.answered().result()
        may_copy.clear()

    def wait_for_device(commits: Commits) -> None:
        issue_copies(commits)
        wait(commits)
        lag.synchronize()

    def issue_copies_and_forward(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        issue_copies(engine._commits)
        return forward(engine, *args, **kwargs)

    with (
        commits_held(may_copy),
        mock.patch.object(Commits, "wait", wait_for_device),
        mock.patch.object(Engine, "forward", issue_copies_and_forward),
    ):
        yield


@contextmanager
def steps_recorded(spans: list[lag.Span]) -> Iterator[None]:
    """Collect the spans of the tasks of all steps but the first one, which nothing foresees yet."""
    make, made, recording = TrainingStep.make, [0], ExitStack()
    found: list[lag.Span] = []

    def make_and_record(step: TrainingStep, number: int) -> bool:
        nonlocal found
        is_made = make(step, number)
        made[0] += 1
        if made[0] == 1:
            lag.synchronize()
            found = recording.enter_context(lag.recorded())
        if made[0] == STEPS:
            lag.synchronize()
            recording.close()
            spans.extend(found)
        return is_made

    with recording, mock.patch.object(TrainingStep, "make", make_and_record):
        yield


def spans_of(
    run: Run, link_bytes_per_second: Mapping[str, float], context: Callable[[], AbstractContextManager[Any]]
) -> list[lag.Span]:
    """Train, and return the spans of the steps; a link without a speed takes no time."""
    spans: list[lag.Span] = []
    is_on_device = run.config["zero_optimization"]["offload_optimizer"]["device"] == "none"

    @contextmanager
    def meanwhile() -> Iterator[None]:
        lag.set_speed(lag.Engine.COMPUTE, flops_per_second=KERNEL_FLOPS_PER_SECOND)
        for name, engine in _COPIES.items():
            lag.set_speed(engine, bytes_per_second=link_bytes_per_second.get(name, 0.0))
        counted = commits_in_virtual_time() if is_on_device else nullcontext()
        with steps_recorded(spans), counted, context():
            yield

    deep = mock.patch.object(training, "GPT2Config", lambda **fields: GPT2Config(**fields | {"n_layer": LAYERS}))
    with deep:
        train(run, "nothing late", meanwhile, guarded=False)
    return spans


def busy_seconds(spans: Sequence[lag.Span], engine: lag.Engine) -> float:
    return sum(span.end - span.begin for span in spans if span.engine is engine)


def figures(spans: list[lag.Span]) -> dict[str, Any]:
    """Return the hidden shares and the times of a training run."""
    compute = busy_seconds(spans, lag.Engine.COMPUTE)
    hidden = {name: round(lag.hidden_share(spans, {engine}), 4) for name, engine in _COPIES.items()}
    both = set(_COPIES.values())
    timed = [span for span in spans if span.end > span.begin]
    seconds = max(span.end for span in timed) - min(span.begin for span in timed)
    longest = max(compute, *(busy_seconds(spans, engine) for engine in both))
    return {
        "hidden": hidden | {"both": round(lag.hidden_share(spans, both), 4)},
        "seconds": seconds,
        "compute_seconds": compute,
        "copy_seconds": {name: busy_seconds(spans, engine) for name, engine in _COPIES.items()},
        "of_bound": round(seconds / longest, 4),
    }


def measure(directory: Path, ratios: Sequence[float] = RATIOS, tiers: Sequence[str] = tuple(TIERS)) -> dict[str, Any]:
    """Return the figures of each tier and ratio, with lanes and on one stream."""
    lag.load()
    found: dict[str, Any] = {}
    with Daemon(directory / "state", {"host_budget": "256MiB", "nvme_budget": "4GiB"}) as daemon:

        def run(job: str) -> Run:
            return Run(steps=STEPS, config=config_of(daemon.address, job, TIERS[tier]))

        for tier in tiers:
            unhurried = spans_of(run(f"{tier} bytes"), {}, nullcontext)
            compute = busy_seconds(unhurried, lag.Engine.COMPUTE)
            nbytes = {n: sum(s.nbytes for s in unhurried if s.engine is engine) for n, engine in _COPIES.items()}
            for ratio in ratios:
                # From a job without states in the store, the script's batches are all that is copied in.
                timed = [name for name in _COPIES if tier != "device" or name == "out"]
                speeds = {name: nbytes[name] * ratio / compute for name in timed}
                found[f"{tier}, {ratio:g}"] = {
                    "tier": tier,
                    "ratio": ratio,
                    "lanes": figures(spans_of(run(f"{tier} {ratio} lanes"), speeds, nullcontext)),
                    "one_stream": figures(spans_of(run(f"{tier} {ratio} one stream"), speeds, on_one_stream)),
                }
    return {"layers": LAYERS, "steps": STEPS, "runs": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device.overlap", description=__doc__)
    parser.add_argument("--ratio", type=float, action="append", help="compute time by copy time; repeatable")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-") as temporary:
        print(json.dumps(measure(Path(temporary), args.ratio or RATIOS), indent=1))


if __name__ == "__main__":
    main()
