"""Several engines in one process: they share the daemon that the first one starts, and leave in any order."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_client
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import run_ranks
from tests.integration.support.several_engines import TRAINED, build, config_of, step
from tests.integration.support.waiting import wait_until
from trainer_client.base import at_exit
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.transport.channel import is_serving, open_channel
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError, LocalDaemonError, StoreBudgetError
from trainer_client.training.run.forgotten import collect_forgotten
from trainer_client.training.run.former_starts import remove_former_starts
from trainer_client.training.run.local_daemon import LOCK_NAME, local_address
from trainer_client.training.run.shared_daemon import share_daemon


def is_served(state_dir: Path) -> bool:
    with open_channel(local_address(state_dir)) as channel:
        return is_serving(channel, timeout_seconds=5.0)


def test_a_second_engine_uses_the_daemon_of_the_first_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that trains and one that does not, in one directory, by two names of it; the first one is closed first."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "state")
    trained = trainer_client.initialize(model=build(), config=config_of(str(tmp_path / "state"), 3) | TRAINED)[0]
    pid = (tmp_path / "state" / LOCK_NAME).read_text()
    frozen = trainer_client.initialize(model=build(1), config=config_of(str(link), 3, host_budget="32MiB"))[0]
    step(trained)
    assert (tmp_path / "state" / LOCK_NAME).read_text() == pid
    assert "paramserver.host_budget = 32.0 MiB has no effect" in caplog.text
    with pytest.raises(
        LocalDaemonError, match=r"nvme_budget is 1\.0 GiB in the config of this engine, and 256\.0 MiB in that of an"
    ):
        trainer_client.initialize(model=build(2), config=config_of(str(link), 3, nvme_budget="1GiB"))
    trained.close()
    assert is_served(tmp_path / "state")
    frozen.close()
    assert not is_served(tmp_path / "state")


def test_a_daemon_that_has_ended_is_started_again_for_the_next_engine(tmp_path: Path) -> None:
    config = load_config(config_of(str(tmp_path / "state"), reattach_timeout_seconds=0), {})
    shares = [share_daemon(config)]
    try:
        process = shares[0]._daemons._by_directory[tmp_path / "state"].daemon._process
        process.kill()
        process.wait()
        shares.append(share_daemon(config))
        assert is_served(tmp_path / "state")
    finally:
        for share in shares:
            share.leave()
            share.leave()
    assert not is_served(tmp_path / "state")


def test_a_directory_that_was_removed_beside_an_open_engine_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell of a notebook that removes its directory and makes an engine is run again."""
    config = config_of(str(tmp_path / "state"), 3) | TRAINED
    engine = trainer_client.initialize(model=build(), config=config)[0]
    step(engine)
    engine.wait_for_commit()
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(LocalDaemonError, match=r"state was removed or replaced while an open engine .*close that"):
        trainer_client.initialize(model=build(), config=config)
    step(engine)
    # The end of the process closes the engine so, with one line in the log.
    at_exit._run()
    assert "closing the engine failed too: " in caplog.text and "lock does not lead to the file" in caplog.text
    second = trainer_client.initialize(model=build(), config=config)[0]
    assert second.global_steps == 0
    second.close()


def test_ranks_with_several_engines_share_a_daemon_and_a_process_group(tmp_path: Path) -> None:
    run_ranks("tests.integration.support.several_engines", 2, tmp_path / "state")


