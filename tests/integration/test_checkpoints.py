"""`save_checkpoint` and `load_checkpoint`: a loaded run goes on with the bits of the run that saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import trainer_client
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.checkpoint_ranks import SAVED_AT, STEPS, Net, batch, config_of, micro_steps, start, steps
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.equality import assert_equal
from tests.integration.support.ranks import run_ranks
from trainer_client import Engine
from trainer_client.errors import (
    CheckpointError,
    ConfigError,
    ImportCheckpointError,
    OtherModelError,
    StoreBudgetError,
    StoreNotFoundError,
)
from trainer_client.exchange.export import Format, export_step
from trainer_client.exchange.import_checkpoint import import_checkpoint
from trainer_client.training.model.plain_state import MAX_BUFFER_BYTES
from trainer_client.training.run.checkpoint_files import MANIFEST
from trainer_client.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint


@pytest.fixture
def address(model_store: str, job: str) -> Iterator[str]:
    yield model_store
    with admin_of(model_store) as store:
        for info in store.ListJobs(admin_pb.ListJobsRequest()).jobs:
            if info.name.startswith(job):
                store.DeleteJob(admin_pb.DeleteJobRequest(job=info.name))


def kept_in(address: str, job: str) -> list[admin_pb.KeptStep]:
    with admin_of(address) as store:
        return list(store.ListKeptSteps(admin_pb.ListKeptStepsRequest(job=job)).kept)


def assert_equal_weights(engine: Engine, expected: dict[str, torch.Tensor]) -> None:
    assert_equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_loaded_run_has_the_bits_of_the_one_that_saved(
    address: str, job: str, tmp_path: Path, half: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(3)
    with start(config_of(address, job, half=half)) as engine:
        list(steps(engine, SAVED_AT))
        user = {"epoch": 2, "best": torch.tensor([1.5]), "pair": (1, "a")}
        assert engine.save_checkpoint(tmp_path, client_state=user)
        at_save = engine.full_state_dict()
        # The steps after the save use random numbers, and change nothing of what a load restores.
        losses = list(steps(engine, STEPS))
        weights = engine.full_state_dict()
        moments = engine.get_full("first.weight", "exp_avg_sq")
        assert (tmp_path / "latest").read_text() == f"global_step{SAVED_AT}"

        for target in ("here", "a fresh job"):
            again = engine if target == "here" else start(config_of(address, f"{job}-new", half=half))
            path, state = again.load_checkpoint(tmp_path)
            assert path == str(tmp_path / f"global_step{SAVED_AT}" / MANIFEST)
            assert f"paramserver: loaded {path}: the next step is {SAVED_AT + 1}" in caplog.text
            caplog.clear()
            assert state is not None and (state["epoch"], state["pair"]) == (2, (1, "a"))
            assert torch.equal(state["best"], torch.tensor([1.5]))
            assert (again.global_steps, again.client_state) == (SAVED_AT, {"cursor": SAVED_AT})
            assert list(steps(again, STEPS)) == losses
            assert_equal_weights(again, weights)
            found = again.get_full("first.weight", "exp_avg_sq")
            assert found is not None and moments is not None and torch.equal(found, moments)
            if again is not engine:
                again.close()
    # The checkpoint is exported by the name that its manifest has, whatever the job has done since.
    manifest = json.loads((tmp_path / f"global_step{SAVED_AT}" / MANIFEST).read_text())["checkpoint"]
    exported = export_step(address, job, None, tmp_path / "out", format="deepspeed-fp32", kept=manifest["kept"])
    assert exported.step == manifest["step"]
    weights_at_save = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(value, at_save[name]) for name, value in weights_at_save.items())
    # The run resumes after its loaded step, not from the checkpoint.
    with start(config_of(address, job, half=half)) as engine:
        assert engine.resumed_step == STEPS
        assert torch.equal(engine.full_state_dict()["first.weight"], weights["first.weight"])


def test_a_run_exports_a_checkpoint_that_it_has_saved(address: str, job: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    with start(config_of(address, job)) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path)
        at_save = engine.full_state_dict()
        list(steps(engine, STEPS))
        manifest = json.loads((tmp_path / f"global_step{SAVED_AT}" / MANIFEST).read_text())["checkpoint"]
        pending = engine.export("deepspeed-fp32", tmp_path / "kept", kept=manifest["kept"])
        newest = engine.export("deepspeed-fp32", tmp_path / "newest")
        assert pending is not None and newest is not None
        assert pending.persisted.result(60).step == pending.staged.result() == manifest["step"] == SAVED_AT
        assert newest.persisted.result(60).step == STEPS
        wrong = engine.export("deepspeed-fp32", tmp_path / "none", kept="never")
        assert wrong is not None
        with pytest.raises(StoreNotFoundError, match="never"):
            wrong.persisted.result(60)
        list(steps(engine, STEPS + 1))
    weights = torch.load(tmp_path / "kept" / "pytorch_model.bin", weights_only=True)
    assert weights and all(torch.equal(value, at_save[name]) for name, value in weights.items())


@pytest.mark.parametrize("at", ["after a backward", "between micro-batches", "after a forward"])
def test_a_checkpoint_within_a_step_has_the_state_before_the_step(
    address: str, job: str, tmp_path: Path, at: str
) -> None:
    torch.manual_seed(3)
    config = config_of(address, job) | {"gradient_accumulation_steps": 2}
    with start(config) as engine:
        list(micro_steps(engine, 3))
        weights, seen = engine.full_state_dict(), engine.module.get_buffer("seen").clone()
        loss = engine(batch(engine.micro_steps))
        if at != "after a forward":
            engine.backward(loss)
        if at == "between micro-batches":
            engine.step()
        engine.save_checkpoint(tmp_path)
        if at == "after a forward":
            engine.backward(loss)
        if at != "between micro-batches":
            engine.step()
        losses = [loss.item(), *micro_steps(engine, 5)]
        after = engine.full_state_dict()
    with start(config_of(address, f"{job}-new") | {"gradient_accumulation_steps": 2}) as engine:
        engine.load_checkpoint(tmp_path)
        assert (engine.global_steps, engine.micro_steps) == (3, 6)
        assert_equal_weights(engine, weights | {"seen": seen})
        assert list(micro_steps(engine, 5)) == losses
        assert_equal_weights(engine, after)


def test_a_checkpoint_within_a_step_needs_no_commit_of_each_step(address: str, job: str, tmp_path: Path) -> None:
    config = config_of(address, job, durability="none") | {"gradient_accumulation_steps": 2}
    config["zero_optimization"] = {"stage": 1}
    with start(config) as engine:
        list(micro_steps(engine, 3))
        weights = engine.full_state_dict()
        engine.backward(engine(batch(engine.micro_steps)))
        engine.step()
        engine.save_checkpoint(tmp_path)
        list(micro_steps(engine, 5))
        engine.load_checkpoint(tmp_path)
        assert (engine.global_steps, engine.micro_steps) == (3, 6)
        weights["seen"] = engine.module.get_buffer("seen").clone()
        assert_equal_weights(engine, weights)


def test_a_checkpoint_has_all_buffers(address: str, job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WithStatistics(Net):
        """A net with a buffer for which a commit has no room."""

        statistics: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("statistics", torch.zeros(MAX_BUFFER_BYTES))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.statistics += hidden.float().mean()
            return super().forward(hidden) + self.statistics[-1]

    with start(config_of(address, job), WithStatistics()) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path)
        at_save = engine.full_state_dict()
        assert "the values of this moment" not in caplog.text
        losses = list(steps(engine, STEPS))
        # Within a step, the buffer has the value of the save.
        engine.backward(engine(batch(STEPS)))
        engine.save_checkpoint(tmp_path, "within", save_latest=False)
        assert "buffers have the values of this moment, and not those at the end of the last step" in caplog.text
        within = engine.module.get_buffer("statistics").clone()
        caplog.clear()
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path)["statistics"], at_save["statistics"])
    with start(config_of(address, f"{job}-new"), WithStatistics()) as engine:
        engine.load_checkpoint(tmp_path)
        assert_equal_weights(engine, at_save)
        assert list(steps(engine, STEPS)) == losses
        engine.load_checkpoint(tmp_path, "within")
        assert torch.equal(engine.module.get_buffer("statistics"), within)
        assert "which stay" not in caplog.text


def test_a_checkpoint_without_a_directory_is_refused(address: str, job: str) -> None:
    with start(config_of(address, job)) as engine:
        for nowhere in ("", None):
            with pytest.raises(ConfigError, match="name the directory of the checkpoints"):
                engine.save_checkpoint(nowhere)  # type: ignore[arg-type]


def test_any_number_of_ranks_goes_on_from_the_same_values(address: str, job: str, tmp_path: Path) -> None:
    module = "tests.integration.support.checkpoint_ranks"
    tag = f"global_step{SAVED_AT}"
    run_ranks(module, 2, address, job, tmp_path, tmp_path / "saved")
    run_ranks(module, 2, address, f"{job}-2", tmp_path, tmp_path / "loaded", tag)
    for rank in range(2):
        saved = torch.load(tmp_path / f"saved.{rank}", weights_only=True)
        loaded = torch.load(tmp_path / f"loaded.{rank}", weights_only=True)
        # Each rank has its own random numbers and its own state.
        assert loaded["state"] == {"rank": rank} and loaded["losses"] == saved["losses"]
        assert all(torch.equal(value, saved["weights"][name]) for name, value in loaded["weights"].items())
    at_save = torch.load(tmp_path / "saved.0", weights_only=True)["at_save"]
    with start(config_of(address, f"{job}-1")) as engine:
        _, state = engine.load_checkpoint(tmp_path, tag)
        assert state == {"rank": 0} and engine.global_steps == SAVED_AT
        assert_equal_weights(engine, at_save)
        losses = list(steps(engine, STEPS))
    # One rank has saved and two load: they have the values, and one of them new random numbers.
    with start(config_of(address, f"{job}-1")) as engine:
        engine.load_checkpoint(tmp_path, tag)
        engine.save_checkpoint(tmp_path, "by one")
        assert list(steps(engine, STEPS)) == losses
    run_ranks(module, 2, address, f"{job}-3", tmp_path, tmp_path / "loaded", "by one")
    loaded = torch.load(tmp_path / "loaded.1", weights_only=True)
    for name, value in at_save.items():
        assert torch.equal(loaded["at_save"][name], value)


def test_the_parts_of_a_step_are_kept_in_the_stores_of_all_nodes(daemon: Daemon, job: str, tmp_path: Path) -> None:
    module = "tests.integration.support.checkpoint_ranks"
    tag = f"global_step{SAVED_AT}"
    with Daemon(tmp_path / "other", {"host_budget": "48MiB", "nvme_budget": "64MiB"}) as other:
        run_ranks(module, 2, f"{daemon.address},{other.address}", job, tmp_path, tmp_path / "saved")
        saved = torch.load(tmp_path / "saved.0", weights_only=True)
        stores = json.loads((tmp_path / tag / MANIFEST).read_text())["checkpoint"]["stores"]
        assert [store["address"] for store in stores] == [daemon.address, other.address]
        assert [len(kept_in(store["address"], job)) for store in stores] == [1, 1]
        # One rank finds the other node's store by the manifest.
        with start(config_of(daemon.address, f"{job}-1")) as engine:
            engine.load_checkpoint(tmp_path, tag)
            assert_equal_weights(engine, saved["at_save"])
    with start(config_of(daemon.address, f"{job}-1")) as engine:
        with pytest.raises(CheckpointError, match=r"1 of 2 were reached, and they lack: .*first\."):
            engine.load_checkpoint(tmp_path, tag)
        assert engine.global_steps == SAVED_AT


def test_parts_of_a_checkpoint_can_be_loaded(address: str, job: str, tmp_path: Path) -> None:
    with start(config_of(address, job)) as engine:
        list(steps(engine, 2))
        engine.save_checkpoint(tmp_path, "two", save_latest=False)
        weights, moments = engine.full_state_dict(), engine.get_full("first.weight", "exp_avg")
        rate = engine.get_lr()
        list(steps(engine, 4))
        newer, newer_rate = engine.get_full("first.weight", "exp_avg"), engine.get_lr()
        assert newer is not None and moments is not None

        assert engine.load_checkpoint(tmp_path) == (None, None)
        engine.load_checkpoint(tmp_path, "two", load_module_only=True)
        assert_equal_weights(engine, weights)
        assert (engine.global_steps, engine.get_lr()) == (4, newer_rate)
        found = engine.get_full("first.weight", "exp_avg")
        assert found is not None and torch.equal(found, newer)

        engine.load_checkpoint(tmp_path, "two", load_optimizer_states=False, load_lr_scheduler_states=False)
        found = engine.get_full("first.weight", "exp_avg")
        assert found is not None and torch.equal(found, newer)
        assert (engine.global_steps, engine.get_lr()) == (2, newer_rate)

        engine.load_checkpoint(tmp_path, "two")
        found = engine.get_full("first.weight", "exp_avg")
        assert found is not None and torch.equal(found, moments)
        assert engine.get_lr() == rate
        with pytest.raises(ConfigError, match="custom_load_fn"):
            engine.load_checkpoint(tmp_path, "two", custom_load_fn=print)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(torch.nn.Linear(24, 24))


def test_another_model_is_refused_or_loaded_as_far_as_it_fits(address: str, job: str, tmp_path: Path) -> None:
    with start(config_of(address, job)) as engine:
        list(steps(engine, 2))
        engine.save_checkpoint(tmp_path)
        weights = engine.full_state_dict()
    with start(config_of(address, f"{job}-longer"), Longer()) as engine:
        own = engine.full_state_dict()
        with pytest.raises(OtherModelError, match=r"parameter 'blocks\.2\.weight' is not in the step"):
            engine.load_checkpoint(tmp_path)
        assert_equal_weights(engine, own)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert_equal_weights(engine, own | weights)
        list(steps(engine, 4))
    with (
        start(config_of(address, f"{job}-wider"), Net(32)) as engine,
        pytest.raises(OtherModelError, match=r"has shape \[24, 24\] in the step and \[32, 32\] in this model"),
    ):
        engine.load_checkpoint(tmp_path)


def test_what_a_checkpoint_lacks_goes_on_with_its_own_moments_and_count(address: str, job: str, tmp_path: Path) -> None:
    """The next update of the parameter is its fifth, by torch's AdamW with the moments that it has."""
    with start(config_of(address, job)) as engine:
        list(steps(engine, 2))
        engine.save_checkpoint(tmp_path)
    with start(config_of(address, f"{job}-longer"), Longer()) as engine:

        def values(kind: str) -> torch.Tensor:
            found = engine.get_full("blocks.2.weight", kind)
            assert found is not None
            return found.clone()

        list(steps(engine, 4))
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        group = engine.optimizer.param_groups[0]
        plain = torch.nn.Parameter(values("master"))
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        reference = torch.optim.AdamW([plain], **settings, fused=True)
        reference.state[plain] = {
            "step": torch.tensor(4.0),
            "exp_avg": values("exp_avg"),
            "exp_avg_sq": values("exp_avg_sq"),
        }
        engine.backward(engine(batch(0)))
        plain.grad = values("grad")
        engine.step()
        reference.step()
        assert torch.equal(values("master"), plain)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_parameter_without_elements_is_loaded_and_exported(
    address: str, job: str, tmp_path: Path, half: bool
) -> None:
    class WithNothing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))
            self.last = torch.nn.Linear(2, 2)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            used = self.nothing.float().sum() + self.last(hidden[:, :2]).float().sum()
            result: torch.Tensor = super().forward(hidden) + used
            return result

    with start(config_of(address, job, half=half), WithNothing()) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path)
        losses, weights = list(steps(engine, STEPS)), engine.full_state_dict()
        engine.load_checkpoint(tmp_path)
        assert list(steps(engine, STEPS)) == losses
        assert_equal_weights(engine, weights)
        engine.wait_for_commit()
        for format in get_args(Format):
            export_step(address, job, None, tmp_path / format, format=format)
    exported = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert [
        name for name, value in weights.items() if not torch.equal(exported[name], value.to(exported[name].dtype))
    ] == []
    assert exported["nothing"].dtype == (torch.bfloat16 if half else torch.float32)
    exported = torch.load(tmp_path / "deepspeed-fp32" / "pytorch_model.bin", weights_only=True)
    assert (list(exported["nothing"].shape), exported["nothing"].dtype) == ([0, 3], torch.float32)


