"""A trainer outlives its daemon: the daemon is killed and started again at any moment, and the run goes on with the
same bits."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import trainer_client
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from tests.integration.support.daemon import Daemon
from tests.integration.support.outliving import DAEMON, differences, make_plan, outlive, outlive_all
from tests.integration.support.outliving_run import RUN
from tests.integration.support.training import build_model
from tests.integration.support.waiting import wait_until
from trainer_client import Credentials, DaemonRestartedError, Engine, StoreUnavailableError
from trainer_client.client.transport.attachments import Survival
from trainer_client.client.transport.rank_store import RankStore

# The results of each rank, by the name of the run.
Results: TypeAlias = dict[str, list[dict[str, Any]]]

STEPS = 6


def offloaded(stage: int, device: str, **section: Any) -> dict[str, Any]:
    """Return a config whose states are placed in the store as far as the stage allows."""
    home = {"device": device}
    zero: dict[str, Any] = {"stage": stage}
    zero |= {"offload_optimizer": home} if stage else {}
    zero |= {"offload_param": home} if stage == 3 else {}
    return {"zero_optimization": zero, "paramserver": section}


PLACES = {
    "stage-0": offloaded(0, ""),
    "stage-1-host": offloaded(1, "cpu"),
    "stage-2-nvme": offloaded(2, "nvme"),
    "stage-3-host": offloaded(3, "cpu"),
    "stage-3-nvme-streams": offloaded(3, "nvme"),
    "stage-3-collective": offloaded(3, "nvme", gather="collective", early_updates=False),
    "optimizer-on-device": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
}
AT_EACH_PLACE = [
    (1, "after backward 0"),
    (2, "after step"),
    (3, "forward"),
    (3, "step"),
    # After this kill the rank reads, in its next forward, values that the other rank handed over to the daemon that
    # died.
    (5, "before vote"),
    (6, "backward"),
]
OF_ONE_NODE = [(1, "backward"), (2, "after step"), (4, "step"), (6, "forward")]
EVERY_KIND = [
    (1, "backward"),
    (1, "after step"),
    (2, "after forward 1"),
    (2, "evaluation"),
    (3, "after backward 0"),
    (3, "change"),
    (4, "step"),
    (5, "forward"),
    (5, "after backward 1"),
    (6, "reading"),
    (6, "close"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of runs of two ranks without kills ("quiet" ones) and with kills."""
    directory = tmp_path_factory.mktemp("trained")
    nvme = offloaded(3, "nvme")
    short: dict[str, Any] = {"steps": STEPS, "accumulation": 1}
    plan = partial(make_plan, directory)
    with Daemon(directory / "far", DAEMON) as far:
        addresses = [f"unix:{directory / 'state' / 'paramserver.sock'}", far.address]
        plans = [
            plan(nvme, name="quiet", **short),
            *(
                plan(config, name=place, kills=AT_EACH_PLACE, prefer_streams=place.endswith("streams"), **short)
                for place, config in PLACES.items()
            ),
            plan(nvme, name="two-nodes", kills=OF_ONE_NODE, addresses=addresses, **short),
            plan(nvme, name="quiet-accumulation", steps=STEPS),
            plan(nvme, name="every-kind", kills=EVERY_KIND, steps=STEPS),
        ]
        return outlive_all(plans, 2)


def test_the_daemon_is_killed_at_every_kind_of_moment(trained: Results) -> None:
    """The daemon is killed at many moments of a run of two ranks with accumulation, dropout, a schedule, evaluations
    and changes by hand. No rank is started anew."""
    results = trained["every-kind"]

    assert differences(results, trained["quiet-accumulation"]) == []
    # Some kills come while the next daemon is still starting, or when the run needs nothing more from it, so not every
    # kill causes a restart.
    assert all(len(result["restarts"]) >= 7 for result in results)
    # The commit that was handed over again depends on how far the killed daemon was.
    assert any(again is not None for result in results for _, _, again in result["restarts"])


@pytest.mark.parametrize("place", PLACES)
def test_at_every_stage_and_placement(trained: Results, place: str) -> None:
    """One run without kills is enough, because every stage and placement computes the same bits on two ranks."""
    assert differences(trained[place], trained["quiet"]) == []
    assert all(len(result["restarts"]) >= 3 for result in trained[place])


