"""The operators' verbs over a running daemon: steps, queues, events, verification, copies, roll-backs and draining, for
one daemon and for several, and the audit log of what destroys or stops something."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from paramserver import __version__, vocabulary
from paramserver.admin.cli import app
from paramserver.build import read_build
from paramserver.config import DaemonConfig
from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.shard import DType, Kind
from tests.integration.support.admin import admin, admin_json
from tests.integration.support.daemon import MIB, SERVICE, Daemon, admin_of, tiers
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Client, Clients, Rank, refused
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
SECONDS = 20.0


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `paramserver-admin` as a process of its own, which the end of the context kills."""
    program = "import sys; sys.argv[0] = 'paramserver-admin'; from paramserver.__main__ import admin; admin()"
    # A pipe is buffered, unless the environment says otherwise.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def two_nodes(clients: Clients, job: str) -> Rank:
    """Return a rank of a job of two nodes, of whose steps the store keeps the newest two."""
    rank = clients.rank(Layout(name=job, precision=DType.BFLOAT16))
    rank.open(world_size=2)
    rank.register()
    rank.stage_all()
    rank.commit(0)
    return rank


def audited(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (daemon.state_dir / "audit.jsonl").read_text().splitlines()]


# --- what there is


def test_versions_names_retained_kept_and_read_steps_with_their_bytes(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    rank = two_nodes(clients, job)
    rank.train(1, 2)
    admin(daemon.address, "keep", job, "two", "--step", "2")
    rank.call("OpenReader", job=job, step=1)
    rank.hand_over(3)
    rank.commit(3)
    steps = {step["step"]: step for step in admin_json(daemon.address, "versions", job)["steps"]}
    assert list(steps) == [1, 2, 3]
    assert {number: step["retained"] for number, step in steps.items()} == {1: False, 2: True, 3: True}
    assert [number for number, step in steps.items() if step["newest"]] == [3]
    assert [step["kept_as"] for step in steps.values()] == [[], ["two"], []]
    assert [step["readers"] for step in steps.values()] == [1, 0, 0]
    assert all(step["durable"] for number, step in steps.items() if number != 1)
    nvme = tiers(daemon.address)[1].used_bytes
    assert sum(step["alone_bytes"] for step in steps.values()) == nvme
    table = admin(daemon.address, "versions", job)
    (row,) = [line for line in table.splitlines() if " two " in line]
    assert "retained" in row and " yes " in row
    assert "there is no job 'nobody'" in CliRunner().invoke(app, ["versions", "nobody"], env=address_of(daemon)).output


def address_of(daemon: Daemon) -> dict[str, str]:
    return {"PARAMSERVER_ADDRESS": daemon.address}


def test_prefetch_shows_the_window_of_each_client(daemon: Daemon, clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, precision=DType.BFLOAT16)).begin()
    admin(daemon.address, "evict", job, "--yes")
    kind = vocabulary.KIND_TO_WIRE[Kind.PARAM]
    wants = [
        pb.PrefetchRequest.Want(slab=pb.SlabName(group=group, kind=kind), position=position)
        for position, group in enumerate(rank.groups)
    ]
    rank.call("Prefetch", wants=wants)

    def window() -> Any:
        (shown,) = admin_json(daemon.address, "prefetch")["windows"]
        return shown

    wait_until(lambda: window()["present"] == len(rank.groups))
    shown = window()
    assert (shown["client"], shown["job"], shown["rank"], shown["slabs"]) == ("test", job, 0, len(rank.groups))
    assert shown["running"] == shown["waiting"] == 0 and shown["bytes"] > 0
    queue = admin_json(daemon.address, "prefetch")
    assert queue["in_flight_bytes"] == queue["running"] == queue["waiting"] == 0
    (fetched,) = [entry for entry in queue["jobs"] if entry["job"] == job]
    assert fetched["bytes"] == sum(rank.layout.group(group).layout(Kind.PARAM).nbytes for group in rank.groups)
    assert job in admin(daemon.address, "prefetch")


