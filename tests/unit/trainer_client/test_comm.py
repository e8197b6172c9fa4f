"""A process finds the ranks of its run as torchrun names them; alone, it is a run of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.integration.support.ranks import free_port
from trainer_client import comm, initialize, zero
from trainer_client.errors import ConfigError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_SIZE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that no launcher has started, and that has no process group."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()


def test_a_process_alone_is_a_run_of_one_rank() -> None:
    comm.init_distributed()
    comm.init_distributed()

    assert (comm.get_rank(), comm.get_world_size(), comm.get_local_rank()) == (0, 1, 0)
    assert comm.is_initialized()
    comm.destroy_process_group()
    assert not comm.is_initialized()


def test_the_first_collective_of_a_process_alone_makes_its_group() -> None:
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, False)
    values, rows, part = torch.arange(4.0), torch.zeros(4), torch.zeros(4)

    comm.all_reduce(values, op=comm.ReduceOp.SUM)
    comm.all_gather_into_tensor(rows, values)
    comm.reduce_scatter_tensor(part, rows)
    comm.barrier()

    assert torch.equal(values, torch.arange(4.0))
    assert torch.equal(part, values)
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == [0]
    assert comm.get_global_rank(comm.new_group([0]), 0) == 0


def test_the_ranks_of_a_launcher_have_to_join_before_they_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert (comm.get_rank(), comm.get_world_size()) == (1, 2)
    with pytest.raises(RuntimeError, match=r"init_distributed\(\) or initialize\(\)"):
        comm.barrier()


def test_a_missing_port_is_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")

    comm.init_distributed(distributed_port=free_port())

    assert comm.get_world_size() == 1


def test_rank_and_address_may_be_arguments() -> None:
    comm.init_distributed("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)

    assert dist.get_backend() == "gloo"


def test_ranks_of_mpi_are_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")

    with pytest.raises(ConfigError, match=r"torchrun.* RANK=\$OMPI_COMM_WORLD_RANK WORLD_SIZE=\$OMPI_COMM_WORLD_SIZE"):
        comm.init_distributed()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    comm.init_distributed()


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(ConfigError, match="dist_backend='mpi'"):
        comm.init_distributed("mpi")
    with pytest.raises(ConfigError, match="dist_init_required=False"):
        comm.init_distributed(dist_init_required=False)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no GPU"):
            comm.init_distributed("nccl")


def test_names_that_are_missing_say_where_they_are() -> None:
    with pytest.raises(AttributeError, match=r"step_report"):
        comm.log_summary  # noqa: B018
    with pytest.raises(AttributeError, match=r"use torch\.distributed\.all_gather_coalesced"):
        comm.all_gather_coalesced  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'al_reduce'"):
        comm.al_reduce  # noqa: B018


def test_a_group_of_one_rank_where_a_launcher_has_started_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would train the whole model on its own otherwise."""
    comm.init_distributed()
    comm.require_launched_group()
    with zero.Init():
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")

    with pytest.raises(ConfigError, match="WORLD_SIZE=8, but the process group of torch"):
        zero.Init()
    with pytest.raises(ConfigError, match=r"call init_distributed\(\) on every rank"):
        initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    assert [comm.contradiction(1, {"WORLD_SIZE": value}) for value in ("", "1", "many")] == [None] * 3
    assert comm.contradiction(8, {"WORLD_SIZE": "8"}) is None
