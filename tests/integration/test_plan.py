"""The bytes that `paramserver plan` predicts are those that a store holds and asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from paramserver.contract.channel import channel_to
from paramserver.contract.store_need import StoreNeed
from paramserver.store_need import find_need
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.integration.support.waiting import wait_until
from trainer_client.config.loading import load_config
from trainer_client.plan.layout import Layout, World, lay_out
from trainer_client.plan.memory import plan_memory
from trainer_client.plan.model import build, find_builder
from trainer_client.plan.rehearsal import Rehearsal
from trainer_client.plan.step_time import find_traffic

MIB = 1 << 20
HOST_BUDGET = 64 * MIB
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "n_positions": 16,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def config(state_dir: Path, *, stage: int, homes: tuple[str, str], bf16: bool, **section: Any) -> dict[str, Any]:
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

    engine, *_ = trainer_client.initialize(model=model(), config=raw)
    with engine:
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


@pytest.mark.parametrize(
    ("stage", "homes"), [(3, ("nvme", "nvme")), (3, ("host", "host")), (1, ("device", "nvme"))], ids=str
)
def test_the_bytes_that_a_plan_moves_are_those_of_the_step_report(
    tmp_path: Path, stage: int, homes: tuple[str, str]
) -> None:
    raw = config(tmp_path / "state", stage=stage, homes=homes, bf16=True)
    layout, _ = planned(tmp_path, raw)
    loaded = load_config(raw, {})
    memory = plan_memory("cpu", layout, loaded, Rehearsal(operations={}, flops=0, events=(), tokens=8), find_need)
    traffic = find_traffic(layout, memory, 1, 1.0, is_cpu=True)

    engine, *_ = trainer_client.initialize(model=model(), config=raw)
    with engine:
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


def test_the_smallest_host_budget_of_a_plan_is_the_one_that_the_daemon_asks_for(tmp_path: Path) -> None:
    homes = ("host", "host")
    raw = config(tmp_path / "state", stage=3, homes=homes, bf16=False)
    _, need = planned(tmp_path, raw)
    assert need.least_host_budget < HOST_BUDGET
    raw["paramserver"]["host_budget"] = need.least_host_budget - MIB // 2

    with pytest.raises(trainer_client.errors.StoreError, match=f"host_budget to at least {need.least_host_budget}"):
        trainer_client.initialize(model=model(), config=raw)
