"""A rank of test_collectives.py: collectives on the device, as tasks of streams."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.device import lag

# torch 2.13 has new names for these two and warns about the old ones; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def values(device: torch.device, rank: int) -> dict[str, Any]:
    """Return the results of each collective."""
    mine = torch.full((3,), rank + 1.0, device=device)
    gathered = torch.empty(6, device=device)
    _all_gather(gathered, mine)
    part = torch.empty(3, device=device)
    _reduce_scatter(part, gathered.clone())
    summed = mine.clone()
    dist.all_reduce(summed)
    shown = mine.clone()
    dist.broadcast(shown, src=1)
    pieces = [torch.empty(3, device=device) for _ in range(2)]
    dist.all_gather(pieces, mine)
    on_host = torch.tensor([rank + 1.0])
    dist.all_reduce(on_host)
    dist.barrier()
    named = {"gathered": gathered, "part": part, "summed": summed, "shown": shown, "piece": pieces[1], "host": on_host}
    return {name: tensor.tolist() for name, tensor in named.items()}


def asynchronous(device: torch.device) -> dict[str, Any]:
    """Return what a late collective does to the host and to the stream that calls it."""
    torch.accelerator.synchronize()
    lag.set_lag(300)
    mine = torch.ones(3, device=device)
    began = time.monotonic()
    work = dist.all_reduce(mine, async_op=True)
    was_pending = not work.is_completed()
    work.wait()
    doubled = mine * 2
    seconds = time.monotonic() - began
    found = {"pending": was_pending, "host waited": seconds >= 0.3 and not was_pending, "doubled": doubled.tolist()}
    lag.set_lag(0)
    return found


def unordered(device: torch.device) -> list[list[str]]:
    """Return the races of a program that uses the result of an asynchronous collective without waiting for it."""
    mine = torch.ones(3, device=device)
    work = dist.all_reduce(mine, async_op=True)
    mine.mul(2)
    work.wait()
    torch.accelerator.synchronize()
    found = [[race.first, race.second] for race in lag.races()]
    lag.clear_races()
    return found


def streams_of_one_group(device: torch.device, rank: int) -> dict[str, Any]:
    """Return the results of one group's collectives on two streams of which another one lags on each rank."""
    side = torch.Stream(device=device)
    main = torch.accelerator.current_stream(device)
    lag.set_lag(100, main if rank else side)
    first, second = torch.full((2,), 1.0 + rank, device=device), torch.full((2,), 10.0 + rank, device=device)
    side.wait_stream(main)
    dist.all_reduce(first)
    with side:
        dist.all_reduce(second)
    main.wait_stream(side)
    return {"first": first.tolist(), "second": second.tolist()}


def main() -> None:
    result = Path(sys.argv[1])
    lag.load()
    dist.init_process_group("cpu:gloo,lag:lag")
    rank = dist.get_rank()
    torch.accelerator.set_device_index(rank)
    device = torch.device("lag", rank)
    lag.set_speed(lag.Engine.COLLECTIVE, bytes_per_second=1e3)
    with lag.recorded() as spans:
        found: dict[str, Any] = {
            "values": values(device, rank),
            "asynchronous": asynchronous(device),
            "races": unordered(device),
        }
        found["streams"] = streams_of_one_group(device, rank)
    gathers = [span for span in spans if span.name == "all_gather"]
    found["seconds of a gather"] = gathers[0].end - gathers[0].begin
    found["races at the end"] = [str(race) for race in lag.races()]
    result.with_suffix(f".{rank}").write_text(json.dumps(found))
    lag.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