def test_other_parameter_groups_are_refused_before_anything_is_changed(address: str, job: str, tmp_path: Path) -> None:
    def engine_of(job: str, groups: int) -> Engine:
        model = Net()
        parts = [list(model.first.parameters()), list(model.blocks.parameters())]
        given = [{"params": part} for part in (parts if groups == 2 else [parts[0] + parts[1]])]
        config = config_of(address, job)
        del config["optimizer"]
        optimizer = torch.optim.AdamW(given, lr=1e-2)
        return trainer_client.initialize(model=model, optimizer=optimizer, config=config)[0]

    with engine_of(job, 2) as engine:
        list(steps(engine, 2))
        engine.save_checkpoint(tmp_path)
        saved = engine.full_state_dict()
    with engine_of(f"{job}-1", 1) as engine:
        list(steps(engine, 3))
        own = engine.full_state_dict()
        with pytest.raises(ConfigError, match="parameter group 0 of the optimizer is not the one"):
            engine.load_checkpoint(tmp_path)
        assert_equal_weights(engine, own)
        list(steps(engine, 4))
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert_equal_weights(engine, saved)


def test_checkpoints_stay_by_number_and_metric_and_deleted_ones_are_forgotten(
    address: str, job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    retention = {"keep_last": 2, "keep_every": 4, "keep_best": 1, "best": "max"}
    with start(config_of(address, job, checkpoints=retention)) as engine:
        for step in range(1, 8):
            list(steps(engine, step))
            engine.save_checkpoint(tmp_path, metric=float(step == 2))
        left = ["global_step2", "global_step4", "global_step6", "global_step7"]
        assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "latest"]
        assert [kept.note for kept in kept_in(address, job)] == [str(tmp_path / tag) for tag in left]
        engine.load_checkpoint(tmp_path, "global_step2")

        # A program such as the Trainer of transformers removes the directories of checkpoints itself.
        for file in (tmp_path / "global_step4").iterdir():
            file.unlink()
        (tmp_path / "global_step4").rmdir()
        engine.save_checkpoint(tmp_path / "elsewhere", "a")
        assert [kept.step for kept in kept_in(address, job) if "global_step4" in kept.note] == []
        # A tag that is saved again replaces the checkpoint, and its step.
        before = [kept.name for kept in kept_in(address, job)]
        engine.save_checkpoint(tmp_path / "elsewhere", "a")
        assert len(kept_in(address, job)) == len(before)
        assert [kept.name for kept in kept_in(address, job)] != before
    # Another process has not seen the directory, which may be out of sight only: it keeps the step, and warns.
    for file in (tmp_path / "global_step7").iterdir():
        file.unlink()
    with start(config_of(address, job)) as engine:
        engine.save_checkpoint(tmp_path, "b")
        assert any("global_step7" in kept.note for kept in kept_in(address, job))
        assert f"paramserver-admin forget {job} global_step7." in caplog.text


