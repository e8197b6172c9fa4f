"""Jobs, clients, parameters and groups with hostile names: every command shows printable names without harm, the log
keeps one line per entry, and the daemon refuses names that cannot be shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import grpc
import pytest

from paramserver.contract.printable import printable
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.vocabulary import KIND_TO_WIRE
from storage.base.shard import Kind
from tests.hostile_names import ACCEPTED, REFUSED
from tests.integration.support.admin import admin
from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Client, Clients, refused
from tests.unit.paramserver.contract.test_printable import assert_harmless, without_lines
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode


@pytest.mark.parametrize("name", ACCEPTED.values(), ids=ACCEPTED)
def test_every_verb_shows_a_name_that_is_printable(daemon: Daemon, clients: Clients, name: str) -> None:
    since = len(daemon.log)
    rank = clients.rank(Layout(name=name, numels=(16,), groups=(name[:300],)), name=name).begin()
    rank.train(1, 1)
    tables = [admin(daemon.address, verb) for verb in ("tiers", "jobs", "sessions")]
    tables.append(admin(daemon.address, "shards", "--", name))
    kind = KIND_TO_WIRE[Kind.PARAM]
    rank.call("Prefetch", wants=[pb.PrefetchRequest.Want(slab=pb.SlabName(group=name[:300], kind=kind))])
    tables += [admin(daemon.address, *verb) for verb in (("top", "--once"), ("events", "-n", "5"), ("prefetch",))]
    tables.append(admin(daemon.address, "versions", "--", name))
    for table in tables:
        assert_harmless(table)
    if len(name) < 20:
        assert all(name in without_lines(table) for table in tables[1:8])
    (job,) = json.loads(admin(daemon.address, "jobs", "--json"))["jobs"]
    (session,) = json.loads(admin(daemon.address, "sessions", "--json"))["sessions"]
    shards = json.loads(admin(daemon.address, "shards", "--json", "--", name))["shards"]
    assert job["name"] == session["client"] == session["job"] == name
    assert {shard["group"] for shard in shards} == {name[:300]}
    # The daemon quotes the name in an error message and in its log.
    for verb, *arguments in (("delete-job",), ("rollback", "0")):
        assert_harmless(admin(daemon.address, verb, "--yes", "--", name, *arguments, code=1))
    with refused(CODE.NOT_FOUND):
        rank.acquire(name + "?", Kind.PARAM, pb.LEASE_MODE_READ)
    rank.close()
    assert_harmless(admin(daemon.address, "delete-job", "--yes", "--", name))
    written = daemon.log[since:]
    assert f"session opened by {name}" in written
    assert_harmless(written)


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED)
def test_a_name_that_a_terminal_would_act_upon_is_refused_wherever_it_is_given(
    daemon: Daemon, clients: Clients, job: str, name: str
) -> None:
    since = len(daemon.log)
    with refused(CODE.INVALID_ARGUMENT, "hello.client must be"):
        Client(daemon.address, name)
    rank = clients.rank(Layout(name=job, numels=(16,), groups=("a",)))
    for field in ("job", "layout", "run_id"):
        changes: dict[str, Any] = {field: name}
        with refused(CODE.INVALID_ARGUMENT, f"{field} must be 1 to 1024 bytes of printable text"):
            rank.open(**changes)
    rank.open()
    for method in ("OpenReader", "ListStoredTensors"):
        with pytest.raises(grpc.RpcError) as caught:
            rank.call(method, job=name)
        assert isinstance(caught.value, grpc.Call)
        assert_harmless(caught.value.details() or "")
    with pytest.raises(grpc.RpcError) as caught:
        rank.admin.ListShards(admin_pb.ListShardsRequest(job=name, page_token=name))
    assert isinstance(caught.value, grpc.Call)
    assert_harmless(caught.value.details() or "")
    assert_harmless(admin(daemon.address, "shards", "--", name, code=1))
    assert_harmless(daemon.log[since:])


def test_a_terminal_that_lacks_the_characters_of_a_name_shows_them_escaped(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    name = f"{job}-\N{GRINNING FACE}"
    clients.rank(Layout(name=name, numels=(16,), groups=("a",))).open()
    shown = subprocess.run(
        [sys.executable, "-c", "from paramserver.admin.cli import main; main()", "jobs", "--address", daemon.address],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert "\\U0001f600" in shown.stdout and printable(job) in shown.stdout
