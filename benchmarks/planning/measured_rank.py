"""One rank of a measured job: it trains some steps, and writes what they took and what memory there was.

`paramserver launch` runs it as `python measured_rank.py SPEC.json`; the keys of the specification are those of
`Job.spec` in cases.py. Rank 0 also asks the daemon for its tiers and accounts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trainer_client
from paramserver.contract.channel import channel_to
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from trainer_client import zero

SAMPLE_SECONDS = 0.004


class PeakMemory:
    """The most private memory (RssAnon) of this process since the last `reset`, in bytes."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Return the private memory now."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10

    def reset(self) -> None:
        """Begin anew."""
        self.peak = 0

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(SAMPLE_SECONDS)


def ask_daemon(state_dir: str) -> dict[str, Any]:
    """Return the bytes of each tier by holder, as `paramserver-admin accounts` shows them."""
    with channel_to(f"unix:{state_dir}/paramserver.sock") as channel:
        accounts = admin_grpc.StoreAdminStub(channel).GetAccounts(admin_pb.GetAccountsRequest()).accounts
    return {
        str(account.tier): {"used": account.used_bytes, **{one.holder: one.bytes for one in account.holdings}}
        for account in accounts
    }


def main() -> None:
    """Train as the specification says."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    config = AutoConfig.from_pretrained(spec["model"])
    config.use_cache = False
    memory = PeakMemory()
    # The first product makes the threads and buffers of torch's libraries.
    torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    with zero.Init(seed=1):
        causal: Any = AutoModelForCausalLM
        model = causal.from_config(config)
    # The model has no memory yet, and its modules are imported.
    bare = memory.now()
    engine, *_ = trainer_client.initialize(model=model, config=spec["config"])
    seconds, reports = [], []
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, config.vocab_size, (spec["batch"], spec["tokens"]), generator=generator)
    memory.reset()
    for _ in range(spec["steps"]):
        began = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
    peak = memory.peak - bare
    engine.wait_for_commit()
    report = engine.step_report()
    reports.append(report.to_dict() if report is not None else {})
    placement = engine.placement()
    found = ask_daemon(spec["state_dir"]) if rank == 0 else {}
    engine.close()
    result = {
        "seconds": seconds,
        "bare_bytes": bare,
        "peak_bytes": peak,
        "placement": placement,
        "accounts": found,
        "report": reports[-1],
    }
    Path(spec["result"] + f".{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