def pids_of_daemons(directory: Path) -> list[int]:
    """Return the processes whose command names a path below a directory, as those of the daemons started there do."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                command = (process / "cmdline").read_bytes()
                if f"{directory}/".encode() in command:
                    found.append(int(process.name))
    return found


def are_gone(references: list[weakref.ref[Any]]) -> bool:
    """Return whether objects are collected. A call to the store that is under way keeps an engine until its answer."""
    collect_forgotten()
    return all(reference() is None for reference in references)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_engines_that_are_forgotten_leave_no_daemon(tmp_path: Path, stage: int) -> None:
    """A sweep, each trial of which has a directory of its own and closes nothing."""
    gone = []
    for trial in range(3 if stage == 3 else 1):
        model = build(trial)
        config = config_of(str(tmp_path / f"trial-{trial}"), stage) | {"gradient_clipping": 1.0}
        if trial < 2:
            engine: Any = trainer_client.initialize(model=model, config=config | TRAINED)[0]
            step(engine)
            # A graph whose backward pass does not come, and what a program may keep of an engine.
            loss = engine(torch.ones(4, 8)).sum()
        else:
            engine = trainer_client.initialize(model=model, config=config)[0]
            loss = engine(torch.ones(4, 8)).sum()
        gone += [weakref.ref(engine), weakref.ref(model)]
        del engine, model, loss
    wait_until(lambda: are_gone(gone))
    assert not pids_of_daemons(tmp_path)


def test_an_engine_whose_model_is_used_is_not_forgotten(tmp_path: Path) -> None:
    """A function may keep `engine.module` alone."""
    model = trainer_client.initialize(model=build(), config=config_of(str(tmp_path / "state"), 3) | TRAINED)[0].module
    collect_forgotten()
    output = model(torch.ones(4, 8))
    assert torch.equal(output, build()(torch.ones(4, 8)))
    gone = [weakref.ref(model)]
    del model, output
    wait_until(lambda: are_gone(gone))
    assert not pids_of_daemons(tmp_path)


def test_a_forked_child_ends_nothing_of_its_parents_engines(tmp_path: Path) -> None:
    engine: Any = trainer_client.initialize(model=build(), config=config_of(str(tmp_path / "state"), 3) | TRAINED)[0]
    child = os.fork()
    if not child:
        del engine
        gc.collect()
        at_exit._run()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    step(engine)
    engine.close()


@pytest.fixture
def deepspeed() -> Iterator[Any]:
    """This library under the name `deepspeed`, as a program gets it that imports that."""
    before = list(sys.meta_path)
    import_module("trainer_client.as_deepspeed").install()
    yield import_module("deepspeed")
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def values_of(engine: Any) -> list[bytes]:
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_two_engines_without_a_name_train_at_once_and_get_no_values_of_each_other(tmp_path: Path) -> None:
    """An actor and a critic of equal shapes, in a loop of one's own; the next start makes them in another order."""
    config = config_of(str(tmp_path / "state"), 2) | TRAINED
    for order in ((1, 2), (2, 1)):
        engines = [trainer_client.initialize(model=build(seed), config=config)[0] for seed in order]
        for engine, seed in zip(engines, order, strict=True):
            assert values_of(engine) == [value.numpy().tobytes() for value in build(seed).state_dict().values()]
            assert engine.global_steps == 0
            step(engine)
        for engine in engines:
            engine.close()


