"""Training runs on the simulated device whose leases show at once if they are released too early.

As a program, it is one rank of a launch: `python -m tests.device.training_on_lanes RUNS.json RESULTS.pt`, with
torchrun's environment variables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.device import lag
from tests.device.guarded_arena import guarded_arena
from tests.integration.support import training
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import Result, Run
from trainer_client.base.lanes.device_lanes import DeviceLanes
from trainer_client.client.transport.pinning import DRIVERS, PinDriver, PinError

# The lanes of a rank that can be late alone, and where DeviceLanes has them.
LANES = {"in": "_in", "comm": "_comm", "out": "_out", "beside": "_beside"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How late the streams of a rank are.

    Attributes:
        all_ms, random_ms, seed, compute_ms: see lag.Schedule.
        lane_ms: the lag of a lane, by a name of LANES, instead of `all_ms`.
    """

    all_ms: float = 0
    random_ms: float = 0
    seed: int = 0
    compute_ms: float | None = None
    lane_ms: Mapping[str, float] = field(default_factory=dict)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make the device, and the lanes that are made meanwhile, as late as this says."""
        schedule = lag.Schedule(
            all_ms=self.all_ms, random_ms=self.random_ms, seed=self.seed, compute_ms=self.compute_ms
        )
        schedule.use()
        make = DeviceLanes.__init__

        def make_late(lanes: DeviceLanes, device: torch.device) -> None:
            make(lanes, device)
            for name, milliseconds in self.lane_ms.items():
                lag.set_lag(milliseconds, getattr(lanes, LANES[name]).stream)

        with mock.patch.object(DeviceLanes, "__init__", make_late):
            yield


def train(
    run: Run,
    lateness: str | Lateness,
    meanwhile: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    guarded: bool = True,
) -> Result:
    """Train through the store on the device, while it is late.

    Args:
        lateness: a name of lag.SCHEDULES, or more details.
        meanwhile: makes a context around the training.
        guarded: see guarded_arena.py.
    """
    lag.reset()
    late = Lateness(**asdict(lag.SCHEDULES[lateness])) if isinstance(lateness, str) else lateness
    # Streams have no leases on shared memory.
    guard = guarded_arena() if guarded and not run.prefer_streams else nullcontext()
    with late.used(), _model_on_device(), registered_arena(), guard, meanwhile():
        result = training.train_through_store(run)
    lag.synchronize()
    return result


@contextmanager
def _model_on_device() -> Iterator[None]:
    # torch refuses to move a parameter in place to a device of this kind, so the model is moved as a whole.
    build = training.build_model
    with mock.patch.object(training, "build_model", lambda run: build(run).to("lag")):
        yield


@contextmanager
def registered_arena() -> Iterator[None]:
    """Let ranks register the arena with the device meanwhile."""

    def checked(code: int) -> None:
        if code:
            raise PinError(f"error {code}")

    driver = PinDriver(
        register=lambda address, nbytes: checked(lag.register_host(address, nbytes)),
        unregister=lambda address: checked(lag.unregister_host(address)),
        synchronize=lag.synchronize,
    )
    with mock.patch.dict(DRIVERS, {"lag": lambda _: driver}):
        yield


def launch(runs: Sequence[tuple[Run, str]], world_size: int, directory: Path) -> list[Result]:
    """Run the runs, each under a schedule of lag, one after the other on several ranks; return rank 0's results."""
    plan, result = directory / "runs.json", directory / "results.pt"
    plan.write_text(json.dumps([(asdict(run), schedule) for run, schedule in runs]))
    run_ranks("tests.device.training_on_lanes", world_size, plan, result)
    return [Result(**content) for content in torch.load(result)]


def main() -> None:
    plan, result = map(Path, sys.argv[1:])
    lag.load()
    dist.init_process_group("cpu:gloo,lag:lag")
    results = []
    for run, schedule in json.loads(plan.read_text()):
        results.append(train(Run(**run), schedule))
        assert lag.races() == []
    if dist.get_rank() == 0:
        torch.save([asdict(trained) for trained in results], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
