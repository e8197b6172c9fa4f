"""Ray Train runs the ranks of a job, and an actor on each node of the Ray cluster holds the node's store daemon.

    python deploy/ray/train_on_ray.py --workers 2 --state-dir /nvme/paramserver --storage /shared/ray

Without a cluster (`ray start`, or $RAY_ADDRESS), Ray starts one of this machine. Ray decides which workers there are,
and starts all of them again when one has failed; each time they resume from the last committed step. The state stays in
the state directories of the nodes, so the same command goes on where the last one ended. It needs `ray[train]`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import trainer_client

# The daemon takes its whole host budget first, which lasts minutes for 1 TiB.
START_SECONDS = 600.0
RESTART_PAUSE_SECONDS = 1.0
# The exit status of a daemon whose configuration is wrong, which a restart does not mend.
BAD_CONFIGURATION = 2


class StoreDaemon:
    """A store daemon of this node, which ends with this actor, and is started again when it has ended by itself."""

    def __init__(self, options: list[str], address: str) -> None:
        """Start the daemon, and return when it serves.

        Args:
            options: those of `paramserver serve`.
            address: where it serves then, as `unix:/path/paramserver.sock`.
        """
        # The daemon stops when its standard input ends: at `stop`, and when the process of the actor dies.
        self._command = [sys.executable, "-m", "paramserver", "serve", *options, "--exit-with-stdin"]
        self._stopping = threading.Event()
        # The lock of `_process` and `_stopping` while the daemon is replaced.
        self._replacing = threading.Lock()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        deadline = time.monotonic() + START_SECONDS
        while not self._serves(address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"no store daemon serves at {address} with {options}: see the actor's log")
        threading.Thread(target=self._restart, daemon=True).start()

    def wait_until_serving(self) -> None:
        """Return. Ray runs this when the constructor has returned, so its result says that the daemon serves."""

    def stop(self) -> int:
        """Stop the daemon as SIGTERM does, and return its exit status."""
        with self._replacing:
            self._stopping.set()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    def _restart(self) -> None:
        while self._process.wait() != BAD_CONFIGURATION and not self._stopping.wait(RESTART_PAUSE_SECONDS):
            with self._replacing:
                if self._stopping.is_set():
                    return
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)

    @staticmethod
    def _serves(address: str) -> bool:
        program = "from paramserver.__main__ import admin; admin()"
        probe = [sys.executable, "-c", program, "health", "--address", address]
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def start_daemons(options: list[str], address: str) -> list[Any]:
    """Start an actor with a daemon on each node of the cluster, and return the actors when all daemons serve."""
    # It takes no processor from the scheduler, so that it never keeps a worker out.
    actor = ray.remote(num_cpus=0, max_restarts=-1)(StoreDaemon)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(options, address)
        for node in nodes
    ]
    ray.get([actor.wait_until_serving.remote() for actor in actors])
    return actors


def train(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train on one worker, and return what it found. Ray Train has joined the workers to one process group before."""
    nvme = {"device": "nvme"}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "paramserver": {"address": settings["address"], "job": settings["job"]},
    }
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    engine, *_ = trainer_client.initialize(model=model, config=config)
    rank = ray.train.get_context().get_world_rank()
    with engine:
        for step in range(engine.global_steps, settings["steps"]):
            # The inputs depend on the step and the rank alone, so a resumed run sees those that it would have seen.
            generator = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(16, 64, generator=generator).to(engine.device)
            loss = (engine(inputs).squeeze() - inputs.mean(dim=1)).square().mean()
            engine.backward(loss)
            engine.step()
            ray.train.report({"step": engine.global_steps, "loss": loss.item()})
        return {"step": engine.global_steps, "resumed_step": engine.resumed_step, "data_plane": engine.data_plane}


def main() -> None:
    """Start the daemons, train, and stop the daemons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks of the job (default: 2)")
    parser.add_argument("--gpus", action="store_true", help="give each worker a GPU")
    parser.add_argument("--steps", type=int, default=50, help="train up to this step of the job (default: 50)")
    parser.add_argument("--job", default="ray", help="name of the job in the store (default: ray)")
    parser.add_argument("--state-dir", type=Path, required=True, help="of the daemons, the same path on each node")
    parser.add_argument("--host-budget", default="1GiB", help="of each daemon (default: 1GiB)")
    parser.add_argument("--nvme-budget", default="8GiB", help="of each daemon (default: 8GiB)")
    parser.add_argument("--storage", type=Path, required=True, help="of Ray Train, shared by the nodes of the cluster")
    arguments = parser.parse_args()

    ray.init()
    state_dir = arguments.state_dir.absolute()
    address = f"unix:{state_dir}/paramserver.sock"
    options = ["--state-dir", str(state_dir)]
    options += ["--host-budget", arguments.host_budget, "--nvme-budget", arguments.nvme_budget]
    daemons = start_daemons(options, address)
    try:
        result = TorchTrainer(
            train,
            train_loop_config={"address": address, "job": arguments.job, "steps": arguments.steps},
            scaling_config=ray.train.ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus),
            run_config=ray.train.RunConfig(
                name=arguments.job,
                storage_path=str(arguments.storage.absolute()),
                failure_config=ray.train.FailureConfig(max_failures=10),
            ),
        ).fit()
    finally:
        stopped = ray.get([daemon.stop.remote() for daemon in daemons])
    if result.error is not None:
        raise result.error
    print(json.dumps({**result.return_value, "daemons": stopped}))


if __name__ == "__main__":
    main()