def test_the_daemon_of_one_of_two_nodes_is_killed(trained: Results) -> None:
    """The other node's daemon keeps its commit, while the ranks hand the same commit over again to the new daemon of
    the first node."""
    assert differences(trained["two-nodes"], trained["quiet"]) == []
    near, other = (len(result["restarts"]) for result in trained["two-nodes"])
    assert near >= 3 and other == 0


NEW_JOB = [
    (0, "before confirm_epoch 0"),
    (0, "before open_job 0"),
    (0, "after open_job 0"),
    (0, "before register_shards 0"),
    (0, "before put 0"),
    (0, "after put 1"),
    (0, "before commit 0"),
    (0, "after commit 0"),
]
IMPORT = [
    (0, "before open_job 0"),
    (0, "after open_job 1"),
    (0, "after begin_layout 1"),
    (0, "before register_shards 1"),
    (0, "after acquire_write 2"),
    (0, "before publish 5"),
    (0, "before commit 0"),
    (0, "after commit 1"),
]
# By the name of a change of layout: the number of ranks before and after it, and the kills.
RESUME = {
    "same-layout": (2, 2, [(0, "after open_job 0"), (0, "before roll_back 0"), (0, "after roll_back 0")]),
    "fewer-ranks": (
        2,
        1,
        [
            (0, "before begin_layout 0"),
            (0, "after begin_layout 0"),
            (0, "before put 0"),
            (0, "after put 2"),
            (0, "after commit 0"),
        ],
    ),
    "more-ranks": (
        1,
        2,
        [
            (0, "after open_job 0"),
            (0, "after register_shards 0"),
            (0, "after put 1"),
            (0, "before commit 0"),
        ],
    ),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of two steps of new jobs on one rank ("-1") and on two, and of two more steps after a resume."""
    directory = tmp_path_factory.mktemp("begun")
    weights = {name: value for name, value in build_model(RUN).state_dict().items() if name != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors")
    nvme = offloaded(3, "nvme")
    kept = offloaded(3, "nvme", kept_gradients="1GiB", early_updates=True)
    recipes = offloaded(3, "nvme", kept_gradients=64, early_updates=False)
    checkpoint = str(directory / "model.safetensors")
    plan = partial(make_plan, directory)
    results: Results = {}
    for ranks in (1, 2):
        plans = [
            plan(nvme, name=f"values-{ranks}", steps=2),
            plan(kept, name=f"values-{ranks}-killed", steps=2, kills=NEW_JOB),
            plan(recipes, name=f"recipes-{ranks}", steps=2, derives=True),
            plan(recipes, name=f"recipes-{ranks}-killed", steps=2, derives=True, kills=NEW_JOB),
            plan(nvme, name=f"import-{ranks}", steps=2, checkpoint=checkpoint),
            plan(nvme, name=f"import-{ranks}-killed", steps=2, checkpoint=checkpoint, kills=IMPORT),
        ]
        # Each of these jobs is resumed once.
        for change, (before, _, _) in RESUME.items():
            if before == ranks:
                plans += [plan(nvme, name=f"begun-{job}", job=job, steps=2) for job in (change, f"{change}-killed")]
        results |= outlive_all(plans, ranks)
    for ranks in (1, 2):
        plans = []
        for change, (_, after, kills) in RESUME.items():
            if after == ranks:
                plans += [
                    plan(nvme, name=change, steps=4, first_step=3),
                    plan(nvme, name=f"{change}-killed", steps=4, first_step=3, kills=kills),
                ]
        results |= outlive_all(plans, ranks)
    return results


@pytest.mark.parametrize("first", ["values", "recipes"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_daemon_is_killed_while_a_new_job_gets_its_first_values(begun: Results, ranks: int, first: str) -> None:
    """No recipe needs memory that is kept, and the random numbers of the run stay those that they are without kills."""
    results = begun[f"{first}-{ranks}-killed"]

    assert differences(results, begun[f"{first}-{ranks}"]) == []
    assert_all_went_on(results, least=5)


@pytest.mark.parametrize("change", RESUME)
def test_the_daemon_is_killed_while_a_job_is_resumed(begun: Results, change: str) -> None:
    results = begun[f"{change}-killed"]

    assert differences(results, begun[change]) == []
    assert_all_went_on(results, least=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_daemon_is_killed_while_the_checkpoint_of_a_new_job_is_imported(begun: Results, ranks: int) -> None:
    """Each import that is interrupted leaves nothing, so the job begins with the checkpoint as if nothing had been."""
    results = begun[f"import-{ranks}-killed"]

    assert differences(results, begun[f"import-{ranks}"]) == []
    assert_all_went_on(results, least=5)


def assert_all_went_on(results: Sequence[dict[str, Any]], *, least: int) -> None:
    """Check that rank 0, which kills the daemon, has gone on with so many others, and each rank with one.

    A daemon that is killed before a rank has attached to it is no restart for that rank, so the others count fewer.
    """
    counts = [len(result["restarts"]) for result in results]
    assert counts[0] >= least and min(counts) >= 1, counts


def test_first_values_that_are_too_large_to_be_kept_end_a_run_whose_daemon_is_killed(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, offloaded(3, "nvme", kept_gradients=64), steps=1, kills=[(0, "after put 1")])

    with pytest.raises(AssertionError, match=r"its first values, [\d.]+ KiB .* larger than paramserver.kept_gradients"):
        outlive(plan, 1)


class Model(nn.Module):
    """A model of two units with a function `between` that runs after each of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.between: Callable[[], None] = lambda: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
            self.between()
        return hidden


@contextmanager
def started(daemon: Daemon, **section: Any) -> Iterator[Engine]:
    """Start a run of one rank. At the end, leave it and ignore the store's error if the run has lost its daemon."""
    config = offloaded(3, "nvme", address=daemon.address, **section)
    config |= {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
    engine, *_ = trainer_client.initialize(model=Model(), config=config)
    try:
        yield engine
    finally:
        try:
            engine.close_without_commit()
        except trainer_client.StoreError:
            assert engine.is_closed


def train(engine: Engine, steps: Sequence[int]) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(torch.randn(2, 64, generator=torch.Generator().manual_seed(step))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_one_rank_goes_on_and_says_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Daemon(tmp_path / "whole") as daemon, started(daemon) as engine:
        expected = train(engine, range(4))
    with Daemon(tmp_path / "state") as daemon, started(daemon) as engine:
        losses = train(engine, range(2))
        engine.wait_for_commit()
        daemon.kill()
        with Daemon(tmp_path / "state"):
            losses += train(engine, range(2, 3))
            report = engine.step_report()
            losses += train(engine, range(3, 4))
            engine.wait_for_commit()
            (restart,) = engine.daemon_restarts
            engine.close()

    assert losses == expected
    assert restart.step == 2 and restart.handed_over_again is None and restart.seconds > 0
    assert report is not None and report.daemon_restarts == 1
    assert "the run goes on after" in caplog.text and "from commit 2" in caplog.text


def arenas() -> set[str]:
    """Return the inodes of the arenas that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "paramserver-arena" in line}


def test_the_memory_of_a_lost_daemon_is_unmapped_without_the_garbage_collector(tmp_path: Path) -> None:
    gc.collect()
    before = arenas()
    with Daemon(tmp_path / "state") as daemon, started(daemon) as engine:
        train(engine, range(2))
        former = arenas() - before
        assert former
        gc.disable()
        try:
            loss = engine(torch.randn(2, 64)).square().mean()
            daemon.kill()
            with Daemon(tmp_path / "state"):
                engine.backward(loss)
                engine.step()
                del loss
                train(engine, range(3, 5))
                engine.wait_for_commit()
                assert len(engine.daemon_restarts) == 1
                wait_until(lambda: not former & arenas())
                engine.close()
        finally:
            gc.enable()


def test_a_daemon_is_stopped_and_started_again_within_a_forward(tmp_path: Path) -> None:
    """An operator stops the daemon in order. The memory that the trainer has mapped keeps its content."""
    with Daemon(tmp_path / "whole") as daemon, started(daemon) as engine:
        expected = train(engine, range(4))
    with Daemon(tmp_path / "state") as daemon, started(daemon) as engine:
        losses = train(engine, range(2))
        engine.wait_for_commit()
        daemons = [daemon]
        model = engine.module
        assert isinstance(model, Model)

        def restart() -> None:
            model.between = lambda: None
            assert daemons[-1].stop() == 0
            daemons.append(Daemon(tmp_path / "state"))

        try:
            model.between = restart
            losses += train(engine, range(2, 3))
            model.between = restart
            engine.wait_for_commit()
            losses += train(engine, range(3, 4))
            engine.wait_for_commit()
            assert len(engine.daemon_restarts) == 2
            engine.close()
        finally:
            for each in daemons:
                each.kill()
    assert losses == expected


def test_a_token_file_that_is_just_being_written_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, own = tmp_path / "tokens.toml", tmp_path / "own.token"
    token = add_token(tokens, "trainer", Role.ADMIN)
    own.write_text(token)
    config = {"token_file": str(tokens)}
    survival = Survival(timeout_seconds=60, kept_bytes=0, durable_every=1, is_loud=True)
    with Daemon(tmp_path / "state", config) as daemon:
        store = RankStore(daemon.address, "rank", Credentials(token_file=own), survival=survival)
        with closing(store):
            former = store.epoch
            own.write_text("")
            daemon.kill()
            with Daemon(tmp_path / "state", config):
                wait_until(lambda: "is gone; waiting for the next one" in caplog.text)
                # The rank looks at the file meanwhile.
                time.sleep(0.5)
                own.write_text(token)
                assert store.job.confirm_epoch() != former


def test_a_token_file_that_stays_empty_ends_the_run_with_its_name(tmp_path: Path) -> None:
    tokens, own = tmp_path / "tokens.toml", tmp_path / "own.token"
    own.write_text(add_token(tokens, "trainer", Role.ADMIN))
    config = {"token_file": str(tokens)}
    survival = Survival(timeout_seconds=1, kept_bytes=0, durable_every=1, is_loud=True)
    with Daemon(tmp_path / "state", config) as daemon:
        store = RankStore(daemon.address, "rank", Credentials(token_file=own), survival=survival)
        with closing(store):
            own.write_text("")
            daemon.kill()
            with pytest.raises(
                StoreUnavailableError, match=rf"reattach_timeout_seconds .*token file {own} must hold one"
            ):
                store.job.confirm_epoch()


def test_a_daemon_that_stays_away_is_waited_for_as_long_as_the_config_says(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, started(daemon, reattach_timeout_seconds=0.5) as engine:
        train(engine, range(2))
        daemon.kill()
        with pytest.raises(StoreUnavailableError, match="no other one served there within the paramserver"):
            train(engine, range(2, 4))


def test_a_run_that_is_not_to_outlive_its_daemon_ends_with_it(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, started(daemon, reattach_timeout_seconds=0) as engine:
        train(engine, range(2))
        daemon.kill()
        with Daemon(tmp_path / "state"), pytest.raises(DaemonRestartedError, match="restart the job"):
            train(engine, range(2, 4))


@pytest.mark.parametrize("other", [False, True], ids=["empty", "with a job of the same name"])
def test_another_state_directory_is_not_the_same_job(tmp_path: Path, other: bool) -> None:
    state = tmp_path / "state"
    if other:
        with Daemon(tmp_path / "other") as daemon, started(daemon) as engine:
            train(engine, range(2))
            engine.close()
            assert daemon.stop() == 0
    with Daemon(state) as daemon, started(daemon) as engine:
        train(engine, range(2))
        engine.wait_for_commit()
        daemon.kill()
        shutil.rmtree(state)
        if other:
            (tmp_path / "other").rename(state)
        why = "its job 'default' has another history" if other else "it does not have the job of this run"
        with Daemon(state), pytest.raises(DaemonRestartedError, match=f"cannot go on with it: {why}"):
            train(engine, range(2, 4))


def test_commits_that_are_gone_with_the_memory_of_the_daemon_end_the_run(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, started(daemon, durability="snapshot:4") as engine:
        train(engine, range(3))
        engine.wait_for_commit()
        daemon.kill()
        with (
            Daemon(tmp_path / "state"),
            pytest.raises(DaemonRestartedError, match="its newest commit is 0, and this run is at 3: with paramserver"),
        ):
            train(engine, range(3, 5))


def test_gradients_that_are_too_large_to_be_kept_are_needed_only_while_a_commit_is_under_way(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, started(daemon, kept_gradients=64, early_updates=False) as engine:
        train(engine, range(2))
        engine.wait_for_commit()
        daemon.kill()
        with Daemon(tmp_path / "state") as second:
            train(engine, range(2, 3))
            engine.wait_for_commit()
            loss = engine(torch.randn(2, 64)).square().mean()
            engine.backward(loss)
            # The stopped daemon loses the gradients that the trainer hands over now, because the test kills it before
            # it goes on.
            second.process.send_signal(signal.SIGSTOP)
            third: list[Daemon] = []

            def restart() -> None:
                second.kill()
                third.append(Daemon(tmp_path / "state", wait=False))

            killing = threading.Timer(1.0, restart)
            killing.start()
            with pytest.raises(DaemonRestartedError, match="larger than paramserver"):
                engine.step()
                engine.wait_for_commit()
            killing.join()
            third[0].kill()
        assert len(engine.daemon_restarts) == 1
