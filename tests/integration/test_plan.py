"""The bytes that `paramserver plan` predicts are those that a store holds and asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from paramserver.config import DaemonConfig
from paramserver.contract.channel import channel_to
from paramserver.contract.sizes import least_size
from paramserver.contract.store_need import StoreNeed
from paramserver.store_need import find_need
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.integration.support.daemon import Daemon, tiers
from tests.integration.support.ranks import run_ranks
from tests.integration.support.waiting import wait_until
from trainer_client.config.loading import load_config
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.layout import Layout, World, lay_out
from trainer_client.plan.memory import MemoryPlan, plan_memory
from trainer_client.plan.model import build, find_builder
from trainer_client.plan.rehearsal import Rehearsal, rehearse
from trainer_client.plan.step_time import Traffic, find_traffic

MIB = 1 << 20
HOST_BUDGET = 64 * MIB
# The model whose boundaries move: each has 512 KiB.
WIDTH, TOKENS, BLOCKS = 64, 2048, 13
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "n_positions": 16,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def config(state_dir: Path, *, stage: int, homes: tuple[Any, Any], bf16: bool, **section: Any) -> dict[str, Any]:
    parameters, optimizer = homes
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "paramserver": {
            "state_dir": str(state_dir),
            "host_budget": HOST_BUDGET,
            "nvme_budget": "1GiB",
            "placement": {"parameters": parameters, "optimizer": optimizer},
            **section,
        },
    }


@contextmanager
def served(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the config of the same job at a running daemon, which starts much faster than one that the job starts.

    The daemon has the directory, the budgets and the number of sessions that the job's own daemon would have.
    """
    section = dict(raw["paramserver"])
    budgets = {key: section.pop(key) for key in ("host_budget", "nvme_budget")}
    sessions = DaemonConfig.model_fields["max_sessions"].default
    with Daemon(Path(section.pop("state_dir")), budgets | {"max_sessions": sessions}) as daemon:
        yield raw | {"paramserver": section | {"address": daemon.address}}


def planned(tmp_path: Path, raw: dict[str, Any], budget: int = HOST_BUDGET) -> tuple[Layout, StoreNeed]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    layout = lay_out(build(find_builder(str(path))), load_config(raw, {}), World(ranks=1))
    return layout, layout.store_need(find_need, budget)


def model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SHAPE))


def accounts(state_dir: Path) -> dict[str, dict[str, int]]:
    with channel_to(f"unix:{state_dir}/paramserver.sock") as channel:
        answer = admin_grpc.StoreAdminStub(channel).GetAccounts(admin_pb.GetAccountsRequest())
    host, nvme = ({one.holder: one.bytes for one in account.holdings} for account in answer.accounts)
    return {"host": host, "nvme": nvme}


@pytest.mark.parametrize(
    ("stage", "homes", "bf16"), [(3, ("nvme", "nvme"), True), (2, ("device", "host"), False)], ids=["nvme", "host"]
)
def test_the_bytes_of_a_plan_are_those_of_the_store(
    tmp_path: Path, stage: int, homes: tuple[str, str], bf16: bool
) -> None:
    raw = config(tmp_path / "state", stage=stage, homes=homes, bf16=bf16)
    layout, need = planned(tmp_path, raw)

    with served(raw) as job, trainer_client.initialize(model=model(), config=job)[0] as engine:
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.wait_for_commit()
        if homes[1] == "host":
            # The daemon takes back the leases of the step shortly after the commit.
            wait_until(lambda: accounts(tmp_path / "state")["host"]["jobs"] >= need.home_bytes)
        held = accounts(tmp_path / "state")
        placement = engine.placement()

    assert layout.rank_bytes() == placement
    assert held["nvme"]["jobs"] == need.written_bytes
    assert held["host"]["fixed"] == need.buffer_bytes + need.header_bytes
    if homes[1] == "host":
        assert held["host"]["jobs"] == need.home_bytes > 0
    else:
        assert need.home_bytes == 0


