"""Log lines of the daemon and of a trainer name the job, the session and the step that they are about."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.support.daemon import Daemon
from tests.integration.support.store_client import Clients
from tests.integration.support.training import Run, store_config, train_through_store
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout
from trainer_client.base import log_context


def lines_of(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]


def found(lines: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [line for line in lines if text in line["event"]]


def test_the_daemons_lines_have_the_job_the_session_and_the_step(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state", {"log_format": "json"}) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(Layout(name="mine", every_steps=2), name="one").begin()
        other = clients.rank(Layout(name="other"), run_id="other", name="two").begin()
        rank.train(1, 2)
        wait_until(lambda: found(lines_of(daemon), "snapshot of job"))
        # A step that is committed before its gradients are there is refused, and the daemon goes on.
        other.hand_over(1)
        with pytest.raises(grpc.RpcError):
            other.commit(7)
        session_id = rank.session_id
        rank.close()
        wait_until(lambda: found(lines_of(daemon), "ended"))
        assert daemon.stop() == 0
        lines = lines_of(daemon)
        assert session_id not in daemon.log, "who has the id of a session can act as its client"

    (opened,) = [line for line in found(lines, "session opened") if line["session"] == "one"]
    assert "job" not in opened and "step" not in opened
    (ended,) = [line for line in found(lines, "ended") if line["session"] == "one"]
    assert ended["job"] == "mine"
    snapshots = found(lines, "snapshot of job")
    assert {(line["job"], line["step"]) for line in snapshots} == {("mine", 0), ("mine", 2)}
    assert not any("session" in line for line in snapshots), "a commit is of all ranks of the job"
    started = found(lines, "serving on")
    assert started and not any({"job", "session", "step"} & line.keys() for line in started)
    assert not found(lines, "Traceback")


def test_a_trainers_records_have_job_session_rank_and_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Daemon(tmp_path / "state", {"log_format": "json", "host_budget": "128MiB", "nvme_budget": "1GiB"}) as daemon:
        section = {"address": daemon.address, "job": "mine"}
        config = store_config(tmp_path / "unused") | {"paramserver": section, "steps_per_print": 1}
        with caplog.at_level("INFO", logger="trainer_client"):
            train_through_store(Run(steps=3, config=config))
        # The start looks for earlier jobs in a session of its own, which has no job.
        wait_until(lambda: any("job" in line for line in found(lines_of(daemon), "ended")))
        (ended,) = [line for line in found(lines_of(daemon), "ended") if "job" in line]

    reports = [record for record in caplog.records if "roofline=" in record.getMessage()]
    carried = [(record.job, record.rank, record.step) for record in reports]  # type: ignore[attr-defined]
    assert carried == [("mine", 0, step) for step in (1, 2, 3)]
    assert {record.session for record in reports} == {ended["session"]}  # type: ignore[attr-defined]
    assert ended["job"] == "mine"
    formatter = logging.Formatter("%(job)s %(session)s %(rank)s %(step)s %(message)s", defaults={"job": "-"})
    assert formatter.format(reports[0]).startswith(f"mine {ended['session']} 0 1 step=1 ")


def test_a_thread_carries_what_its_engine_does_and_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("trainer_client.engine.engine")

    def write(text: str) -> None:
        log.warning(text)

    def run(target: Any, text: str) -> Any:
        thread = threading.Thread(target=target, args=(text,))
        thread.start()
        thread.join()
        (record,) = [record for record in caplog.records if record.getMessage() == text]
        return record

    def work() -> None:
        context = log_context.begin("first")
        context.step = 4
        of_step = log_context.carried(write, 3)
        of_now = log_context.carried(write)
        context.step = 5
        assert run(of_step, "of the step before").step == 3
        assert run(of_now, "of the step under way").step == 5
        assert run(write, "of a thread of the user").job == ""
        log_context.begin("second")
        context.enter()
        log.warning("of the engine that works")

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    (record,) = [record for record in caplog.records if record.getMessage() == "of the engine that works"]
    assert record.job == "first"  # type: ignore[attr-defined]
    jobs = [record.job for record in caplog.records]  # type: ignore[attr-defined]
    assert jobs == ["first", "first", "", "first"]
