"""One of some ranks that meet in collectives until the test ends them, or until one of them is silent.

`python -m tests.integration.support.silent_ranks DIRECTORY SECONDS`, with torchrun's environment variables. SECONDS is
the time after which a rank counts as silent. Each rank writes how it ended to DIRECTORY/RANK.json. The file `busy` in
the directory makes all ranks hold Python's lock most of the time.
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
from trainer_client.ranks.collectives import Collectives

BUSY_THREADS = 4


def burn(busy: Path) -> None:
    while not busy.with_name("end").exists():
        if busy.exists():
            sum(range(1_000_000))
        else:
            time.sleep(0.05)


def main() -> None:
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    silence.RANK_SECONDS = seconds
    dist.init_process_group("gloo")
    collectives = Collectives(torch.device("cpu"), timeout_seconds=600.0)
    for _ in range(BUSY_THREADS):
        threading.Thread(target=burn, args=(directory / "busy",), daemon=True).start()
    rank, text, ends = dist.get_rank(), "", False
    while not ends and not text:
        began = time.monotonic()
        try:
            (ends,) = collectives.any_rank([(directory / "end").exists()])
        except CollectiveError as error:
            text = str(error)
            collectives.abandon("a flag", error)
        (directory / f"begun-{rank}").touch()
    waited = time.monotonic() - began
    began = time.monotonic()
    collectives.close()
    closing = time.monotonic() - began
    (directory / f"{rank}.json").write_text(json.dumps({"text": text, "seconds": waited, "closing": closing}))


if __name__ == "__main__":
    main()