def test_what_cannot_be_saved_or_loaded_is_refused_by_name(address: str, job: str, tmp_path: Path) -> None:
    with start(config_of(address, job)) as engine:
        list(steps(engine, 1))
        with pytest.raises(CheckpointError, match=r"client state\.args is a object"):
            engine.save_checkpoint(tmp_path, client_state={"args": object()})
        with pytest.raises(CheckpointError, match="is the name of a directory"):
            engine.save_checkpoint(tmp_path, "../up")
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match="file"):
            engine.save_checkpoint(tmp_path / "file")
        assert kept_in(address, job) == []
        engine.save_checkpoint(tmp_path, "good", save_latest=False)
        text = (tmp_path / "good" / MANIFEST).read_text()
        (tmp_path / "latest").mkdir()
        for tag in ("good", "new"):
            with pytest.raises(OSError, match="latest"):
                engine.save_checkpoint(tmp_path, tag)
        # The checkpoint that was there is as it was, and its step is the only one that is kept.
        assert (tmp_path / "good" / MANIFEST).read_text() == text and not (tmp_path / "new").exists()
        assert len(kept_in(address, job)) == 1
        before = engine.full_state_dict()

        manifest = tmp_path / "good" / MANIFEST
        text = manifest.read_text()
        hostile: dict[str, str] = {
            "": "is no manifest",
            "[]": "is no manifest",
            text[: len(text) // 2]: "is no manifest",
            text.replace('"metric": null', '"metric": 1'): "is damaged",
            text.replace('"format": 1', '"format": 2'): "has format 2",
            "[" * 100_000: "is no manifest",
        }
        for content, message in hostile.items():
            manifest.write_text(content)
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(tmp_path, "good")
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            engine.load_checkpoint(tmp_path, "bad")
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("")
        with pytest.raises(CheckpointError, match="paramserver import"):
            engine.load_checkpoint(tmp_path, "theirs")
        (tmp_path / "latest").rmdir()
        (tmp_path / "latest").write_text("good")
        for source, asked in ((tmp_path, None), (tmp_path, "good"), (tmp_path / "good", None)):
            with pytest.raises(ImportCheckpointError, match=r"good has a checkpoint .* engine\.load_checkpoint\(\)"):
                import_checkpoint(address, f"{job}-imported", source, tag=asked)

        (kept,) = kept_in(address, job)
        with admin_of(address) as store:
            store.ForgetStep(admin_pb.ForgetStepRequest(job=job, name=kept.name))
        with pytest.raises(CheckpointError, match=r"none of the stores .* keeps no step under the name 'good\."):
            engine.load_checkpoint(tmp_path, "good")
        assert_equal_weights(engine, before)
        list(steps(engine, 2))


def test_a_store_without_room_refuses_the_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    quotas = {"default": {"nvme_bytes": "1MiB"}}
    with (
        Daemon(tmp_path / "store", {"nvme_budget": "64MiB", "quotas": quotas}) as daemon,
        start(config_of(daemon.address, "job")) as engine,
    ):
        saved = 0
        with pytest.raises(StoreBudgetError, match=r"cannot be kept: the quota of job 'job', nvme_bytes = 1\.0 MiB"):
            while saved < 30:
                list(steps(engine, engine.global_steps + 1))
                engine.save_checkpoint(tmp_path, f"tag{saved}")
                saved += 1
        assert 0 < saved == len(kept_in(daemon.address, "job"))
        assert not (tmp_path / f"tag{saved}").exists()
        list(steps(engine, engine.global_steps + 2))
        engine.load_checkpoint(tmp_path, "tag0")
        assert engine.global_steps == 1


@pytest.mark.parametrize("durability", ["none", "snapshot:4"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_states_that_are_in_memory_only_are_saved_too(
    address: str, job: str, tmp_path: Path, durability: str, home: str
) -> None:
    placement = {"parameters": home, "gradients": home, "optimizer": home}
    config = config_of(address, job, durability=durability, placement=placement)
    del config["zero_optimization"]["offload_optimizer"]
    torch.manual_seed(3)
    with start(config) as engine:
        list(steps(engine, SAVED_AT))
        engine.save_checkpoint(tmp_path)
        losses = list(steps(engine, STEPS))
        engine.load_checkpoint(tmp_path)
        assert list(steps(engine, STEPS)) == losses
    (kept,) = kept_in(address, job)
    assert json.loads((tmp_path / f"global_step{SAVED_AT}" / MANIFEST).read_text())["checkpoint"]["kept"] == kept.name
