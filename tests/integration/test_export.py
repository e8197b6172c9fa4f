"""A step of a trained job is exported from the store alone, and the frameworks of the formats load the same bits."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import fsspec
import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from typer.testing import CliRunner

import trainer_client
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind
from tests.integration.support.daemon import MIB, Daemon, admin_of
from tests.integration.support.forked import ROOT, Forked
from tests.integration.support.model_runs import config_of, optimizer_of, start, train
from tests.integration.support.ranks import run_ranks
from tests.integration.support.store_client import Clients
from tests.integration.support.training import Run, build_model, micro_batches
from tests.integration.support.waiting import wait_until
from tests.integration.support.zoo import ZOO
from tests.unit.storage.builders import Layout, reference_of
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.errors import StoreNotFoundError
from trainer_client.exchange import cli
from trainer_client.exchange.destination import CHECKSUMS
from trainer_client.exchange.export import (
    DTYPES,
    ExportResult,
    Format,
    TensorProgress,
    WeightDType,
    begin_export,
    export_step,
)
from trainer_client.exchange.import_checkpoint import import_checkpoint
from trainer_client.training.run import client_state

JOB, OTHER_JOB = "gpt2", "normalised"
STEPS = 2
SHOWN_ADDRESS = "unix:/nvme/paramserver/paramserver.sock"

# This program loads exports as people do who do not have this project: with transformers alone.
LOAD = """
import sys
import torch
from transformers import GPT2LMHeadModel
tokens, results, *exports = sys.argv[1:]
logits = {}
for export in exports:
    name, dtype, directory = export.split("=")
    model, info = GPT2LMHeadModel.from_pretrained(directory, dtype=getattr(torch, dtype), output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits[name] = model.eval()(input_ids=torch.load(tokens)).logits
assert not any(name.partition(".")[0] in ("paramserver", "trainer_client", "storage") for name in sys.modules)
torch.save(logits, results)
"""


class Normalised(nn.Module):
    """A model with buffers that training changes, a tied weight, a frozen one, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12, bias=False)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 12, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(12, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.last(self.norm(self.first(inputs)))).square().mean() * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Two jobs after some steps, and what their engines said of them.

    Attributes:
        address: the store.
        directory: a directory with a config and with weights of another time.
        tokens: a batch.
        logits: the engine's logits for it, in bf16.
        weights: the fp32 weights of JOB.
        moments: its optimizer states, by name and kind.
        other: the whole state dict of OTHER_JOB.
    """

    address: str
    directory: Path
    tokens: torch.Tensor
    logits: torch.Tensor
    weights: dict[str, torch.Tensor]
    moments: dict[tuple[str, str], torch.Tensor]
    other: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp("model")
    tokens, *batches = micro_batches(1 + STEPS)
    with Daemon(tmp_path_factory.mktemp("export") / "state", {"host_budget": "64MiB"}) as daemon:
        model = build_model(Run())
        model.config.save_pretrained(directory)
        (directory / "model.safetensors").write_bytes(b"weights of another time")
        with start(model, config_of(daemon.address, JOB) | {"bf16": {"enabled": True}}) as engine:
            train(engine, batches)
            engine.eval()
            with torch.no_grad():
                logits = engine(input_ids=tokens).logits
            weights = engine.full_state_dict()
            names = [name for name, _ in model.named_parameters()]
            moments = {
                (name, kind): value
                for name in names
                for kind in ("exp_avg", "exp_avg_sq")
                if (value := engine.get_full(name, kind)) is not None
            }
        with start(Normalised(), config_of(daemon.address, OTHER_JOB)) as engine:
            engine.backward(engine(torch.randn(8, 12)))
            engine.step()
            other = engine.full_state_dict()
        yield Trained(
            address=daemon.address,
            directory=directory,
            tokens=tokens,
            logits=logits,
            weights=weights,
            moments=moments,
            other=other,
        )
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors whose bits, types or shapes differ, and of those that only one dict has."""
    common = actual.keys() & expected.keys()
    wrong = {name for name in common if actual[name].dtype != expected[name].dtype}
    wrong |= {name for name in common - wrong if not torch.equal(actual[name], expected[name])}
    return sorted(wrong | (actual.keys() ^ expected.keys()))


