"""Trains a few steps on the accelerator: `python -m tests.gpu.one_run PLACE`, for runs under a tool that watches them.

With TORCH_CUDA_SANITIZER=1 torch reports accesses of one tensor by two streams without an order, and ends the run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gpu.accelerator import kind
from tests.gpu.test_stages import FRACTIONS, config_of
from tests.integration.support.training import Run, store_config, train_through_store

PLACES = ("nvme", "host", "fractions")


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in PLACES:
        sys.exit(f"usage: python -m tests.gpu.one_run {{{','.join(PLACES)}}}")
    place = sys.argv[1]
    with TemporaryDirectory() as directory:
        state = Path(directory)
        config = (
            config_of(state, 3, placement=FRACTIONS)
            if place == "fractions"
            else store_config(state, {"host": "cpu", "nvme": "nvme"}[place])
        )
        result = train_through_store(Run(steps=4, accumulation=2, clipping=0.5, device=kind(), config=config))
    print(f"{place}: losses {result.losses}")


if __name__ == "__main__":
    main()
