"""One of two ranks that join a process group several times. Rank 0 leaves each one later than rank 1."""

from __future__ import annotations

import time

import torch

from trainer_client import comm

TIMES = 4


def main() -> None:
    for _ in range(TIMES):
        comm.init_distributed()
        total = torch.ones(1)
        comm.all_reduce(total)
        assert total.item() == comm.get_world_size()
        if comm.get_rank() == 0:
            time.sleep(0.5)
        comm.destroy_process_group()


if __name__ == "__main__":
    main()
