"""One rank of a run on an accelerator, where all ranks may share one device.

Run as a program, with torchrun's environment variables:

- `python -m tests.gpu.ranks train RUNS.json RESULTS.pt`: make the runs one after the other;
- `python -m tests.gpu.ranks crash PLAN.json`: one run of crash_run.py, which a test may kill.

[Note: two ranks on one GPU] NCCL refuses that, unless the ranks seem to be on two hosts: NCCL_HOSTID differs, and they
talk over sockets.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.accelerator import backends, choose_deterministic_kernels, kind
from tests.integration.support.crash_run import Plan, run_rank
from tests.integration.support.training import Run, train


def share_a_device() -> None:
    """Choose this rank's device, which several ranks share if there are not enough; see the note above."""
    rank, devices = int(os.environ["RANK"]), torch.accelerator.device_count()
    torch.accelerator.set_device_index(rank % devices)
    if int(os.environ["WORLD_SIZE"]) > devices:
        os.environ |= {
            "NCCL_HOSTID": f"rank-{rank}",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }


def make_runs(plan: Path, result: Path) -> None:
    results = [train(Run(**content)) for content in json.loads(plan.read_text())]
    if dist.get_rank() == 0:
        torch.save([asdict(trained) for trained in results], result)


def main() -> None:
    verb, *paths = sys.argv[1:]
    choose_deterministic_kernels()
    share_a_device()
    dist.init_process_group(backends())
    assert kind() != "cpu"
    if verb == "train":
        make_runs(*map(Path, paths))
    else:
        run_rank(Plan(**json.loads(Path(paths[0]).read_text())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