def test_events_tell_what_happened_in_order_and_can_be_followed(daemon: Daemon, clients: Clients, job: str) -> None:
    before = max((event["number"] for event in admin_json(daemon.address, "events")["events"]), default=0)
    with following("events", "--address", daemon.address, "--follow", "--json", "--after", str(before)) as process:
        rank = clients.rank(Layout(name=job), name=job).begin()
        rank.train(1, 1)
        rank.close()
        wait_until(lambda: "left the job" in admin(daemon.address, "events", "--after", str(before)))
        admin(daemon.address, "delete-job", job, "--yes")
        expected = [
            ("session", "a session began, from the UNIX socket"),
            ("job", "a run of 1 rank opened the job, without a committed step"),
            ("commit", "step 0 was committed, durable"),
            ("commit", "step 1 was committed, durable"),
            ("session", "the session ended (closed by the client); 0 leases voided"),
            ("job", "the last rank left the job, at step 1"),
            ("job", "the job was deleted"),
            ("admin", f"anyone from unix:: {{'job': '{job}'}}: OK"),
        ]
        listed = admin_json(daemon.address, "events", "--after", str(before))["events"]
        assert process.stdout is not None
        followed = [json.loads(process.stdout.readline()) for _ in expected]
    assert followed == listed
    assert [(event["kind"], event["text"]) for event in listed] == expected
    assert [event["number"] for event in listed] == list(range(before + 1, before + 9))
    assert {event["subject"] for event in listed} == {job, "DeleteJob"}
    only = admin_json(daemon.address, "events", "--kind", "commit", "--after", str(before), "-n", "1")["events"]
    assert only == [listed[3]]
    with (
        refused(CODE.INVALID_ARGUMENT, "kinds has 'x'; the kinds of events are daemon,"),
        admin_of(daemon.address) as stub,
    ):
        stub.ListEvents(admin_pb.ListEventsRequest(kinds=["x"]), timeout=SECONDS)


def test_config_shows_every_key_as_the_daemon_runs_and_version_what_it_is(daemon: Daemon) -> None:
    shown = admin_json(daemon.address, "config")
    assert list(shown["config"]) == list(DaemonConfig.model_fields)
    config = shown["config"]
    assert (config["nvme_budget"], config["host_budget"]) == (256 * MIB, 16 * MIB)
    assert config["socket"] == str(daemon.socket) and config["audit_log"] == str(daemon.state_dir / "audit.jsonl")
    assert config["max_sessions_per_address"] is None and config["nvme_dirs"] == [str(daemon.state_dir)]
    assert "io_read_threads" in shown["defaults"] and "nvme_budget" not in shown["defaults"]
    table = admin(daemon.address, "config")
    (row,) = [line for line in table.splitlines() if " nvme_budget " in line]
    assert str(256 * MIB) in row and "set" in row
    version = admin_json(daemon.address, "version")
    assert version["version"] == version["client_version"] == __version__
    assert (version["pid"], version["state_dir"]) == (daemon.process.pid, str(daemon.state_dir))
    assert version["python"] == ".".join(map(str, sys.version_info[:3]))
    assert version["build"] == version["client_build"] == read_build()
    assert admin(daemon.address, "version").count(f"{__version__}, build {read_build()}") == 2


def test_top_shows_all_tables_once_or_a_line_for_each_reading(daemon: Daemon, clients: Clients) -> None:
    rank = clients.rank(Layout(name="short"), name="my client").begin()
    table = admin(daemon.address, "top", "--once")
    assert all(word in table for word in ("Tiers of", "Devices", "data.0", "Jobs", " short ", "my client", "Windows"))
    reading = admin_json(daemon.address, "top", "--once")
    assert reading.keys() == {"tiers", "jobs", "sessions", "prefetch"}
    assert reading["jobs"]["jobs"][0]["committed_step"] == 0
    with following("top", "--address", daemon.address, "--json", "--interval", "0.1") as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert first["tiers"]["unix_seconds"] < second["tiers"]["unix_seconds"]
    rank.close()


def test_each_reading_of_the_tiers_is_a_line_that_a_pipe_gets_at_once(daemon: Daemon) -> None:
    # A line that stayed in a buffer until it is full would come after many of these intervals.
    with following("tiers", "--address", daemon.address, "--watch", "600", "--json") as process:
        assert process.stdout is not None
        reading = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    assert [tier["tier"] for tier in reading["tiers"]] == ["TIER_HOST", "TIER_NVME"]