class Buffered(nn.Module):
    """A layer beside buffers of which two have no room in the client state of a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(600, 600, dtype=torch.bool))
        self.register_buffer("codes", torch.zeros(300, 601))
        self.register_buffer("small", torch.zeros(8))
        self.register_buffer("not_stored", torch.zeros(100), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(tokens).square().mean()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_buffers_of_a_plan_are_those_of_the_rank_and_of_the_store(tmp_path: Path, dtype: str | None) -> None:
    raw = config(tmp_path / "state", stage=3, homes=("nvme", "nvme"), bf16=False)
    raw["data_types"] = {"buffer_dtype": dtype}
    loaded = load_config(raw, {})
    with torch.device("meta"):
        layout = lay_out(Buffered(), loaded, World(ranks=1))
    memory = plan_memory("cpu", layout, loaded, Rehearsal(operations={}, flops=0, events=()), find_need)
    need = memory.store
    # The data file has some pages of its own.
    raw["paramserver"]["nvme_budget"] = need.nvme_bytes + MIB // 16

    with served(raw) as job, trainer_client.initialize(model=Buffered(), config=job)[0] as engine:
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
        engine.wait_for_commit()
        held = accounts(tmp_path / "state")
        on_device = sum(buffer.nbytes for buffer in engine.module.buffers())

    assert held["nvme"]["jobs"] == need.written_bytes
    (planned_bytes,) = (line.nbytes for line in memory.rank if line.what == "buffers of the model")
    assert planned_bytes == on_device > 500_000


@pytest.mark.parametrize(
    ("stage", "homes"), [(3, ("nvme", "nvme")), (3, ("host", "host")), (1, ("device", "nvme"))], ids=str
)
def test_the_bytes_that_a_plan_moves_are_those_of_the_step_report(
    tmp_path: Path, stage: int, homes: tuple[str, str]
) -> None:
    raw = config(tmp_path / "state", stage=stage, homes=homes, bf16=True)
    layout, _ = planned(tmp_path, raw)
    loaded = load_config(raw, {})
    memory = plan_memory("cpu", layout, loaded, Rehearsal(operations={}, flops=0, events=()), find_need)
    traffic = find_traffic(layout, memory, loaded, 1, is_cpu=True)

    with served(raw) as job, trainer_client.initialize(model=model(), config=job)[0] as engine:
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        # The first step learns the order of the units.
        for _ in range(3):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.wait_for_commit()
        report = engine.step_report()

    assert report is not None
    assert report.bytes["store_to_trainer"] == traffic.to_rank
    assert report.bytes["trainer_to_store"] == traffic.from_rank
    # The bytes that the store reads are not compared, because its scrubber reads meanwhile, too.
    assert traffic.nvme_read == 0


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["early updates", "clipping"])
def test_gradients_placed_on_nvme_are_written_as_often_as_a_plan_says(tmp_path: Path, clipping: float) -> None:
    raw = config(tmp_path / "state", stage=3, homes=("nvme", "nvme"), bf16=True)
    raw["paramserver"]["placement"]["gradients"] = "nvme"
    raw |= {"gradient_clipping": clipping, "gradient_accumulation_steps": 2}
    layout, need = planned(tmp_path, raw)
    raw["paramserver"]["nvme_budget"] = need.nvme_bytes + MIB // 16
    loaded = load_config(raw, {})
    memory = plan_memory("cpu", layout, loaded, Rehearsal(operations={}, flops=0, events=()), find_need)
    traffic = find_traffic(layout, memory, loaded, 2, is_cpu=True)
    address = f"unix:{tmp_path / 'state'}/paramserver.sock"

    with served(raw) as job, trainer_client.initialize(model=model(), config=job)[0] as engine:
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        written = 0
        for _ in range(3):
            before = tiers(address)[1].bytes_written
            for _ in range(2):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            engine.wait_for_commit()
            written = tiers(address)[1].bytes_written - before

    # One micro-batch or both leave gradients that no update has read yet.
    assert traffic.nvme_written == need.written_bytes + need.placed_gradient_bytes * (2 if clipping else 1)
    # The root's gradient is complete when a pass ends, and may be used by the next one before it is parked.
    (root,) = (unit.groups[0].group for unit in layout.units if not unit.fqn)
    of_root = -(-root.slot_table.partition_numel * root.gradient_dtype.itemsize // 4096) * 4096
    assert traffic.nvme_written - of_root <= written <= traffic.nvme_written


# The jobs of two ranks: stage, homes of parameters and optimizer states, micro-batches, keys of the section,
# the model.
JOBS: list[tuple[int, tuple[Any, Any], int, dict[str, Any], str]] = [
    (0, ("device", "device"), 2, {}, "Tower"),
    (1, ("device", "host"), 3, {}, "Tower"),
    (2, ("device", "device"), 3, {}, "Tower"),
    (2, ("device", "nvme"), 3, {}, "Tower"),
    (3, ("device", "device"), 3, {}, "Tower"),
    (3, ("device", "host"), 1, {}, "Tower"),
    (3, ("nvme", "nvme"), 3, {}, "Tower"),
    (3, ("nvme", "nvme"), 3, {"gather": "collective"}, "Tower"),
    (3, ({"device": 0.5, "host": 0.5}, "host"), 3, {}, "Tower"),
    (3, ("nvme", "nvme"), 2, {"gather": "collective"}, "Headed"),
    (3, ("nvme", "nvme"), 2, {"tiling": {"largest_tile": "8KiB"}}, "Tied"),
    (3, ("device", "host"), 2, {"tiling": {"largest_tile": "8KiB", "exclude": ["blocks.*"]}}, "Tied"),
]


def test_the_bytes_that_two_ranks_move_are_those_of_a_plan(tmp_path: Path) -> None:
    jobs = [
        {
            "model": model,
            "config": config(tmp_path / "of-a-job", stage=stage, homes=homes, bf16=False, **section)
            | {"gradient_accumulation_steps": micro_batches},
        }
        for stage, homes, micro_batches, section, model in JOBS
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))

    with Daemon(tmp_path / "state", {"host_budget": HOST_BUDGET, "nvme_budget": "1GiB"}) as daemon:
        run_ranks("tests.integration.support.planned_ranks", 2, path, daemon.address)


def test_the_smallest_host_budget_of_a_plan_is_the_one_that_the_daemon_asks_for(tmp_path: Path) -> None:
    homes = ("host", "host")
    raw = config(tmp_path / "state", stage=3, homes=homes, bf16=False)
    _, need = planned(tmp_path, raw)
    assert need.least_host_budget < HOST_BUDGET
    raw["paramserver"]["host_budget"] = need.least_host_budget - MIB // 2

    least = least_size(need.least_host_budget)
    with pytest.raises(trainer_client.errors.StoreError, match=f"host_budget to at least {least}"):
        trainer_client.initialize(model=model(), config=raw)


class Tower(nn.Module):
    """Blocks of which each is checkpointed, so that the boundaries are the inputs of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = tokens * 1.0
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()


