"""Checkpoints of other frameworks become jobs of a store, and training goes on from them as their own run would."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

import trainer_client
from tests.integration.support.daemon import MIB, Daemon
from tests.integration.support.deepspeed_checkpoint import Layout, write_checkpoint
from tests.integration.support.equality import assert_equal
from tests.integration.support.forked import ROOT
from tests.integration.support.imported_run import BATCH, global_batch
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import Run, build_model
from tests.integration.support.waiting import wait_until
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.errors import ImportCheckpointError, JobConflictError
from trainer_client.exchange import import_cli
from trainer_client.exchange.export import TensorProgress, WeightDType, export_step
from trainer_client.exchange.import_checkpoint import import_checkpoint
from trainer_client.schedules import WarmupLR

SCHEDULE: dict[str, Any] = {
    "warmup_min_lr": 1e-3,
    "warmup_max_lr": 2e-2,
    "warmup_num_steps": 8,
    "warmup_type": "linear",
}
SHOWN_ADDRESS = "unix:/nvme/paramserver/paramserver.sock"


class Mixed(nn.Module):
    """A model with a tied weight, a frozen one, statistics, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13, bias=False)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.norm = nn.BatchNorm1d(13)
        self.inner = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)])
        self.last = nn.Linear(13, 13, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.first(inputs)))
        for layer in self.inner:
            hidden = hidden + torch.tanh(layer(hidden))
        return (self.last(hidden) * self.scale - 1).square().mean()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Daemon(tmp_path_factory.mktemp("import") / "state", {"host_budget": "64MiB"}) as daemon:
        yield daemon.address
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log


def make_mixed() -> nn.Module:
    torch.manual_seed(5)
    return Mixed().train()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(8, 13, generator=torch.Generator().manual_seed(step))


def resume(address: str, job: str, model: nn.Module) -> trainer_client.Engine:
    return trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config_of(address, job))[0]


def config_of(address: str, job: str, **config: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3},
        "scheduler": {"type": "WarmupLR", "params": SCHEDULE},
        "paramserver": {"address": address, "job": job, "durability": "step"},
    } | config


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: WarmupLR, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(inputs_of(step))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