def assert_checksums_hold(directory: Path) -> None:
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=directory, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(checked.stdout.splitlines()) == len(list(directory.iterdir())) - 1


def test_transformers_loads_the_bits_without_this_package(trained: Trained, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paramserver", "export", "--job", JOB, "--json", "--with", str(trained.directory)]
    done = subprocess.run(
        [*command, "--step", str(STEPS), str(tmp_path / "whole")],
        cwd=ROOT,
        env=os.environ | {"PARAMSERVER_ADDRESS": trained.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["job"], result["step"], result["format"]) == (JOB, STEPS, "safetensors")
    assert {file["name"] for file in result["files"]} == {"config.json", "model.safetensors"}
    export_step(
        trained.address, JOB, None, tmp_path / "fp32", dtype="fp32", max_shard_bytes=100_000,
        extra_files=[trained.directory / "config.json"],
    )  # fmt: skip
    assert len(list(tmp_path.glob("fp32/model-0*-of-0*.safetensors"))) > 2

    tokens, results = tmp_path / "tokens.pt", tmp_path / "logits.pt"
    torch.save(trained.tokens, tokens)
    exports = [f"bf16=bfloat16={tmp_path / 'whole'}", f"fp32=float32={tmp_path / 'fp32'}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, tokens, results, *exports],
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    logits = torch.load(results)
    plain = build_model(Run()).eval()
    plain.load_state_dict(trained.weights)
    assert torch.equal(logits["bf16"], trained.logits)
    with torch.no_grad():
        assert torch.equal(logits["fp32"], plain(input_ids=trained.tokens).logits)
    for name in ("whole", "fp32"):
        assert_checksums_hold(tmp_path / name)


def test_the_library_reads_the_safetensors_with_their_types(trained: Trained, tmp_path: Path) -> None:
    expected = dict(trained.weights)
    del expected["lm_head.weight"]  # The name of a tied weight that the file does not repeat.
    for name in get_args(WeightDType):
        result = export_step(trained.address, JOB, None, tmp_path / name, dtype=name)
        assert result.tensors == len(expected)
        found = load_file(tmp_path / name / "model.safetensors")
        assert differing(found, {key: value.to(DTYPES[name]) for key, value in expected.items()}) == []
    with safe_open(tmp_path / "bf16" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    export_step(trained.address, OTHER_JOB, None, tmp_path / "other")
    del (other := dict(trained.other))["last.weight"]
    assert differing(load_file(tmp_path / "other" / "model.safetensors"), other) == []


@contextmanager
def one_process() -> Iterator[None]:
    """Expect torch's warning that a checkpoint is loaded without a process group."""
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        yield


def test_dcp_loads_into_a_plain_model_and_into_fsdp2_with_the_optimizer(trained: Trained, tmp_path: Path) -> None:
    checkpoint = tmp_path / "dcp"
    export_step(trained.address, JOB, None, checkpoint, format="dcp", optimizer=True)
    assert_checksums_hold(checkpoint)
    plain = build_model(Run())
    state: dict[str, Any] = {"model": plain.state_dict()}
    with one_process():
        load(state, checkpoint_id=checkpoint)
    plain.load_state_dict(state["model"])
    assert differing(dict(plain.state_dict()), trained.weights) == []

    run_ranks("tests.integration.support.fsdp_ranks", 2, checkpoint, tmp_path / "loaded.pt", tmp_path / "back")

    loaded = torch.load(tmp_path / "loaded.pt")
    assert differing(loaded["model"], trained.weights) == []
    states = loaded["optimizer"]["state"]
    found = {(name, kind): states[name][kind] for name, kind in trained.moments}
    assert [key for key, value in trained.moments.items() if not torch.equal(found[key], value)] == []
    assert {float(state["step"]) for state in states.values()} == {float(STEPS)}
    (group,) = loaded["optimizer"]["param_groups"]
    assert group["lr"] == optimizer_of(plain).param_groups[0]["lr"]
    assert differing(loaded["trained"], trained.weights), "the step after the load changed nothing"

    imported = import_checkpoint(trained.address, "from FSDP2", tmp_path / "back", exclude=["lm_head.weight"])
    assert (imported.step, imported.states) == (STEPS + 1, ("exp_avg", "exp_avg_sq"))
    with StoreClientSync.connect(trained.address) as client, client.read("from FSDP2") as reader:
        names = [tensor.fqn for tensor in reader.tensors()]
        expected = {name: value for name, value in loaded["trained"].items() if name != "lm_head.weight"}
        assert differing({name: reader.get(name) for name in names}, expected) == []
        for kind in imported.states:
            states = {name: values[kind] for name, values in loaded["states"]["state"].items() if name in names}
            assert differing({name: reader.get(name, kind=kind) for name in names}, states) == []


def test_dcp_has_buffers_tied_and_frozen_parameters(trained: Trained, tmp_path: Path) -> None:
    export_step(trained.address, OTHER_JOB, None, tmp_path / "dcp", format="dcp", optimizer=True)
    model = Normalised()
    optimizer = optimizer_of(model)
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with one_process():
        load(state, checkpoint_id=tmp_path / "dcp")
    assert differing(dict(state["model"]), trained.other) == []
    assert state["optimizer"]["state"].keys() == {"first.weight", "norm.weight", "norm.bias", "scale"}


@pytest.mark.parametrize(
    ("optimizer_class", "options", "states"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.Adagrad, {}, {"step", "sum"}),
        (trainer_client.Lion, {"betas": (0.9, 0.99)}, {"exp_avg"}),
    ],
)
def test_dcp_has_the_states_of_each_optimizer(
    trained: Trained, tmp_path: Path, optimizer_class: type[Any], options: dict[str, Any], states: set[str]
) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(40, 3)
        return model, optimizer_class(
            [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1, **options
        )

    model, optimizer = make()
    job = optimizer_class.__name__
    config = config_of(trained.address, job)
    with trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        for _ in range(2):
            engine.backward(engine(torch.randn(8, 40)).square().mean())
            engine.step()
        kinds = states - {"step"}
        expected = {(name, kind): engine.get_full(name, kind) for name in ("weight", "bias") for kind in kinds}
    export_step(trained.address, job, None, tmp_path / "dcp", format="dcp", optimizer=True)
    model, optimizer = make()
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with one_process():
        load(state, checkpoint_id=tmp_path / "dcp")
    loaded = state["optimizer"]["state"]
    assert {name: set(found) for name, found in loaded.items()} == {"weight": states, "bias": states}
    assert all(torch.equal(loaded[name][kind], value) for (name, kind), value in expected.items() if value is not None)
    assert all(float(found.get("step", 2.0)) == 2.0 for found in loaded.values())
    groups = state["optimizer"]["param_groups"]
    assert [(group["params"], group["lr"]) for group in groups] == [(["weight"], 0.1), (["bias"], 0.5)]


def test_the_fp32_file_loads_strictly_and_stays_tied(trained: Trained, tmp_path: Path) -> None:
    export_step(trained.address, JOB, None, tmp_path / "gpt2", format="deepspeed-fp32")
    path = tmp_path / "gpt2" / "pytorch_model.bin"
    for mmap in (False, True):
        state = torch.load(path, weights_only=True, mmap=mmap)
        assert differing(state, trained.weights) == []
        assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
        assert all(tensor.data_ptr() % 64 == 0 for tensor in state.values())
        build_model(Run()).load_state_dict(state, strict=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None

    export_step(trained.address, OTHER_JOB, None, tmp_path / "other", format="deepspeed-fp32", max_shard_bytes=300)
    index = json.loads((tmp_path / "other" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == trained.other.keys()
    parts = [torch.load(tmp_path / "other" / name, weights_only=True) for name in {*index["weight_map"].values()}]
    assert len(parts) > 1
    assert differing({name: tensor for part in parts for name, tensor in part.items()}, trained.other) == []


def test_an_export_is_one_step_while_a_trainer_commits_further_ones(trained: Trained, tmp_path: Path) -> None:
    committed: dict[int, dict[str, torch.Tensor]] = {}
    exported: list[ExportResult] = []
    (batch,) = micro_batches(1)
    with start(build_model(Run()), config_of(trained.address, "beside")) as engine:
        pending = None
        while len(exported) < 3:
            train(engine, [batch])
            engine.wait_for_commit()
            committed[engine.global_steps] = engine.full_state_dict()
            if pending is None:
                pending = begin_export(trained.address, "beside", None, tmp_path / f"{len(exported)}", dtype="fp32")
                assert pending.staged.result(60) == engine.global_steps
            elif pending.persisted.done():
                exported.append(pending.persisted.result())
                pending = None
        last = engine.global_steps
    assert last > exported[-1].step, "no step was committed during an export"
    for number, result in enumerate(exported):
        expected = committed[result.step]
        del expected["lm_head.weight"]
        assert differing(load_file(tmp_path / f"{number}" / "model.safetensors"), expected) == []


def test_the_thread_of_an_export_has_a_lower_priority_than_its_caller(trained: Trained, tmp_path: Path) -> None:
    committed: Future[None] = Future()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    pending = begin_export(trained.address, JOB, None, tmp_path / "later", committed=committed)
    pending.accepted.result(60)
    (exporting,) = (thread for thread in threading.enumerate() if thread.name == f"export {JOB}")
    assert exporting.native_id is not None
    niceness = os.getpriority(os.PRIO_PROCESS, exporting.native_id)
    committed.set_result(None)
    pending.persisted.result(60)
    assert niceness == min(own + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_an_export_goes_on_where_priorities_cannot_be_changed(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    pending = begin_export(trained.address, JOB, None, tmp_path / "export")
    assert pending.persisted.result(60).step == STEPS


def test_an_engine_exports_a_step_while_it_trains(trained: Trained, tmp_path: Path) -> None:
    (batch,) = micro_batches(1)
    with start(build_model(Run()), config_of(trained.address, "from the engine")) as engine:
        train(engine, [batch])
        expected = engine.full_state_dict()
        first = engine.export("safetensors", tmp_path / "first", dtype="fp32")
        train(engine, [batch])
        with pytest.raises(trainer_client.ExportError, match="exists"):
            engine.export("safetensors", trained.directory)
        train(engine, [batch] * 3)
        last = engine.export("deepspeed-fp32", tmp_path / "last")
        newest = engine.full_state_dict()
    assert first is not None and last is not None
    assert [pending.staged.result(0) for pending in (first, last)] == [1, 5]
    # The engine has waited for the exports.
    assert last.persisted.done()
    del expected["lm_head.weight"]
    assert differing(load_file(tmp_path / "first" / "model.safetensors"), expected) == []
    assert differing(torch.load(tmp_path / "last" / "pytorch_model.bin", weights_only=True), newest) == []


def test_two_ranks_export_each_step_while_they_train(trained: Trained, tmp_path: Path) -> None:
    run_ranks("tests.integration.support.exporting_ranks", 2, trained.address, tmp_path)


# peft 0.21 gives this warning with transformers 5.23.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_an_adapter_that_was_exported_alone(trained: Trained, tmp_path: Path) -> None:
    (batch,) = micro_batches(1)
    torch.manual_seed(3)
    base = ZOO["gpt2-zoo"]()
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True, init_lora_weights=False
    )
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with start(model, config_of(trained.address, "adapted")) as engine:
        train(engine, [batch] * 2)
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=batch).logits
        pending = engine.export("safetensors", tmp_path / "by engine", adapter="default")
        assert pending is not None
    run_cli("--address", trained.address, "--job", "adapted", "--adapter", "default", tmp_path / "by command")
    wrong = run_cli("--address", trained.address, "--job", "adapted", "--adapter", "other", tmp_path / "no", code=2)
    assert "has no adapter 'other'; its adapters: 'default'" in wrong
    assert "the format is dcp" in run_cli(
        "--address", trained.address, "--job", "adapted", "--adapter", "default", "--format", "dcp", tmp_path, code=2
    )
    for name in ("by engine", "by command"):
        assert_checksums_hold(tmp_path / name)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).eval()
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=batch).logits, logits)


@pytest.mark.parametrize("format", get_args(Format))
def test_a_full_disk_or_an_interruption_leaves_nothing(trained: Trained, tmp_path: Path, format: Format) -> None:
    def interrupt(progress: TensorProgress) -> None:
        assert progress.total_bytes > 0
        if progress.read_bytes > progress.total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_step(trained.address, JOB, None, tmp_path / "export", format=format, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(trainer_client.ExportError, match="File too large"):
            export_step(trained.address, JOB, None, tmp_path / "export", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def run_cli(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_says_what_is_wrong(trained: Trained, tmp_path: Path) -> None:
    export: list[str | Path] = ["--address", trained.address, "--job", JOB, tmp_path / "export"]
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").write_text("precious")

    wrong_job = run_cli("--address", trained.address, "--job", "gtp2", tmp_path / "export", code=1)
    assert "has no job 'gtp2'; its jobs: " in wrong_job and f"'{JOB}', '{OTHER_JOB}'" in wrong_job
    assert f"does not have step 77; the store has the steps: {STEPS}" in run_cli(*export, "--step", "77", code=1)
    assert "--address" in run_cli("--job", JOB, tmp_path / "export", code=2)
    assert "no URL that fsspec can write to" in run_cli(*export[:-1], "nowhere://bucket/there", code=2)
    assert "'many' is not a size" in run_cli(*export, "--max-shard-size", "many", code=2)
    assert "has no optimizer states" in run_cli(*export, "--optimizer", code=2)
    assert "whose weights are fp32" in run_cli(*export, "--format", "deepspeed-fp32", "--dtype", "bf16", code=2)
    assert "neither a file nor a directory" in run_cli(*export, "--with", tmp_path / "no", code=2)
    assert "File name too long" in run_cli(*export, "--with", tmp_path / ("x" * 300), code=2)
    assert "exists: choose another name" in run_cli(*export[:-1], there, code=1)
    assert "is not an export" in run_cli(*export[:-1], there, "--overwrite", code=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "there"]

    assert f"step {STEPS} of {JOB}" in run_cli(*export)
    assert "exists" in run_cli(*export, code=1)
    run_cli(*export, "--overwrite", "--dtype", "fp16")
    assert load_file(tmp_path / "export" / "model.safetensors")["transformer.wte.weight"].dtype is torch.float16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "there"]


@pytest.mark.parametrize("name", [b"two\nlines", b"back\\slash", b"caf\xe9.json"])
def test_a_file_that_checksums_cannot_name_is_refused_at_once(trained: Trained, tmp_path: Path, name: bytes) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / os.fsdecode(name)).write_text("a configuration")
    read: list[TensorProgress] = []
    with pytest.raises(trainer_client.ConfigError, match="does not fit into a line: rename it"):
        export_step(
            *(trained.address, JOB, None, tmp_path / "export"),
            extra_files=[tmp_path / "with"],
            on_progress=read.append,
        )
    assert not read and not (tmp_path / "export").exists()


def test_the_commands_and_the_script_of_the_page_run(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
    commands, _ = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    _, script, back = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert SHOWN_ADDRESS in commands and SHOWN_ADDRESS in script
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARAMSERVER_ADDRESS", trained.address)
    (tmp_path / "gpt2-config").symlink_to(trained.directory)
    lines = [shlex.split(line) for line in commands.splitlines() if line.startswith("paramserver")]
    for _, verb, *arguments in lines:
        assert verb == "export"
        assert f"step {STEPS} of {JOB}" in run_cli(*arguments)
    exec(script.replace(SHOWN_ADDRESS, trained.address), {})
    exec(back.replace(SHOWN_ADDRESS, trained.address), {})
    exports = [arguments[-1] for arguments in lines] + ["exports/newest", "exports/later"]
    assert all((tmp_path / export / CHECKSUMS).is_file() for export in exports)


def test_a_url_is_complete_once_it_has_its_checksums(trained: Trained) -> None:
    url = "memory://exports/gpt2"
    files = fsspec.filesystem("memory")

    def interrupt(progress: TensorProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_step(trained.address, JOB, None, url, format="dcp", on_progress=interrupt)
    assert not files.find("/exports")
    for name in get_args(Format):
        export_step(trained.address, JOB, None, url, format=name, overwrite=True)
        sums = files.cat(f"/exports/gpt2/{CHECKSUMS}").decode().splitlines()
        assert len(sums) == len(files.find("/exports/gpt2")) - 1
        for digest, path in (line.split("  ") for line in sums):
            assert hashlib.sha256(files.cat(f"/exports/gpt2/{path}")).hexdigest() == digest
    with pytest.raises(trainer_client.ExportError, match="exists"):
        export_step(trained.address, JOB, None, url)


def test_the_stores_of_all_nodes_give_one_export(tmp_path: Path) -> None:
    layout = Layout(name="spread", precision=DType.BFLOAT16)
    with ExitStack() as opened:
        daemons = [opened.enter_context(Daemon(tmp_path / f"state-{node}")) for node in range(2)]
        addresses = [daemon.address for daemon in daemons]
        for number, address in enumerate(addresses):
            rank = opened.enter_context(Clients(address)).rank(layout, rank=number, ranks=2)
            rank.open(attached_ranks=1, layout="two nodes")
            rank.register()
            rank.stage_all()
            counters = {"global_steps": 0, "train_batch_size": 1}
            state = client_state.encode({"counters": counters, "update_counts": [0] * 6, "optimizer": None})
            rank.call("CommitStep", step=0, client_state=state)
        for address in addresses:
            with pytest.raises(StoreNotFoundError, match="give the address of each store of the job"):
                export_step(address, "spread", None, tmp_path / "export")
        for number, stores in enumerate((addresses, addresses[::-1])):
            export_step(stores, "spread", None, tmp_path / f"{number}", dtype="fp32")
            found = load_file(tmp_path / f"{number}" / "model.safetensors")
            expected = reference_of(layout).states(0)
            masters = {fqn: value for (_, fqn, kind), value in expected.items() if kind is Kind.MASTER}
            assert differing(found, masters) == []


def test_stores_that_keep_different_steps_under_one_name_are_refused(tmp_path: Path) -> None:
    with ExitStack() as opened:
        addresses = [opened.enter_context(Daemon(tmp_path / f"state-{node}")).address for node in range(2)]
        for newest, address in enumerate(addresses):
            with (
                StoreClientSync.connect(address) as client,
                client.open("kept", {"weight": torch.zeros(4)}) as writer,
                admin_of(address) as admin,
            ):
                for step in range(newest + 1):
                    writer.put({"weight": torch.full((4,), float(step))})
                    writer.commit()
                admin.KeepStep(admin_pb.KeepStepRequest(job="kept", name="best"), timeout=10)
        with pytest.raises(StoreNotFoundError, match=r"different steps .*'best' \(0 at .*, 1 at .*\): keep one step"):
            export_step(addresses, "kept", None, tmp_path / "export", kept="best")
        assert export_step(addresses[1], "kept", None, tmp_path / "export", kept="best").step == 1


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    # The daemon is stopped, so that the export waits for its answer when the signal comes.
    with Daemon(tmp_path / "state") as daemon:
        arguments = ["export", "--address", daemon.address, "--job", JOB, str(tmp_path / "exports" / "gpt2")]
        daemon.process.send_signal(signal.SIGSTOP)
        process = Forked("paramserver.cli", arguments, environment=os.environ, log=tmp_path / "log")
        wait_until(lambda: list(tmp_path.glob("exports/.gpt2.*.partial")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert list((tmp_path / "exports").iterdir()) == []


def test_the_memory_of_an_export_does_not_grow_with_the_model(tmp_path: Path) -> None:
    tensors = {f"weights.{number}": torch.randn(4 * MIB, 2) for number in range(3)}
    tensors |= {"large": torch.randn(3, 8 * MIB)} | {f"small.{number}": torch.randn(300) for number in range(5000)}
    config = {"host_budget": "64MiB", "nvme_budget": "512MiB"}
    with Daemon(tmp_path / "state", config) as daemon:
        with trainer_client.StoreClientSync.connect(daemon.address) as store:
            for name, values in {"small": {"weight": torch.ones(4)}, "large": tensors}.items():
                with store.open(name, values) as job:
                    job.put(values)
                    job.commit()
        report, log = tmp_path / "report.json", tmp_path / "log"
        arguments = [daemon.address, "small", "large", str(tmp_path / "exports"), str(report)]
        process = Forked("tests.integration.support.exporting", arguments, environment=os.environ, log=log)
        assert process.wait(200) == 0, log.read_text()
    peaks = json.loads(report.read_text())
    grown = {name: (peak - peaks["before"]) // MIB for name, peak in peaks.items()}
    # The tensors have 198 MiB, and the largest has 96 MiB. An export has one buffer of 32 MiB, and it maps the arena,
    # whose 64 MiB count as its memory where it has read from them.
    assert max(grown.values()) < 128, grown
    found = load_file(tmp_path / "exports" / "safetensors" / "model.safetensors")
    assert differing(found, tensors) == []
