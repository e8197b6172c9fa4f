"""One of some ranks that meet in collectives until the test ends them, or until one of them is silent.

`python -m tests.integration.support.silent_ranks DIRECTORY SECONDS COLLECTIVE`, with torchrun's environment variables.
SECONDS is the time after which a rank counts as silent, and COLLECTIVE one of MEETINGS. Each rank writes how it ended
to DIRECTORY/RANK.json. The file `busy` in the directory makes all ranks hold Python's lock most of the time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from paramserver.contract import silence
from trainer_client.errors import CollectiveError
from trainer_client.training.ranks.collectives import Collectives

BUSY_THREADS = 4


def meet_in_flags(collectives: Collectives, end: Path) -> bool:
    return collectives.any_rank([end.exists()])[0]


def meet_in_gather(collectives: Collectives, _: Path) -> bool:
    collectives.all_gather_flat(torch.empty(16 * collectives.world_size), torch.ones(16))
    return False


def meet_in_reduction(collectives: Collectives, _: Path) -> bool:
    collectives.reduce_scatter(torch.empty(16), torch.ones(16 * collectives.world_size))
    return False


def meet_at_the_end(collectives: Collectives, _: Path) -> bool:
    collectives.barrier("the end of the run")
    return False


def wait_beside(collectives: Collectives, end: Path) -> bool:
    """Wait for something else than the other ranks, as a thread does for replicas."""
    time.sleep(0.05)
    collectives.process_groups.require_others("a wait", time.monotonic())
    return end.exists()


# Ranks call one of these again and again; its result is whether they end.
MEETINGS = {
    "flags": meet_in_flags,
    "gather": meet_in_gather,
    "reduction": meet_in_reduction,
    "end": meet_at_the_end,
    "wait": wait_beside,
}


def burn(busy: Path) -> None:
    while not busy.with_name("end").exists():
        if busy.exists():
            sum(range(1_000_000))
        else:
            time.sleep(0.05)


def main() -> None:
    directory, seconds, meet = Path(sys.argv[1]), float(sys.argv[2]), MEETINGS[sys.argv[3]]
    silence.RANK_SECONDS = seconds
    dist.init_process_group("gloo")
    collectives = Collectives(torch.device("cpu"), timeout_seconds=600.0)
    for _ in range(BUSY_THREADS):
        threading.Thread(target=burn, args=(directory / "busy",), daemon=True).start()
    rank, text, ends = dist.get_rank(), "", False
    while not ends and not text:
        began = time.monotonic()
        try:
            ends = meet(collectives, directory / "end")
        except CollectiveError as error:
            text = str(error)
            # A run whose last barrier fails has committed all steps, so it only closes the collectives.
            if meet is not meet_at_the_end:
                collectives.process_groups.abandon("a meeting", error)
        (directory / f"begun-{rank}").touch()
    waited = time.monotonic() - began
    began = time.monotonic()
    collectives.close()
    closing = time.monotonic() - began
    (directory / f"{rank}.json").write_text(json.dumps({"text": text, "seconds": waited, "closing": closing}))


if __name__ == "__main__":
    main()