# --- what changes the store


def test_copies_are_evicted_and_brought_back_and_no_byte_changes(daemon: Daemon, clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, precision=DType.BFLOAT16)).begin()
    rank.train(1, 1)
    rank.assert_at(1)
    before = tiers(daemon.address)[0].used_bytes
    evicted = admin_json(daemon.address, "evict", job, "--yes")
    assert evicted["bytes"] == before - tiers(daemon.address)[0].used_bytes > 0
    promoted = admin_json(daemon.address, "promote", job)
    assert promoted["slabs"] == len(rank.groups) * len(rank.layout.kinds)
    assert promoted["left_bytes"] == 0 and tiers(daemon.address)[0].used_bytes >= before
    misses = tiers(daemon.address)[0].misses
    rank.assert_at(1)
    assert tiers(daemon.address)[0].misses == misses
    assert "evicted" in admin(daemon.address, "evict", "--all", "--yes")
    assert "name a job, or give --all" in CliRunner().invoke(app, ["evict", "--yes"], env=address_of(daemon)).output
    rank.train(2, 2)
    rank.assert_at(2)
    verbs = [entry["verb"] for entry in audited(daemon)[-2:]]
    assert verbs == ["EvictCopies", "EvictCopies"]


def test_a_job_is_rolled_back_to_a_retained_step_when_no_rank_has_it(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    rank = two_nodes(clients, job)
    rank.train(1, 3)
    attached = f"job '{job}' has 1 sessions attached; stop its trainers first"
    assert attached in CliRunner().invoke(app, ["rollback", job, "2", "--yes"], env=address_of(daemon)).output
    rank.assert_at(3)
    rank.close()
    assert "does not hold step 9; it holds: 2, 3" in (
        CliRunner().invoke(app, ["rollback", job, "9", "--yes"], env=address_of(daemon)).output
    )
    question = CliRunner().invoke(app, ["rollback", job, "2"], env=address_of(daemon), input="n\n")
    assert question.exit_code == 1 and "This cannot be undone." in question.output
    assert [step["step"] for step in admin_json(daemon.address, "versions", job)["steps"]] == [2, 3]

    assert f"rolled job {job} back from step 3 to step 2" in admin(daemon.address, "rollback", job, "2", "--yes")
    assert [step["step"] for step in admin_json(daemon.address, "versions", job)["steps"]] == [2]
    again = clients.rank(rank.layout, run_id="another run")
    assert again.open(pb.RESUME_POLICY_MUST, world_size=2)[-1].step == 2
    again.register()
    again.assert_at(2)
    again.train(3, 3)
    again.assert_at(3)
    entries = [entry for entry in audited(daemon) if entry["arguments"].get("job") == job]
    assert [(entry["verb"], entry["arguments"]["step"]) for entry in entries] == [
        ("RollBackJob", "2"),
        ("RollBackJob", "9"),
        ("RollBackJob", "2"),
    ]
    assert entries[0]["result"] == f"FAILED_PRECONDITION: {attached}"
    assert entries[1]["result"].startswith("NOT_FOUND: ") and entries[2]["result"] == "OK"
    assert {(entry["principal"], entry["peer"]) for entry in entries} == {("anyone", "unix:")}
    with admin_of(daemon.address) as stub, refused(CODE.INVALID_ARGUMENT, "step is missing"):
        stub.RollBackJob(admin_pb.RollBackJobRequest(job=job), timeout=SECONDS)


def test_a_verification_reports_damage_and_its_exit_status_says_so(tmp_path: Path) -> None:
    config = {"scrub_bandwidth": 0, "nvme_budget": "256MiB"}
    with Daemon(tmp_path / "state", config) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(Layout(name="whole", precision=DType.BFLOAT16)).begin()
        other = clients.rank(Layout(name="damaged", precision=DType.BFLOAT16)).begin()
        used = tiers(daemon.address)[1].used_bytes
        result = admin_json(daemon.address, "verify")
        assert result == {"verified_bytes": used, "total_bytes": used, "damage": []}
        assert "no damage" in admin(daemon.address, "verify", "whole")
        other.close()
        path = Path(tiers(daemon.address)[1].devices[0].path)
        rank.close()
        # The second job was stored behind the first one, and has as many bytes.
        with path.open("r+b") as file:
            file.seek(used // 2)
            file.write(bytes(path.stat().st_size - used // 2))
        result = admin_json(daemon.address, "verify", "damaged", code=4)
        assert result["verified_bytes"] == result["total_bytes"] == used // 2 and result["damage"]
        assert all(found["version"].startswith("damaged/block.") for found in result["damage"])
        assert {fqn.rpartition(".")[0] for found in result["damage"] for fqn in found["fqns"]} == {
            "block.0.weight",
            "block.1.weight",
        }
        assert admin_json(daemon.address, "verify", "whole")["damage"] == []
        assert "damaged or unreadable places" in admin(daemon.address, "verify", code=4)
        events = admin_json(daemon.address, "events", "--kind", "damage")["events"]
        assert [event["text"] for event in events] == [found["text"] for found in result["damage"]]
        in_use = CliRunner().invoke(app, ["fsck", str(daemon.state_dir)])
        assert in_use.exit_code == 1 and "is in use by the daemon with pid" in in_use.stderr
        assert daemon.stop() == 0
    offline = CliRunner().invoke(app, ["fsck", str(daemon.state_dir), "--json"])
    assert offline.exit_code == 4
    checked = json.loads(offline.stdout)
    assert (checked["jobs"], checked["verified_bytes"]) == (2, used)
    assert checked["problems"] and set(checked["problems"]) <= {found["text"] for found in result["damage"]}
    shown = CliRunner().invoke(app, ["fsck", "--state-dir", str(daemon.state_dir)])
    assert shown.exit_code == 4 and f"{len(checked['problems'])} problems" in shown.stdout


def test_a_drained_daemon_waits_for_steps_under_way_and_accepts_no_new_session(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(Layout(name="job")).begin()
        reader = clients.client(name="reader")
        reader_id = reader.call("OpenReader", job="job").reader_id
        rank.hand_over(1)
        state = admin_json(daemon.address, "drain", "--yes", "--wait", "0.1", code=4)
        assert state["draining"] and not state["ready"] and state["sessions"] == 2
        assert {(waiting["client"], waiting["job"], waiting["why"]) for waiting in state["waiting"]} == {
            ("test", "job", "step 1 is not committed yet"),
            ("reader", "", "it holds 1 readers"),
        }
        assert serving(daemon, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert serving(daemon, "") == health_pb2.HealthCheckResponse.SERVING
        with refused(CODE.UNAVAILABLE, "is being drained and accepts no new session"):
            Client(daemon.address)
        rank.commit(1)
        reader.call("CloseReader", reader_id=reader_id)
        assert "drained: ready to stop" in admin(daemon.address, "drain", "--yes", "--wait", str(SECONDS))
        # The sessions that are open go on.
        rank.train(2, 2)
        rank.assert_at(2)

        assert "new sessions are accepted" in admin(daemon.address, "undrain")
        assert serving(daemon, SERVICE) == health_pb2.HealthCheckResponse.SERVING
        clients.client(name="another")
        assert [entry["verb"] for entry in audited(daemon)] == ["Drain", "Drain", "Undrain"]
        declined = CliRunner().invoke(app, ["drain"], env=address_of(daemon), input="n\n")
        assert declined.exit_code == 1 and len(audited(daemon)) == 3
        kinds = [event["kind"] for event in admin_json(daemon.address, "events", "--kind", "daemon")["events"]]
        assert kinds == ["daemon"] * 3
        assert daemon.stop() == 0


def test_changed_quotas_count_after_a_reload_and_other_keys_are_named(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        file = tmp_path / "state.toml"
        before = file.read_text()
        clients.rank(Layout(name="job")).begin()
        assert "nothing has changed" in admin(daemon.address, "reload")
        file.write_text(before.replace("max_sessions = 200", "max_sessions = 300") + "[quotas.default]\nreaders = 0\n")
        assert admin_json(daemon.address, "reload") == {"changed": ["quotas"], "restart_needed": ["max_sessions"]}
        with refused(CODE.RESOURCE_EXHAUSTED, "the quota of job 'job' allows 0 readers"):
            clients.client().call("OpenReader", job="job")
        config = admin_json(daemon.address, "config")
        assert config["config"]["quotas"]["default"]["readers"] == 0 and config["config"]["max_sessions"] == 200
        assert "quotas" not in config["defaults"]
        file.write_text("host_budget = 1\n")
        refusal = CliRunner().invoke(app, ["reload"], env=address_of(daemon))
        assert refusal.exit_code == 1 and "the configuration stays as it is: bad configuration" in refusal.stderr
        file.write_text(before)
        assert "changed: quotas" in admin(daemon.address, "reload")
        clients.client().call("OpenReader", job="job")
        assert [entry["result"][:2] for entry in audited(daemon)] == ["OK", "OK", "FA", "OK"]
        assert daemon.stop() == 0


def test_a_reload_refuses_files_of_credentials_that_a_start_would_refuse(tmp_path: Path) -> None:
    """The daemon would not come back after the restart, and systemd does not try again after such an error."""
    with Daemon(tmp_path / "state") as daemon:
        file = tmp_path / "state.toml"
        before = file.read_text()
        tls = "".join(f'tls_{key} = "/nonexistent/{key}.pem"\n' for key in ("certificate", "key", "client_ca"))
        for keys, named in (
            ('token_file = "/nonexistent/tokens.toml"\n', "token_file: cannot read /nonexistent/tokens.toml"),
            (f'listen = "127.0.0.1:0"\n{tls}', "tls_certificate: cannot read /nonexistent/certificate.pem"),
        ):
            file.write_text(before + keys)
            refusal = CliRunner().invoke(app, ["reload"], env=address_of(daemon))
            assert refusal.exit_code == 1 and f"the configuration stays as it is: {named}" in refusal.stderr
        assert daemon.stop() == 0


def test_a_reload_refuses_budgets_that_the_jobs_do_not_fit_into_with_what_they_need(tmp_path: Path) -> None:
    file = tmp_path / "state.toml"

    def told(budgets: str) -> str:
        kept = [line for line in before.splitlines() if not line.startswith(("host_budget", "nvme_budget"))]
        file.write_text("\n".join([*kept, budgets]))
        result = CliRunner().invoke(app, ["reload"], env=address_of(daemon))
        assert (result.exit_code == 0) == ("a restart is needed" in result.stdout)
        return result.stdout + result.stderr

    with Daemon(tmp_path / "state") as daemon, Clients(daemon.address) as clients:
        before = file.read_text()
        clients.rank(Layout(name="job")).begin().train(1, 2)
        small = told('host_budget = "16MiB"\nnvme_budget = "1MiB"')
        assert "the configuration stays as it is: nvme_budget 1.0 MiB is too small" in small
        (nvme,) = re.findall(r"write at least (\d+MiB),", small)
        (host,) = re.findall(r"write at least (\d+MiB),", told('host_budget = "1MiB"\nnvme_budget = "16MiB"'))
        assert "needed for: host_budget, nvme_budget" in told(f'host_budget = "{host}"\nnvme_budget = "{nvme}"')
        assert daemon.stop() == 0
    # The figures are enough for a daemon with the job, and its next steps.
    budgets = {"host_budget": host, "nvme_budget": nvme}
    with Daemon(tmp_path / "state", budgets) as daemon, Clients(daemon.address) as clients:
        rank = clients.rank(Layout(name="job"))
        assert rank.resume() == 2
        rank.train(3, 3)
        rank.assert_at(3)


def serving(daemon: Daemon, service: str) -> Any:
    with channel_to(daemon.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS).status


# --- several daemons


def test_several_daemons_are_shown_each_and_summed_and_one_that_does_not_answer_is_named(
    daemon: Daemon, clients: Clients, job: str, tmp_path: Path
) -> None:
    two_nodes(clients, job).train(1, 1)
    with Daemon(tmp_path / "state", {"nvme_budget": "128MiB"}) as second, Clients(second.address) as others:
        rank = others.rank(Layout(name=job))
        rank.open(world_size=2)
        rank.register()
        rank.stage_all()
        rank.commit(0)
        both = f"{daemon.address},{second.address}"
        answer = admin_json(both, "tiers")
        assert [node["address"] for node in answer["nodes"]] == [daemon.address, second.address]
        budgets = [node["answer"]["tiers"][1]["budget_bytes"] for node in answer["nodes"]]
        assert budgets == [256 * MIB, 128 * MIB] and answer["total"]["tiers"][1]["budget_bytes"] == 384 * MIB
        assert answer["total"]["sessions"] == 2 and {node["error"] for node in answer["nodes"]} == {""}
        (total,) = admin_json(both, "jobs")["total"]["jobs"]
        assert (total["name"], total["committed_step"], total["sessions"]) == (job, 0, 2)
        table = admin(both, "top", "--once")
        assert f"== {second.address}" in table and "== all 2 daemons together" in table
        steps = admin_json(both, "versions", job)["total"]["steps"]
        assert [step["step"] for step in steps] == [0, 1]
        assert len(admin_json(both, "sessions")["total"]["sessions"]) == 2
        assert admin_json(both, "config")["total"] is None

        nowhere, nodes = f"unix:{tmp_path}/none.sock", tmp_path / "nodes"
        nodes.write_text(f"{daemon.address}\n{nowhere}  # it is not there\n{second.address}\nunix:/no/directory/s\n")
        shown = CliRunner().invoke(app, ["jobs", "--json", "--address", f"@{nodes}"])
        assert shown.exit_code == 3
        gone, no_directory = shown.stderr.splitlines()
        assert gone.startswith(f"paramserver-admin: {nowhere}: UNAVAILABLE: no daemon answers at {nowhere}")
        assert no_directory.startswith("paramserver-admin: unix:/no/directory/s: UNAVAILABLE: no daemon answers at")
        answers = json.loads(shown.stdout)
        assert [node["answer"] is None for node in answers["nodes"]] == [False, True, False, True]
        assert answers["total"]["jobs"][0]["sessions"] == 2
        assert CliRunner().invoke(app, ["jobs", "--address", f"{nowhere},{nowhere}2"]).exit_code == 1
        for arguments in (["shards", job], ["tiers", "--watch", "1"], ["events", "--follow"]):
            assert CliRunner().invoke(app, [*arguments, "--address", both]).exit_code == 2

        rank.close()
        failed = CliRunner().invoke(app, ["delete-job", job, "--yes", "--address", both])
        assert failed.exit_code == 3 and "has 1 sessions attached" in failed.stderr
        assert admin_json(second.address, "jobs")["jobs"] == []
        assert admin_json(both, "verify")["total"]["damage"] == []
        assert second.stop() == 0


def test_an_address_that_cannot_be_used_is_told_before_any_daemon_is_asked(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    clients.rank(Layout(name=job, numels=(16,), groups=("a",))).begin().close()
    addresses = f"{daemon.address},unix:relative,unix:also"

    wrong = CliRunner().invoke(app, ["delete-job", job, "--yes", "--address", addresses])

    assert (wrong.exit_code, wrong.stdout) == (2, "")
    (line,) = wrong.stderr.splitlines()
    assert line.startswith("paramserver-admin: address 'unix:relative': write the absolute path")
    assert [described["name"] for described in admin_json(daemon.address, "jobs")["jobs"]] == [job]


def test_the_shell_completes_verbs_and_names_of_jobs(daemon: Daemon, clients: Clients, job: str) -> None:
    for name in (job, f"{job};reboot"):
        clients.rank(Layout(name=name, numels=(16,), groups=("a",))).open()

    def completions(*words: str) -> list[str]:
        environment = {
            **{"_PARAMSERVER_ADMIN_COMPLETE": "complete_bash", "PARAMSERVER_ADDRESS": daemon.address},
            **{"COMP_WORDS": " ".join(["paramserver-admin", *words]), "COMP_CWORD": str(len(words))},
        }
        return CliRunner().invoke(app, [], prog_name="paramserver-admin", env=environment).stdout.split()

    assert {"version", "versions"} <= set(completions("ver"))
    assert completions("versions", job[:5]) == [job]
    assert completions("versions", "--address", "unix:/no/directory/s", job[:5]) == []