def train(engine: trainer_client.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(inputs_of(step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def committed_step(address: str, job: str) -> int | None:
    with StoreClientSync.connect(address) as client:
        return next(stored.step for stored in client.list_jobs() if stored.name == job)


def jobs_of(address: str) -> list[str]:
    with StoreClientSync.connect(address) as client:
        return [job.name for job in client.list_jobs()]


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_run_of_deepspeed_goes_on_bit_for_bit(address: str, tmp_path: Path, layout: Layout) -> None:
    model = make_mixed()
    optimizer = optimizer_of(model)
    schedule = WarmupLR(optimizer, **SCHEDULE)
    train_plain(model, optimizer, schedule, range(3))
    write_checkpoint(
        tmp_path / "ck", model, optimizer, layout=layout, ranks=3, step=3, samples=24,
        scheduler={"last_batch_iteration": schedule.last_batch_iteration}, client_state={"cursor": [3, "train"]},
    )  # fmt: skip
    expected = train_plain(model, optimizer, schedule, range(3, 6))

    job = f"taken over, {layout}"
    result = import_checkpoint(address, job, tmp_path / "ck")
    assert (result.format, result.step, result.states) == ("deepspeed", 3, ("exp_avg", "exp_avg_sq"))
    other = Mixed()
    with trainer_client.initialize(model=other, optimizer=optimizer_of(other), config=config_of(address, job))[
        0
    ] as engine:
        assert (engine.global_steps, engine.global_samples) == (3, 24)
        assert engine.client_state == {"cursor": [3, "train"]}
        assert train(engine, range(3, 6)) == expected
        assert_equal(engine.full_state_dict(), model.state_dict())
        squares = engine.get_full("first.weight", "exp_avg_sq")
        assert squares is not None
        assert torch.equal(squares, optimizer.state[model.get_parameter("first.weight")]["exp_avg_sq"])


def test_the_weights_alone_are_imported_whatever_states_the_optimizer_has(address: str, tmp_path: Path) -> None:
    model = make_mixed()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True)
    train_plain(model, optimizer, WarmupLR(optimizer, **SCHEDULE), range(2))
    kinds = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    write_checkpoint(tmp_path, model, optimizer, layout="stage 3", ranks=2, step=2, samples=16, kinds=kinds)
    with pytest.raises(ImportCheckpointError, match="a state 'max_exp_avg_sq', which no optimizer here has"):
        import_checkpoint(address, "amsgrad", tmp_path / "global_step2")
    result = import_checkpoint(address, "amsgrad", tmp_path / "global_step2", weights_only=True)
    assert (result.step, result.states) == (0, ())
    with resume(address, "amsgrad", Mixed()) as engine:
        assert_equal(engine.full_state_dict(), model.state_dict())


def test_a_run_begins_with_a_checkpoint_and_its_own_daemon(tmp_path: Path) -> None:
    model = make_mixed()
    optimizer = optimizer_of(model)
    schedule = WarmupLR(optimizer, **SCHEDULE)
    train_plain(model, optimizer, schedule, range(2))
    path = write_checkpoint(
        tmp_path / "ck", model, optimizer, layout="stage 3", ranks=2, step=2, samples=16,
        scheduler={"last_batch_iteration": schedule.last_batch_iteration},
    )  # fmt: skip
    config = config_of("", "own")
    config["paramserver"] = {"state_dir": str(tmp_path / "state"), "host_budget": "64MiB", "nvme_budget": "1GiB"}
    losses = []
    for steps in (range(2, 3), range(3, 4)):
        other = Mixed()
        engine = trainer_client.initialize(
            model=other, optimizer=optimizer_of(other), config=config, checkpoint=path.parent
        )[0]
        with engine:
            assert engine.global_steps == steps.start
            losses += train(engine, steps)
        # The second run goes on from the job, so that it needs no checkpoint any more.
        shutil.rmtree(path.parent, ignore_errors=True)
    assert losses == train_plain(model, optimizer, schedule, range(2, 4))
    with pytest.raises(trainer_client.ConfigError, match="pass one of them"):
        trainer_client.initialize(model=Mixed(), config=config, checkpoint=path, weights=path)


def test_a_run_begins_with_a_checkpoint_only_where_resume_allows_it(address: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "pytorch_model.bin"
    torch.save(make_mixed().state_dict(), checkpoint)

    def begin(resume: str) -> None:
        config = config_of(address, "once")
        config["paramserver"]["resume"] = resume
        model = Mixed()
        engine = trainer_client.initialize(
            model=model, optimizer=optimizer_of(model), config=config, checkpoint=checkpoint
        )[0]
        with engine:
            assert engine.global_steps == 0

    with pytest.raises(trainer_client.StoreNotFoundError, match="resume is 'must'"):
        begin("must")
    assert committed_step(address, "once") is None
    begin("never")
    with pytest.raises(trainer_client.JobConflictError, match="resume is 'never'"):
        begin("never")
    begin("must")


def test_the_loss_scale_and_the_hyper_parameters_are_taken_over(address: str, tmp_path: Path) -> None:
    model = make_mixed()
    optimizer = optimizer_of(model)
    schedule = WarmupLR(optimizer, **SCHEDULE)
    train_plain(model, optimizer, schedule, range(1))
    optimizer.param_groups[0]["weight_decay"] = 0.25
    write_checkpoint(tmp_path, model, optimizer, layout="stage 2", ranks=2, step=1, samples=8)
    import_checkpoint(address, "scaled", tmp_path / "global_step1")
    config = config_of(address, "scaled", fp16={"enabled": True, "hysteresis": 2})
    other = Mixed()
    engine = trainer_client.initialize(model=other, optimizer=optimizer_of(other), config=config)[0]
    with engine:
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.25
        assert engine.loss_scaler.state_dict() == {
            "scale": 512.0,
            "patience": 2,
            "good_steps": 4,
            "steps": 4,
            "dynamic": True,
        }


def test_an_export_comes_back_and_goes_on_bit_for_bit(address: str, tmp_path: Path) -> None:
    model = make_mixed()
    with trainer_client.initialize(model=model, optimizer=optimizer_of(model), config=config_of(address, "whole"))[
        0
    ] as engine:
        train(engine, range(2))
        engine.wait_for_commit()
        export_step(address, "whole", None, tmp_path / "dcp", format="dcp", optimizer=True)
        for name in ("safetensors", "deepspeed-fp32"):
            export_step(address, "whole", None, tmp_path / name, format=name)
        weights = engine.full_state_dict()
        expected = train(engine, range(2, 4))
        after = engine.full_state_dict()

    result = import_checkpoint(address, "back", tmp_path / "dcp")
    assert (result.format, result.step, result.states) == ("dcp", 2, ("exp_avg", "exp_avg_sq"))
    assert result.committed_step == committed_step(address, "back") == 2
    other = make_mixed()
    for module in (other.norm, other.frozen):
        # DCP has no list of what is a buffer, so the statistics come from the tensors' names.
        module.load_state_dict({key: torch.zeros_like(value) for key, value in module.state_dict().items()})
    with resume(address, "back", other) as engine:
        # The schedule is no part of a DCP checkpoint.
        engine.lr_scheduler.load_state_dict({"last_batch_iteration": 1})
        assert train(engine, range(2, 4)) == expected
        assert_equal(engine.full_state_dict(), after)

    for name in ("safetensors", "deepspeed-fp32"):
        result = import_checkpoint(address, f"from {name}", tmp_path / name)
        assert (result.step, result.states) == (0, ())
        assert result.committed_step == committed_step(address, result.job) == 1
        other = Mixed()
        with resume(address, f"from {name}", other) as engine:
            assert engine.global_steps == 0
            assert_equal(engine.full_state_dict(), weights)
            train(engine, range(1))


# torch says so, although `no_dist` asks for it.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_torch_is_taken_over(address: str, tmp_path: Path) -> None:
    model = make_mixed()
    optimizer = optimizer_of(model)
    schedule = WarmupLR(optimizer, **SCHEDULE)
    train_plain(model, optimizer, schedule, range(2))
    states = get_optimizer_state_dict(model, optimizer)
    save({"app": {"model": get_model_state_dict(model), "optim": states}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = train_plain(model, optimizer, schedule, range(2, 4))
    result = import_checkpoint(address, "torch", tmp_path / "dcp", exclude=["last.weight"])
    assert (result.step, result.left_out) == (2, ("last.weight",))
    other = Mixed()
    with trainer_client.initialize(model=other, optimizer=optimizer_of(other), config=config_of(address, "torch"))[
        0
    ] as engine:
        engine.lr_scheduler.load_state_dict({"last_batch_iteration": 1})
        assert train(engine, range(2, 4)) == expected
        assert_equal(engine.full_state_dict(), model.state_dict())


# torch says so, although `no_dist` asks for it.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_states_without_the_names_of_weights_are_refused_and_the_weights_alone_are_not(
    address: str, tmp_path: Path
) -> None:
    model = make_mixed()
    optimizer = optimizer_of(model)
    train_plain(model, optimizer, WarmupLR(optimizer, **SCHEDULE), range(3))
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    before = jobs_of(address)
    with pytest.raises(ImportCheckpointError, match=r"states of '0' and 9 more, and no weight of such a name"):
        import_checkpoint(address, "numbered", tmp_path)
    assert jobs_of(address) == before
    result = import_checkpoint(address, "numbered", tmp_path, exclude=["last.weight"], weights_only=True)
    assert (result.step, result.states) == (0, ())
    with resume(address, "numbered", Mixed()) as engine:
        assert_equal(engine.full_state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_states_of_torch_that_no_optimizer_here_has_are_refused(address: str, tmp_path: Path) -> None:
    model = make_mixed()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True)
    train_plain(model, optimizer, WarmupLR(optimizer, **SCHEDULE), range(2))
    states = get_optimizer_state_dict(model, optimizer)
    save({"model": get_model_state_dict(model), "optim": states}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ImportCheckpointError, match="a state 'max_exp_avg_sq', which no optimizer here has"):
        import_checkpoint(address, "amsgrad of torch", tmp_path, exclude=["last.weight"])
    result = import_checkpoint(address, "amsgrad of torch", tmp_path, exclude=["last.weight"], weights_only=True)
    assert (result.step, result.states) == (0, ())
    with resume(address, "amsgrad of torch", Mixed()) as engine:
        assert_equal(engine.full_state_dict(), model.state_dict())


def test_any_number_of_ranks_goes_on(address: str, tmp_path: Path) -> None:
    model = build_model(Run())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(5):
        if step == 2:
            write_checkpoint(tmp_path / "ck", model, optimizer, layout="stage 3", ranks=2, step=2, samples=2 * BATCH)
        batch = global_batch(step)
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    import_checkpoint(address, "ranks", tmp_path / "ck")
    found: list[float] = []
    for ranks, until in ((2, 3), (3, 4), (1, 5)):
        run_ranks("tests.integration.support.imported_run", ranks, address, "ranks", str(until), tmp_path / "losses")
        found += json.loads((tmp_path / "losses").read_text())
    assert found == pytest.approx(losses[2:], rel=1e-5)


def test_nothing_is_left_of_an_import_that_fails(address: str, tmp_path: Path) -> None:
    save_file({"weight": torch.randn(1 << 20), "bias": torch.randn(9)}, tmp_path / "model.safetensors")
    before = jobs_of(address)

    def interrupt(progress: TensorProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(address, "broken", tmp_path, on_progress=interrupt)
    wait_until(lambda: jobs_of(address) == before)

    def cut(progress: TensorProgress) -> None:
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(1000)

    save_file({f"{n}.weight": torch.randn(1 << 20) for n in range(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ImportCheckpointError, match="the file ends within tensor"):
        import_checkpoint(address, "broken", tmp_path, on_progress=cut)
    wait_until(lambda: jobs_of(address) == before)

    save_file({"weight": torch.randn(64)}, tmp_path / "model.safetensors")
    import_checkpoint(address, "broken", tmp_path)
    with pytest.raises(JobConflictError, match="use another job name, or delete the job"):
        import_checkpoint(address, "broken", tmp_path)


def test_low_precision_weights_stay_as_they_are_and_urls_are_read(address: str, tmp_path: Path) -> None:
    weights = {"a": torch.randn(300, 7).bfloat16(), "b": torch.randn(40).bfloat16(), "steps": torch.tensor(3)}
    save_file(weights, tmp_path / "model.safetensors")
    files = fsspec.filesystem("memory")
    files.pipe("/models/small/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    import_checkpoint(address, "low", "memory://models/small", device="host")
    import_checkpoint(address, "converted", tmp_path, dtype="fp32")
    with StoreClientSync.connect(address) as client:
        for job, dtype in (("low", torch.bfloat16), ("converted", torch.float32)):
            with client.read(job) as reader:
                assert {tensor.fqn: tensor.kinds for tensor in reader.tensors()} == {
                    "a": {"param": dtype},
                    "b": {"param": dtype},
                }
                assert torch.equal(reader.get("a"), weights["a"].to(dtype))


def test_a_parameter_without_elements_is_exported_from_an_imported_job(address: str, tmp_path: Path) -> None:
    weights = {"a": torch.randn(3), "empty": torch.zeros(0, 4), "b": torch.randn(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    import_checkpoint(address, "empty", tmp_path)
    export_step(address, "empty", None, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())


def test_the_memory_of_an_import_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    tensors = {f"{n}.weight": torch.randn(12 << 20) for n in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    del tensors
    peaks: list[int] = []

    def note(progress: TensorProgress) -> None:
        status = Path("/proc/self/status").read_text()
        peaks.append(int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) << 10)

    with Daemon(tmp_path / "state", {"host_budget": "64MiB", "nvme_budget": "1GiB"}) as daemon:
        cases: list[tuple[str, WeightDType | None]] = [
            ("model.safetensors", None),
            ("model.safetensors", "bf16"),
            ("pytorch_model.bin", "bf16"),
        ]
        for name, dtype in cases:
            before = len(peaks)
            job = f"{name} as {dtype}"
            import_checkpoint(daemon.address, job, tmp_path / name, dtype=dtype, on_progress=note)
            # The tensors have 48 MiB each. The first report comes after a piece, so it has the buffers already.
            assert max(peaks[before:]) - peaks[before] < 24 * MIB


def run_cli(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(import_cli.app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_says_what_is_wrong_and_what_was_done(address: str, tmp_path: Path) -> None:
    save_file({"weight": torch.randn(64), "spare": torch.randn(2)}, tmp_path / "model.safetensors")
    command: list[str | Path] = ["--address", address, "--job", "by command", tmp_path]
    assert "--address" in run_cli("--job", "x", tmp_path, code=2)
    assert "does not exist" in run_cli(*command[:-1], tmp_path / "no", code=2)
    assert "File name too long" in run_cli(*command[:-1], tmp_path / ("x" * 300), code=2)
    assert "no URL that fsspec can read" in run_cli(*command[:-1], "nowhere://bucket/there", code=2)
    assert "matches no name" in run_cli(*command, "--exclude", "head.*", code=2)
    assert "durability 'often'" in run_cli(*command, "--durability", "often", code=2)
    assert "no checkpoint of the tag 'last'" in run_cli(*command, "--tag", "last", code=1)
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint that is read" in run_cli(*command[:-1], tmp_path / "empty", code=1)
    result = json.loads(run_cli(*command, "--json", "--exclude", "spare").splitlines()[-1])
    assert (result["job"], result["format"], result["tensors"], result["left_out"]) == (
        "by command",
        "safetensors",
        1,
        ["spare"],
    )
    assert "use another job name" in run_cli(*command, code=1)


def test_the_commands_of_the_pages_run(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARAMSERVER_ADDRESS", address)
    model = make_mixed()
    optimizer = optimizer_of(model)
    train_plain(model, optimizer, WarmupLR(optimizer, **SCHEDULE), range(2))
    write_checkpoint(tmp_path / "checkpoints", model, optimizer, layout="stage 2", ranks=2, step=2, samples=16)
    (tmp_path / "model").mkdir()
    save_file(
        make_mixed().state_dict() | {"last.weight": torch.zeros(13, 13)}, tmp_path / "model" / "model.safetensors"
    )
    count = 0
    for page in ("exchange.md", "deepspeed.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for line in text.splitlines():
            if line.startswith("paramserver import"):
                run_cli(*shlex.split(line)[2:], "--job", f"page {count}")
                count += 1
    assert count >= 3
