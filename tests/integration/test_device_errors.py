"""A disk that refuses an operation reaches clients as such, at once, and the daemon's log as one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import Daemon, admin_of
from trainer_client import ConfigError, StoreClientSync, StoreDeviceError, TensorSpec

SPECS = {"a": TensorSpec(shape=(300_000,), dtype=torch.float32), "b": TensorSpec(shape=(5,), dtype=torch.float32)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("errors") / "state") as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture
def store(daemon: Daemon) -> Iterator[StoreClientSync]:
    with StoreClientSync.connect(daemon.address) as store:
        yield store


def values(step: int) -> dict[str, torch.Tensor]:
    return {fqn: torch.full(spec.shape, float(step)) for fqn, spec in SPECS.items()}


def test_a_commit_that_the_disk_refuses_says_so_and_can_be_made_once_it_works_again(
    daemon: Daemon, store: StoreClientSync, tmp_path: Path
) -> None:
    data = daemon.state_dir / "data.0"
    with store.open("commits", SPECS) as job:
        job.put(values(0))
        job.commit()
        job.put(values(1))
        data.rename(tmp_path / "away")
        with pytest.raises(StoreDeviceError, match=f"{data} does not lead to the file that this daemon has open"):
            job.commit()
        (tmp_path / "away").rename(data)
        assert job.roll_back() == 0
        job.put(values(1))
        assert job.commit() == 1
    with store.read("commits") as reader:
        assert torch.equal(reader.get("a"), values(1)["a"])


def test_a_get_and_a_list_of_gets_of_bytes_that_the_disk_refuses_say_so_at_once(
    daemon: Daemon, store: StoreClientSync
) -> None:
    data = daemon.state_dir / "data.0"
    with store.open("reads", SPECS) as job:
        job.put(values(0))
        job.commit()
    with store.read("reads") as reader:
        reader.tensors()
        with admin_of(daemon.address) as admin:
            admin.EvictCopies(admin_pb.EvictCopiesRequest(all_jobs=True), timeout=30)
        content = data.read_bytes()
        with data.open("r+b") as file:
            file.truncate(0)
        try:
            with pytest.raises(StoreDeviceError, match=r"data\.0 ends before byte \d+: it was truncated; restore it"):
                reader.get("a")
            with pytest.raises(StoreDeviceError, match="was truncated"):
                reader.get_many(list(SPECS))
        finally:
            data.write_bytes(content)
        assert torch.equal(reader.get("a"), values(0)["a"])


def test_arguments_that_cannot_be_sent_are_refused_by_name_at_each_call(store: StoreClientSync) -> None:
    with store.open("arguments", SPECS) as job:
        job.put(values(0))
        job.commit()
        for wrong, says in (
            (torch.zeros(5).to_sparse(), "sparse"),
            ([0.0] * 5, "list"),
            (torch.zeros(5, device="meta"), "meta"),
        ):
            with pytest.raises(ConfigError, match=f"tensor 'b' is .*{says}"):
                job.put({"b": wrong})  # type: ignore[dict-item]
        # A refused put leaves the step open.
        job.put({"b": torch.ones(5)})
        assert job.commit() == 1
    surrogate = "job\ud800"
    calls = (
        lambda: store.open(surrogate, SPECS),
        lambda: store.open("arguments", {surrogate: SPECS["b"]}),
        lambda: store.read(surrogate),
        lambda: store.read_kept("arguments", surrogate),
        lambda: store.list_tensors(surrogate),
        lambda: store.list_tensors("arguments", prefix=surrogate),
        lambda: store.watch(surrogate),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="cannot be encoded as UTF-8"):
            call()
    with store.read("arguments") as reader:
        for read in (reader.get, lambda fqn: reader.get_many(["a", fqn]), lambda fqn: reader.prefetch([fqn])):
            with pytest.raises(ConfigError, match="cannot be encoded as UTF-8"):
                read(surrogate)
        for out, says in (([0.0] * 5, "list"), (torch.zeros(5).to_sparse(), "sparse")):
            with pytest.raises(ConfigError, match=f"out is .*{says}"):
                reader.get("b", out=out)  # type: ignore[arg-type]
