"""Access rights: the daemon refuses a request without the right for it with a constant text that reveals nothing, logs
the refusal, and takes no harm."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.contract.channel import NO_PROXY
from paramserver.security.certificates import make_certificates
from paramserver.security.gate import MAX_REFUSALS_LOGGED, REFUSAL_WINDOW_SECONDS
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token, remove_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1 import store_admin_pb2_grpc as admin_grpc
from tests.integration.support.guarded import Guarded, expired_certificate, guarded_daemon
from tests.integration.support.store_client import CALL_SECONDS, Client, Rank, refused
from tests.integration.support.training import Run, assert_bit_equal, store_config, train_plain, train_through_store
from tests.integration.support.waiting import succeed_at_last, wait_until
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode
UNAUTHENTICATED = "the call needs a token that this daemon accepts, as metadata `authorization: Bearer TOKEN`"
FORBIDDEN = "the token does not allow this"
UNKNOWN_SESSION = "the session is unknown or has ended; open a new one"
FOLLOW_DEADLINE_SECONDS = 10.0

STORE = pb.DESCRIPTOR.services_by_name["ParameterStore"]
ADMIN = admin_pb.DESCRIPTOR.services_by_name["StoreAdmin"]
METHODS: Sequence[MethodDescriptor] = [*STORE.methods, *ADMIN.methods]
TLS_FILES = [("ca", "ca.pem"), ("certificate", "client.pem"), ("key", "client-key.pem")]
REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with guarded_daemon() as daemon:
        yield daemon


@pytest.fixture
def others(guarded: Guarded) -> Iterator[Rank]:
    """A rank of Bob's job at step 0, in a session of his. At the end of the test the daemon must serve him as
    before."""
    layout = Layout(name="bob", numels=(5_000, 17), groups=("block.0",))
    rank = Rank(guarded.address, layout, run_id=secrets.token_hex(8), channel=guarded.channel("bob")).begin()
    yield rank
    rank.train(1, 1)
    rank.assert_at(1)
    rank.close()
    with guarded.channel("operator") as channel:
        admin = admin_grpc.StoreAdminStub(channel)
        succeed_at_last(lambda: admin.DeleteJob(admin_pb.DeleteJobRequest(job="bob"), timeout=CALL_SECONDS))


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def answer(channel: grpc.Channel, method: str, request: bytes = b"", token: str | None = None) -> tuple[Any, str]:
    """Make a call with raw bytes and return its status and text. Every kind of method can be called as stream to
    stream."""
    metadata = () if token is None else (("authorization", token),)
    stream: Any = channel.stream_stream(method)
    call = stream(iter([request]), metadata=metadata, timeout=CALL_SECONDS)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), caught.value.details() or ""


def serves(channel: grpc.Channel) -> None:
    admin_grpc.StoreAdminStub(channel).GetTiers(admin_pb.GetTiersRequest(), timeout=CALL_SECONDS)


# --- tokens


@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
def test_no_rpc_is_served_without_a_token_that_counts(guarded: Guarded, others: Rank, tcp: bool) -> None:
    late, good = guarded.tokens["late"], guarded.tokens["operator"]
    bad = [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {good}",
        good,
        f"Bearer {good[:-1]}",
        f"Bearer {late}",
    ]
    with guarded.channel(None, tcp=tcp) as channel:
        for method in [*map(path, METHODS), f"/{REFLECTION}"]:
            answers = {answer(channel, method, token=token) for token in bad}
            assert answers == {(CODE.UNAUTHENTICATED, UNAUTHENTICATED)}, method
        # The id of a live session does not replace a token.
        request = pb.ListVersionsRequest(session_id=others.session_id).SerializeToString()
        assert answer(channel, f"/{STORE.full_name}/ListVersions", request)[0] is CODE.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    time.sleep(REFUSAL_WINDOW_SECONDS)


def test_the_request_of_a_stranger_is_not_waited_for(guarded: Guarded) -> None:
    """A daemon that receives requests before it looks at tokens holds bytes for every stranger."""
    done = threading.Event()

    def refuse_without_request(channel: grpc.Channel, method: str, token: str | None, code: grpc.StatusCode) -> str:
        stream: Any = channel.stream_stream(method)
        metadata = () if token is None else (("authorization", token),)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream(iter(done.wait, True), metadata=metadata, timeout=CALL_SECONDS))
        assert isinstance(caught.value, grpc.Call) and caught.value.code() is code, caught.value
        return caught.value.details() or ""

    with guarded.channel(None) as channel:
        for method in METHODS:
            for token in (None, "Bearer wrong"):
                refuse_without_request(channel, path(method), token, CODE.UNAUTHENTICATED)
        # The health service asks for no token, so its requests must come soon.
        details = refuse_without_request(channel, "/grpc.health.v1.Health/Check", None, CODE.INVALID_ARGUMENT)
        assert details == "the request did not come for 5 s"
        done.set()
    time.sleep(REFUSAL_WINDOW_SECONDS)


@pytest.mark.parametrize(
    ("token", "reason"), [(None, "no token"), ("wrong", "an unknown token"), ("late", "token late has expired")]
)
def test_a_refusal_is_logged_with_its_reason_and_without_the_token(
    guarded: Guarded, token: str | None, reason: str
) -> None:
    since = len(guarded.daemon.log)
    shown = None if token is None else f"Bearer {guarded.tokens.get(token, 'wr0ng-t0ken')}"
    with guarded.channel(None) as channel:
        answer(channel, f"/{ADMIN.full_name}/ListJobs", token=shown)
    line = guarded.wait_for_log("refused ListJobs from ipv4:127.0.0.1:", since)
    assert line.endswith(reason) or f"{reason} " in line
    assert "wr0ng-t0ken" not in guarded.daemon.log
    assert not [name for name, secret in guarded.tokens.items() if secret in guarded.daemon.log]


def test_the_admin_service_is_for_admins(guarded: Guarded, others: Rank) -> None:
    since = len(guarded.daemon.log)
    with guarded.channel("bob", tcp=False) as channel:
        answers = {answer(channel, path(method)) for method in ADMIN.methods}
        assert answers == {(CODE.PERMISSION_DENIED, FORBIDDEN)}
    line = guarded.wait_for_log("refused DeleteJob from unix:", since)
    assert "token bob is no admin's" in line
    with guarded.channel("operator") as channel:
        serves(channel)
    time.sleep(REFUSAL_WINDOW_SECONDS)


def test_what_is_destroyed_is_recorded_with_the_name_of_the_token_and_never_with_a_token(guarded: Guarded) -> None:
    rank = Rank(guarded.address, Layout(name="bob", numels=(16,), groups=("a",)), channel=guarded.channel("bob"))
    rank.begin().close()
    with guarded.channel("bob") as channel, refused(CODE.NOT_FOUND, "none"):
        request = admin_pb.ForgetStepRequest(job="bob", name="none")
        admin_grpc.StoreAdminStub(channel).ForgetStep(request, timeout=CALL_SECONDS)
    for token in ("bob", "operator"):
        with guarded.channel(token) as channel, contextlib.suppress(grpc.RpcError):
            admin_grpc.StoreAdminStub(channel).DeleteJob(admin_pb.DeleteJobRequest(job="bob"), timeout=CALL_SECONDS)
    of_jobs, text = ((guarded.directory / f"state/{name}").read_text() for name in ("audit.jobs.jsonl", "audit.jsonl"))
    # The token of bob may not delete jobs, so its call was refused before it became one that destroys something.
    entry = json.loads(text.splitlines()[-1])
    assert (entry["principal"], entry["verb"], entry["arguments"]) == ("operator", "DeleteJob", {"job": "bob"})
    assert entry["result"] == "OK" and entry["peer"].startswith("ipv4:127.0.0.1:")
    assert '"bob", "peer"' not in text
    forgotten = json.loads(of_jobs.splitlines()[-1])
    assert (forgotten["principal"], forgotten["verb"]) == ("bob", "ForgetStep")
    assert not [name for name, secret in guarded.tokens.items() if secret in text + of_jobs]


def test_another_job_is_refused_alike_whether_or_not_it_exists(guarded: Guarded, others: Rank) -> None:
    since = len(guarded.daemon.log)
    alice = Client(guarded.address, channel=guarded.channel("alice"))
    try:
        for name in ("bob", "nobody", "alice", "x" * 5000, "a\x00b", ""):
            for method in ("OpenReader", "ListStoredTensors", "WatchJob", "OpenJob"):
                request = getattr(pb, f"{method}Request")(session_id=alice.session_id, job=name)
                refusal = answer(alice.channel, f"/{STORE.full_name}/{method}", request.SerializeToString())
                assert refusal == (CODE.PERMISSION_DENIED, FORBIDDEN), (method, name)
        assert not alice.call("ListStoredJobs").jobs
        assert [job.name for job in others.call("ListStoredJobs").jobs] == ["bob"]
    finally:
        alice.close()
    assert "token alice does not allow job 'bob'" in guarded.wait_for_log("refused OpenReader from ipv4:", since)
    time.sleep(REFUSAL_WINDOW_SECONDS)


def test_a_token_uses_the_jobs_that_match_its_patterns_and_an_admins_all(guarded: Guarded) -> None:
    for token, name in (("alice", "alice-1"), ("bob", "shared/../x"), ("operator", "alice-2")):
        layout = Layout(name=name, numels=(16,), groups=("a",))
        rank = Rank(guarded.daemon.address, layout, channel=guarded.channel(token, tcp=False)).begin()
        rank.assert_at(0)
        rank.close()
    operator = Client(guarded.address, channel=guarded.channel("operator"))
    alice = Client(guarded.address, channel=guarded.channel("alice"))
    assert {"alice-1", "alice-2", "shared/../x"} <= {job.name for job in operator.call("ListStoredJobs").jobs}
    assert {job.name for job in alice.call("ListStoredJobs").jobs} == {"alice-1", "alice-2"}
    assert operator.call("OpenReader", job="alice-1").step == 0
    operator.close()
    alice.close()


def test_a_session_is_its_principals_alone(guarded: Guarded, others: Rank) -> None:
    since = len(guarded.daemon.log)
    unknown = pb.CommitStepRequest(session_id="0" * 32, step=1).SerializeToString()
    stolen = pb.CommitStepRequest(session_id=others.session_id, step=1).SerializeToString()
    for thief in ("alice", "operator"):
        with guarded.channel(thief) as channel:
            answers = {answer(channel, f"/{STORE.full_name}/CommitStep", request) for request in (unknown, stolen)}
            taken_up = pb.SessionRequest(hello=pb.SessionRequest.Hello(client="thief", session_id=others.session_id))
            answers.add(answer(channel, f"/{STORE.full_name}/Session", taken_up.SerializeToString()))
            assert answers == {(CODE.NOT_FOUND, UNKNOWN_SESSION)}
        line = guarded.wait_for_log(f"token {thief} asks for a session that bob has opened", since)
        assert "refused CommitStep from ipv4:127.0.0.1:" in line
        guarded.wait_for_log("refused Session from ipv4:127.0.0.1:", since)


def test_a_flood_of_refusals_is_logged_as_a_number(guarded: Guarded) -> None:
    time.sleep(REFUSAL_WINDOW_SECONDS)
    since, started = len(guarded.daemon.log), time.monotonic()
    with guarded.channel(None, tcp=False) as channel:
        for _ in range(300):
            answer(channel, f"/{ADMIN.full_name}/GetTiers")
    windows = (time.monotonic() - started) / REFUSAL_WINDOW_SECONDS + 1

    def logged_and_suppressed() -> tuple[int, int]:
        lines = [line for line in guarded.daemon.log[since:].splitlines() if "refused" in line]
        suppressed = sum(int(line.split("refused ")[1].split()[0]) for line in lines if "more calls" in line)
        return sum("GetTiers" in line for line in lines), suppressed

    wait_until(lambda: sum(logged_and_suppressed()) >= 300)
    logged, suppressed = logged_and_suppressed()
    assert logged + suppressed == 300 and suppressed and logged <= windows * MAX_REFUSALS_LOGGED


def test_the_token_file_is_followed_and_a_broken_one_is_not(guarded: Guarded) -> None:
    token = add_token(guarded.token_file, "guest", Role.JOB, ["guest"])
    guest: list[Client] = []

    def enter() -> None:
        channel = guarded.channel("operator", token=token)
        try:
            guest.append(Client(guarded.address, channel=channel))
        except grpc.RpcError:
            channel.close()
            raise

    succeed_at_last(enter)
    (client,) = guest
    good = guarded.token_file.read_text()
    guarded.token_file.write_text(good + "[[token")
    guarded.wait_for_log("the changed token file cannot be used, the tokens before stay in use")
    assert client.call("ListStoredJobs") is not None
    guarded.token_file.write_text(good)
    remove_token(guarded.token_file, "guest")
    # The session of a withdrawn token ends at its next heartbeat.
    assert client.ended.wait(FOLLOW_DEADLINE_SECONDS)
    with refused(CODE.UNAUTHENTICATED, UNAUTHENTICATED):
        client.call("ListStoredJobs")
    client.close()
    with guarded.channel("operator") as channel:
        serves(channel)


def test_a_session_whose_token_has_other_rights_now_is_ended(guarded: Guarded) -> None:
    add_token(guarded.token_file, "mutable", Role.JOB, ["one"])
    text = guarded.token_file.read_text()
    token = add_token(guarded.token_file, "unused", Role.JOB, ["two"])
    entry = guarded.token_file.read_text().removeprefix(text)
    client: list[Client] = []

    def enter() -> None:
        channel = guarded.channel("operator", token=token)
        try:
            client.append(Client(guarded.address, channel=channel))
        except grpc.RpcError:
            channel.close()
            raise

    succeed_at_last(enter)
    guarded.token_file.write_text(text + entry.replace('"two"', '"three"'))
    assert client[0].ended.wait(FOLLOW_DEADLINE_SECONDS)
    with refused(CODE.NOT_FOUND, UNKNOWN_SESSION):
        client[0].call("ListStoredJobs")
    client[0].close()


# --- certificates


def test_a_client_without_a_good_certificate_is_not_let_in(guarded: Guarded, others: Rank, tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1"], ["client"], 1)
    expired, expired_key = expired_certificate(guarded.certificates, tmp_path)
    foreign: dict[str, Any] = {"tls_certificate": tmp_path / "client.pem", "tls_key": tmp_path / "client-key.pem"}
    late: dict[str, Any] = {"tls_certificate": expired, "tls_key": expired_key}
    channels = {
        "none": grpc.secure_channel(
            guarded.address,
            grpc.ssl_channel_credentials((guarded.certificates / "ca.pem").read_bytes()),
            options=NO_PROXY,
        ),
        "of another authority": guarded.channel("operator", **foreign),
        "expired": guarded.channel("operator", **late),
        "no TLS at all": guarded.channel("operator", tls_ca=None, tls_certificate=None, tls_key=None, insecure=True),
        "the daemon is another's": guarded.channel("operator", tls_ca=tmp_path / "ca.pem"),
    }
    since = len(guarded.daemon.log)
    for channel in channels.values():
        with channel:
            assert answer(channel, f"/{ADMIN.full_name}/GetTiers")[0] is CODE.UNAVAILABLE
    guarded.wait_for_log("PEER_DID_NOT_RETURN_A_CERTIFICATE", since)
    guarded.wait_for_log("CERTIFICATE_VERIFY_FAILED", since)
    guarded.wait_for_log("certificate has expired", since)
    with guarded.channel("operator") as channel:
        serves(channel)


def test_changed_certificates_are_taken_up_and_broken_ones_are_not(guarded: Guarded, tmp_path: Path) -> None:
    names = ["ca.pem", "server.pem", "server-key.pem"]
    before = {name: (guarded.certificates / name).read_bytes() for name in names}
    make_certificates(tmp_path, ["127.0.0.1"], ["client"], 1)
    fields = {"ca": "ca.pem", "certificate": "client.pem", "key": "client-key.pem"}
    new: dict[str, Any] = {f"tls_{field}": tmp_path / name for field, name in fields.items()}
    (guarded.certificates / "server-key.pem").write_bytes((tmp_path / "server-key.pem").read_bytes())
    with guarded.channel("operator") as channel:
        serves(channel)
    guarded.wait_for_log("changed certificates cannot be used, the ones before stay in use: tls_key")
    try:
        for name in names:
            (guarded.certificates / name).write_bytes((tmp_path / name).read_bytes())
        with guarded.channel("operator", **new) as channel:
            serves(channel)
        with guarded.channel("operator", tls_ca=tmp_path / "ca.pem") as channel:
            assert answer(channel, f"/{ADMIN.full_name}/GetTiers")[0] is CODE.UNAVAILABLE
    finally:
        for name, content in before.items():
            (guarded.certificates / name).write_bytes(content)
    with guarded.channel("operator") as channel:
        serves(channel)


# --- the sockets


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("suffix", ["", ".arena"])
def test_another_user_cannot_open_the_sockets(guarded: Guarded, suffix: str) -> None:
    nobody = 65534
    program = (
        "import os, socket, sys\n"
        f"os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})\n"
        "with socket.socket(socket.AF_UNIX) as client:\n"
        "    assert os.path.exists(sys.argv[1])\n"
        "    try: client.connect(sys.argv[1])\n"
        "    except PermissionError: sys.exit(7)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, f"{guarded.daemon.socket}{suffix}"], timeout=CALL_SECONDS, check=False
    )
    assert child.returncode == 7
    with guarded.channel("operator", tcp=False) as channel:
        serves(channel)


# --- the ways in, from end to end


def test_the_admin_tool_shows_a_token_and_a_certificate(guarded: Guarded, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(guarded.tokens["operator"] + "\n")
    tls = [f"--tls-{name}={guarded.certificates / file}" for name, file in TLS_FILES]
    tcp = CliRunner().invoke(app, [f"--token-file={token_file}", *tls, "tiers", "--address", guarded.address])
    assert tcp.exit_code == 0 and "host" in tcp.output, tcp.output
    environment = {"PARAMSERVER_TOKEN_FILE": str(token_file), "PARAMSERVER_ADDRESS": guarded.daemon.address}
    unix = CliRunner().invoke(app, ["jobs"], env=environment)
    assert unix.exit_code == 0, unix.output
    nothing = CliRunner().invoke(app, ["jobs", "--address", guarded.daemon.address])
    assert nothing.exit_code == 1 and "UNAUTHENTICATED: the call needs a token" in nothing.output
    half = CliRunner().invoke(app, [*tls[:1], "jobs", "--address", guarded.address])
    assert half.exit_code == 2 and "--tls-key" in half.output
    far = CliRunner().invoke(app, [f"--token-file={token_file}", "jobs", "--address", "10.0.0.1:1"])
    assert far.exit_code == 2 and "in the clear" in far.output and guarded.tokens["operator"] not in far.output


def test_a_training_run_over_tls_with_a_token_gives_torchs_bits(guarded: Guarded, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(guarded.tokens["alice"])
    config = store_config(tmp_path)
    del config["zero_optimization"]["offload_param"]["nvme_path"]
    config["paramserver"] = {
        "address": guarded.address,
        "job": "alice-trains",
        "token_file": str(token_file),
        "tls": {name: str(guarded.certificates / file) for name, file in TLS_FILES},
    }
    run = Run(steps=5, clipping=0.5)
    result = train_through_store(replace(run, config=config, prefer_streams=True))
    assert result.plane == "streams"
    assert_bit_equal(result, train_plain(run))
