"""Jobs whose gradients do not fit into the host budget: the same bits as with plenty of memory, in a bounded budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import MIB, Daemon, admin_of, tiers
from tests.integration.support.outliving import differences, make_plan, outlive
from tests.integration.support.training import Run, assert_bit_equal, launch, train_through_store, train_with_masters

LAYERS = 12
# The optimizer's smallest buffers are 1.75 MiB. Four layers' gradients and three layers take 1.4 MB, and all gradients
# 2.5 MB, for which the daemon would ask for 5 MB.
SMALL = 3584 << 10
PLENTY = 64 * MIB


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon with too little memory for all gradients, and one with plenty."""
    directory = tmp_path_factory.mktemp("gradients")
    with (
        Daemon(directory / "small", {"host_budget": SMALL, "nvme_budget": "1GiB"}) as small,
        Daemon(directory / "plenty", {"host_budget": PLENTY, "nvme_budget": "1GiB"}) as plenty,
    ):
        yield small, plenty


def config(daemon: Daemon, job: str, stage: int, **section: Any) -> dict[str, Any]:
    offload = {"device": "nvme"}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": offload}
    zero |= {"offload_param": offload} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "paramserver": {"address": daemon.address, "job": job, "durability": "step", **section},
    }


RUNS = {
    "stage 1": (1, Run()),
    "stage 2": (2, Run()),
    "stage 3": (3, Run()),
    "stage 1, clipping": (1, Run(clipping=0.5)),
    "stage 2, clipping": (2, Run(clipping=0.5)),
    "stage 3, clipping": (3, Run(clipping=0.5)),
    "stage 2, accumulation": (2, Run(accumulation=4)),
    "stage 3, accumulation": (3, Run(accumulation=4)),
    "stage 3, clipping, accumulation": (3, Run(clipping=0.5, accumulation=4)),
    "stage 1, clipping, boundary": (1, Run(clipping=0.5, accumulation=4, schedule_of_reduction="boundary")),
    "stage 3, fp16 skip": (3, Run(precision="fp16", poisoned_step=1, clipping=0.5)),
    "stage 2, fp16 skip, accumulation": (2, Run(precision="fp16", poisoned_step=1, accumulation=4)),
    "stage 3, bf16, checkpointed": (3, Run(precision="bf16", checkpointing="non-reentrant", clipping=0.5)),
    "stage 3, streams": (3, Run(prefer_streams=True, clipping=0.5, accumulation=2)),
}


def run_of(daemon: Daemon, name: str, world_size: int) -> Run:
    stage, run = RUNS[name]
    job = f"{name.replace(', ', '-').replace(' ', '-')}-{world_size}"
    return replace(run, layers=LAYERS, steps=3, with_masters=True, config=config(daemon, job, stage))


@pytest.mark.parametrize("world_size", [1, 2])
def test_spilled_gradients_give_the_bits_of_plenty_of_memory(
    daemons: tuple[Daemon, Daemon], tmp_path: Path, world_size: int
) -> None:
    small, plenty = daemons
    names = list(RUNS) if world_size == 2 else [name for name in RUNS if "boundary" not in name]
    results = {}
    for daemon in (small, plenty):
        written = tiers(daemon.address)[1].bytes_written
        runs = [run_of(daemon, name, world_size) for name in names]
        (tmp_path / daemon.address.rpartition("/")[0].rpartition("/")[2]).mkdir()
        results[daemon] = launch(runs, world_size, tmp_path), tiers(daemon.address)[1].bytes_written - written
    for name, found, expected in zip(names, results[small][0], results[plenty][0], strict=True):
        try:
            assert_bit_equal(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    # Both have written the same versions, and only the small one has written gradients.
    assert results[small][1] > results[plenty][1] + len(names) * MIB
    for daemon in daemons:
        assert_nothing_left(daemon)


@pytest.mark.parametrize("name", ["stage 3, clipping", "stage 3, fp16 skip"])
def test_spilled_gradients_give_the_bits_of_torch(daemons: tuple[Daemon, Daemon], name: str) -> None:
    run = run_of(daemons[0], name, 1)
    run = replace(run, config=run.config | {"paramserver": run.config["paramserver"] | {"job": f"torch {name}"}})
    assert_bit_equal(train_through_store(run), train_with_masters(run))
    assert_nothing_left(daemons[0])


def assert_nothing_left(daemon: Daemon) -> None:
    """Check that no gradient and no lease is left, and that a holder explains every byte."""
    until = time.monotonic() + 30
    while True:
        with admin_of(daemon.address) as admin:
            accounts = admin.GetAccounts(admin_pb.GetAccountsRequest(), timeout=30).accounts
        left = [
            (pb.Tier.Name(account.tier), holding.holder, holding.bytes)
            for account in accounts
            for holding in account.holdings
            if holding.holder in ("leases", "under way", "quarantine") and holding.bytes
        ]
        host, nvme = tiers(daemon.address)
        if (
            not left
            and host.gradient_bytes == nvme.gradient_bytes == 0
            and not any(a.unexplained_bytes for a in accounts)
        ):
            return
        assert time.monotonic() < until, (left, host.gradient_bytes, nvme.gradient_bytes, accounts)
        time.sleep(0.05)


@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_daemon_is_killed_with_parked_gradients(tmp_path: Path, kept: int, clipping: float) -> None:
    """With copies in the ranks the run goes on; without them it resumes from its last commit. The bits are the same."""
    section = {"durability": "step", "kept_gradients": kept}
    job = {
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "paramserver": section,
    }
    fields: dict[str, Any] = {"steps": 3, "layers": LAYERS, "accumulation": 2}
    whole = outlive(make_plan(tmp_path / "whole", job, **fields, daemon={"host_budget": PLENTY}), 2)
    kills = [(2, "after backward 1"), (3, "backward")] if kept else []
    small = {"host_budget": 4 * MIB}
    found = outlive(make_plan(tmp_path / "small", job, **fields, daemon=small, kills=kills), 2)
    assert differences(found, whole) == []
    assert all(len(result["restarts"]) >= (1 if kept else 0) for result in found)