def test_a_program_that_imports_deepspeed_begins_anew_unless_it_is_told_to_go_on(
    tmp_path: Path, deepspeed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    initial = [value.numpy().tobytes() for value in build().state_dict().values()]

    def start(steps: int, **section: Any) -> tuple[int, list[bytes]]:
        """Return where a start begins; then train, and end as the Trainer does, without closing the engine."""
        engine: Any = deepspeed.initialize(model=build(), config=config_of(state, 2, **section) | TRAINED)[0]
        begun = engine.global_steps, values_of(engine)
        for _ in range(steps):
            step(engine)
        engine.wait_for_commit()
        trained.append(values_of(engine))
        return begun

    state, trained = str(tmp_path / "state"), list[list[bytes]]()
    # The daemon stays for all starts.
    share = share_daemon(load_config(config_of(state), {}))
    try:
        assert start(4) == (0, initial)
        # Ten starts that crash lose no step.
        for _ in range(10):
            collect_forgotten()
            assert start(0) == (0, initial)
        collect_forgotten()
        assert "job 'deepspeed' has step 4, and this engine begins anew, as job 'deepspeed-2" in caplog.text
        assert 'write "paramserver": {"job": "deepspeed", "resume": "auto"}' in caplog.text
        assert start(2, job="deepspeed", resume="auto") == (4, trained[0])
        collect_forgotten()
        assert start(1, resume="must") == (6, trained[-2])
    finally:
        collect_forgotten()
        share.leave()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a daemon that is served beside the programs."""
    config = {"host_budget": "128MiB", "nvme_budget": "1GiB"}
    with Daemon(tmp_path_factory.mktemp("served") / "state", config) as daemon:
        yield daemon.address


def of_seed(seed: int) -> list[bytes]:
    return [value.numpy().tobytes() for value in build(seed).state_dict().values()]


@pytest.mark.parametrize("first", ["policy", "reference"])
def test_a_reference_beside_its_policy_keeps_its_own_values(store: str, job: str, first: str) -> None:
    """Both are made from one config, which names a job, as trainers of preferences do it."""
    config = config_of("", 3) | {"paramserver": {"address": store, "job": job}}

    def begin(keys: dict[str, Any]) -> Any:
        if first == "policy":
            policy = trainer_client.initialize(model=build(1), config=config | keys | TRAINED)[0]
            step(policy)
        reference = trainer_client.initialize(model=build(2), config=config | keys)[0]
        if first == "reference":
            policy = trainer_client.initialize(model=build(1), config=config | keys | TRAINED)[0]
        return policy, reference

    policy, reference = begin({})
    assert values_of(reference) == of_seed(2)
    step(policy)
    trained = values_of(policy)
    assert reference.job != job and values_of(reference) == of_seed(2) and trained != of_seed(1)
    whole = trainer_client.initialize(model=build(3), config=config | {"zero_optimization": {"stage": 0}})[0]
    assert [value.numpy().tobytes() for value in whole.module.state_dict().values()] == of_seed(3)
    asks = {"paramserver": {"address": store, "job": job, "inference": {}}}
    policy.wait_for_commit()
    with trainer_client.initialize(model=build(4), config=config | asks)[0] as asked:
        assert (asked.job, values_of(asked)) == (job, trained)
    for engine in (policy, reference):
        engine.close()


def test_a_policy_is_refused_beside_a_reference_that_has_its_values(store: str, job: str) -> None:
    """A later start: the store has the job, and a script that only reads it looks the same at first."""
    config = config_of("", 3) | {"paramserver": {"address": store, "job": job}}
    with trainer_client.initialize(model=build(1), config=config | TRAINED)[0] as policy:
        step(policy)
        trained = values_of(policy)
    with trainer_client.initialize(model=build(2), config=config)[0] as reader:
        assert values_of(reader) == trained
        with pytest.raises(
            ConfigError, match=r"without an optimizer has the weights of job .*: make this engine before"
        ):
            trainer_client.initialize(model=build(1), config=config | TRAINED)
    trainer_client.initialize(model=build(1), config=config | TRAINED)[0].close()


def test_jobs_of_former_starts_do_not_fill_the_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the face of Accelerate names them. A job whose step a checkpoint keeps stays, and so does one with a name."""
    config = load_config(config_of(str(tmp_path / "state")), {})
    share = share_daemon(config)
    address = local_address(tmp_path / "state")
    try:
        for number, job in enumerate(["mine", *(f"accelerate-2026112{day}-101500-abcdef" for day in range(6))]):
            section = {"paramserver": {"job": job, "address": address}}
            with trainer_client.initialize(model=build(), config=config_of("") | TRAINED | section)[0] as engine:
                step(engine)
                if number == 1:
                    engine.save_checkpoint(tmp_path / "checkpoints")
        remove_former_starts(address, "mine", 1)
        remove_former_starts(address, "accelerate-20261130-101500-abcdef", 1)
        with StoreClientSync.connect(address) as client:
            left = [job.name for job in client.list_jobs()]
        assert left == [*(f"accelerate-2026112{day}-101500-abcdef" for day in (0, 3, 4, 5)), "mine"]
        assert "job 'accelerate-20261121-101500-abcdef' of a former start, at step 1, is deleted" in caplog.text
        # A model for which the budget has no room beside them.
        remove_former_starts(address, "accelerate-20261130-101500-abcdef", 256 << 20)
        with StoreClientSync.connect(address) as client:
            assert [job.name for job in client.list_jobs()] == ["accelerate-20261120-101500-abcdef", "mine"]
    finally:
        share.leave()


def test_a_budget_that_does_not_hold_two_engines_names_the_open_one(tmp_path: Path) -> None:
    def begin(width: int, job: str) -> Any:
        config = config_of(str(tmp_path / "state"), 3, host_budget="32MiB", job=job) | TRAINED
        return trainer_client.initialize(model=torch.nn.Linear(width, width), config=config)[0]

    first = begin(1100, "first")
    with pytest.raises(
        StoreBudgetError, match=r"with the jobs 'first': close those that are not needed any more \(engine\.close\(\)"
    ):
        begin(1000, "second")
    first.close()
    begin(1000, "second").close()