def with_boundaries(
    tmp_path: Path, host_budget: int, *, recompute: bool = False
) -> tuple[dict[str, Any], MemoryPlan, Traffic, Rehearsal]:
    """Return a config that moves boundaries, and the plan for it."""
    raw = config(tmp_path / "state", stage=3, homes=("nvme", "nvme"), bf16=False)
    raw["paramserver"]["activations"] = {"smallest": 4096, "recompute": recompute}
    raw["paramserver"]["host_budget"] = host_budget
    raw["activation_checkpointing"] = {"cpu_checkpointing": True}
    loaded = load_config(raw, {})
    with torch.device("meta"):
        layout = lay_out(Tower(), loaded, World(ranks=1))
    rehearsed = rehearse(Tower, lambda _: {"tokens": torch.zeros(TOKENS, WIDTH)}, None, OffloadRule.of(loaded))
    memory = plan_memory("cpu", layout, loaded, rehearsed, find_need)
    return raw, memory, find_traffic(layout, memory, loaded, 1, is_cpu=True), rehearsed


@pytest.mark.parametrize(
    ("host_budget", "recompute"), [(64 * MIB, False), (6 * MIB, False), (64 * MIB, True)], ids=["host", "nvme", "again"]
)
def test_the_boundaries_of_a_plan_are_those_that_a_run_moves_and_spills(
    tmp_path: Path, host_budget: int, recompute: bool
) -> None:
    raw, memory, traffic, rehearsed = with_boundaries(tmp_path, host_budget, recompute=recompute)
    need = memory.store
    # The data file has some pages of its own.
    raw["paramserver"]["nvme_budget"] = need.nvme_bytes + MIB // 16
    assert bool(need.spilled_boundary_bytes) is (host_budget == 6 * MIB)
    assert bool(rehearsed.again_boundary_bytes) is recompute

    with served(raw) as job, trainer_client.initialize(model=Tower(), config=job)[0] as engine:
        loss = engine(torch.randn(TOKENS, WIDTH))
        address = f"unix:{tmp_path / 'state'}/paramserver.sock"
        # A spill may still be under way.
        wait_until(lambda: tiers(address)[1].activation_bytes == need.spilled_boundary_bytes)
        wait_until(lambda: tiers(address)[0].activation_bytes == need.boundary_host_bytes)
        engine.backward(loss)
        engine.step()
        first = engine.step_report()
        for _ in range(2):
            engine.backward(engine(torch.randn(TOKENS, WIDTH)))
            engine.step()
        engine.wait_for_commit()
        last = engine.step_report()

    assert first is not None and last is not None
    assert first.boundaries == {
        "kept": rehearsed.saved_boundary_bytes - traffic.boundaries - rehearsed.again_boundary_bytes,
        "moved": traffic.boundaries,
        "again": rehearsed.again_boundary_bytes,
        "spilled": traffic.spilled_boundaries,
    }
    # From the second step on a rank may let two boundaries stay.
    moved = last.boundaries["moved"]
    assert traffic.boundaries - max(rehearsed.boundaries) <= moved <= traffic.boundaries
    assert last.bytes["store_to_trainer"] - moved == traffic.to_rank - traffic.boundaries
    assert last.bytes["trainer_to_store"] - moved == traffic.from_rank - traffic.boundaries
    assert traffic.nvme_written == need.written_bytes + traffic.spilled_boundaries


def test_a_boundary_for_which_a_plan_has_no_room_on_nvme_stays_on_the_device(tmp_path: Path) -> None:
    raw, memory, traffic, _ = with_boundaries(tmp_path, 6 * MIB)
    raw["paramserver"]["nvme_budget"] = memory.store.nvme_bytes - MIB // 16

    with served(raw) as job, trainer_client.initialize(model=Tower(), config=job)[0] as engine:
        engine.backward(engine(torch.randn(TOKENS, WIDTH)))
        engine.step()
        report = engine.step_report()

    assert report is not None and 0 < report.boundaries["moved"] < traffic.boundaries
