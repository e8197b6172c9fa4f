"""The figures behind the page of a real daemon, and who may read them. test_page_in_browser.py looks at the page."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paramserver.page.data import MOST_COMMIT_EVENTS, MOST_JOBS
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.tiers.base import round_up
from tests.hostile_names import ACCEPTED
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.forked import ROOT
from tests.integration.support.page_pictures import ON_A_NODE, SHOWN_AT, daemon_on_a_node
from tests.integration.support.ranks import free_port
from tests.integration.support.store_client import Clients
from tests.unit.storage.builders import Layout

SECONDS = 30.0
# Four groups of this size have more states than the host budget.
NUMEL = 400_000
MARKUP = "<img src=x onerror=\"document.title='harmed'\"></td><script>document.title='harmed'</script>&amp;'"


class Answer:
    """What the endpoint answers to one request."""

    def __init__(self, address: str, path: str, *, method: str = "GET", **headers: str) -> None:
        connection = http.client.HTTPConnection(address, timeout=SECONDS)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            self.status = answer.status
            self.headers = dict(answer.getheaders())
            self.text = answer.read().decode()
        finally:
            connection.close()

    def json(self) -> Any:
        """Return the body as JSON, which has no other content than JSON allows."""
        assert self.status == 200 and self.headers["Content-Type"] == "application/json", self.text
        return json.loads(self.text, parse_constant=pytest.fail)


def data_of(address: str, since: int = 0) -> Any:
    return Answer(address, f"/data.json?since={since}").json()


def fields_of(value: Any, path: str = "") -> set[str]:
    """Return the names of all fields; those of objects in lists are called `list[].field`."""
    if isinstance(value, Mapping):
        return {name for key, entry in value.items() for name in ({f"{path}{key}"} | fields_of(entry, f"{path}{key}."))}
    if isinstance(value, list):
        return {name for entry in value for name in fields_of(entry, f"{path.removesuffix('.')}[].")}
    return set()


def documented_fields() -> set[str]:
    page = (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.\[\]]+)`", row.split(" | ")[0])}


def test_the_figures_agree_with_the_admin_service_and_with_the_page_on_them(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    layout = Layout(name=MARKUP, numels=(NUMEL,), groups=("a", "b", "c", "d"), with_skips=False)
    config = {
        "metrics_listen": address,
        "nvme_budget": "256MiB",
        "heartbeat_timeout_seconds": 5.0,
        "scrub_bandwidth": 0,
    }
    with Daemon(tmp_path / "state", config) as daemon:
        empty = data_of(address)
        with Clients(daemon.address) as clients:
            rank = clients.rank(layout, name="a client").begin()
            rank.train(1, 20)
            # The session of this client ends after 5 s, which is less than the steps take on a busy machine.
            clients.client(name="silent", silent=True)
            deadline = time.monotonic() + SECONDS
            found = data_of(address)
            while not found["jobs"] or found["jobs"][0]["committed_step"] < 20 or not found["sessions"]["silent"]:
                assert time.monotonic() < deadline, found
                time.sleep(0.2)
                found = data_of(address)
            with admin_of(daemon.address) as admin:
                shown = admin.GetTiers(admin_pb.GetTiersRequest())
                (listed,) = admin.ListJobs(admin_pb.ListJobsRequest()).jobs
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log

    assert found["address"] == daemon.address
    assert (empty["jobs"], empty["all_jobs"], empty["sessions"]["open"]) == ([], 0, 0)
    for tier, info in zip(found["tiers"], shown.tiers, strict=True):
        assert (tier["budget_bytes"], tier["used_bytes"]) == (info.budget_bytes, info.used_bytes)
        assert tier["free_bytes"] == info.budget_bytes - info.used_bytes
        assert tier["written_bytes"] == info.bytes_written
    (job,) = found["jobs"]
    assert (job["name"], job["committed_step"], job["durable_step"]) == (MARKUP, 20, 20)
    assert (job["sessions"], job["ranks"], job["parameters"]) == (1, 1, listed.parameters)
    assert job["bytes"]["nvme"] == sum(part.bytes for part in listed.bytes if part.tier == pb.TIER_NVME)
    step = job["step"]
    assert (step["steps"], len(job["recent_seconds"])) == (16, 20)
    # A step writes the parameters and both moments, and reads those of them that host memory has no room for.
    assert step["written_bytes"] == step["all_written_bytes"] == len(layout.groups) * 3 * round_up(4 * NUMEL)
    assert 0 < step["read_bytes"] == step["all_read_bytes"] <= step["written_bytes"]
    assert 0 < step["reading_seconds"] < step["seconds"] and 0 < step["writing_seconds"] < step["seconds"]
    assert 0 < step["needed_seconds"]["commit"] < step["seconds"] and job["steps_per_minute"] > 0
    assert 0 < step["needed_seconds"]["optimizer"] < step["seconds"]
    (silent,) = found["sessions"]["longest_silent"]
    assert silent["client"] == "silent" and silent["seconds"] >= found["sessions"]["silent_after_seconds"]
    texts = [(event["kind"], event["subject"]) for event in found["events"]]
    assert ("session", "a client") in texts and ("job", MARKUP) in texts
    assert sum(kind == "commit" for kind, _ in texts) == MOST_COMMIT_EVENTS
    numbers = [event["number"] for event in found["events"]]
    assert numbers == sorted(numbers, reverse=True)
    # The documented fields are there even if a list is empty here.
    assert fields_of(found) | fields_of(empty) == documented_fields()


def test_a_reader_gets_each_sample_once_and_no_list_grows_without_bound(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"metrics_listen": address}) as daemon:
        with Clients(daemon.address) as clients:
            for index in range(MOST_JOBS + 3):
                layout = Layout(name=f"idle {index}", numels=(16,), groups=("a",), every_steps=0)
                clients.rank(layout).begin().close()
            deadline = time.monotonic() + SECONDS
            first = data_of(address)
            while len(first["history"]["rows"]) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.2)
                first = data_of(address)
            time.sleep(first["interval_seconds"] + 0.2)
            second = data_of(address, first["history"]["next"])
            both = data_of(address)
        assert daemon.stop() == 0

    columns, rows = first["history"]["columns"], both["history"]["rows"]
    assert (len(first["jobs"]), first["all_jobs"]) == (MOST_JOBS, MOST_JOBS + 3)
    assert second["history"]["rows"] and first["history"]["rows"] + second["history"]["rows"] == rows
    assert {len(row) for row in rows} == {len(columns)} and len(set(columns)) == len(columns)
    times = [row[columns.index("time")] for row in rows]
    assert all(1.5 < later - earlier < 10 for earlier, later in pairwise(times))
    assert rows[-1][columns.index("host_used_bytes")] == both["tiers"][0]["used_bytes"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path_factory.mktemp("watched") / "state", {"metrics_listen": address}) as daemon:
        yield daemon, address


def test_every_name_is_in_the_figures_as_the_client_wrote_it(watched: tuple[Daemon, str]) -> None:
    daemon, address = watched
    with Clients(daemon.address) as clients:
        for name in ACCEPTED.values():
            clients.rank(Layout(name=name, numels=(16,), groups=("a",)), name=name).begin()
        deadline = time.monotonic() + SECONDS
        while not set(ACCEPTED.values()) <= {job["name"] for job in data_of(address)["jobs"]}:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_the_document_may_load_nothing_and_run_nothing_else(watched: tuple[Daemon, str]) -> None:
    _, address = watched
    page = Answer(address, "/")
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))

    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["style-src"])
    for answer in (page, Answer(address, "/data.json")):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in answer.headers
    # Nothing comes from elsewhere, and no text becomes an element.
    assert re.findall(r"(?:src|href)=\"?(?:https?:)?//", page.text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", page.text) == []
    head = Answer(address, "/", method="HEAD")
    assert (head.status, head.text, head.headers["Content-Length"]) == (200, "", str(len(page.text.encode())))


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "127.0.0.1", "[::1]:{port}"])
def test_the_names_of_loopback_are_answered(watched: tuple[Daemon, str], name: str) -> None:
    _, address = watched

    assert Answer(address, "/data.json", Host=name.format(port=address.partition(":")[2])).status == 200


@pytest.mark.parametrize("name", ["rebound.example", "rebound.example:{port}", "127.0.0.1.example", "", "10.0.0.1"])
@pytest.mark.parametrize("path", ["/", "/data.json", "/metrics"])
def test_a_web_site_whose_name_leads_to_loopback_gets_nothing(
    watched: tuple[Daemon, str], name: str, path: str
) -> None:
    _, address = watched
    answer = Answer(address, path, Host=name.format(port=address.partition(":")[2]))

    assert answer.status == 421
    assert "under these names only: 127.0.0.1, [::1], localhost; metrics_names" in answer.text


def test_configured_names_are_answered_besides_those_of_loopback(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"metrics_listen": address, "metrics_names": ["Node7.example"]}):
        for name in ("node7.example", "NODE7.example:9464", "localhost"):
            assert Answer(address, "/metrics", Host=name).status == 200
        refused = Answer(address, "/metrics", Host="example")
        assert refused.status == 421
        assert "localhost, node7.example; metrics_names" in refused.text


# The last one is the digit three of the Arabic script.
@pytest.mark.parametrize("since", ["-1", "1.5", "x", "9" * 40, "%D9%A3"])
def test_a_bad_number_of_a_sample_is_refused(watched: tuple[Daemon, str], since: str) -> None:
    _, address = watched
    answer = Answer(address, f"/data.json?since={since}")

    assert answer.status == 400
    assert "write the number of a sample" in answer.text


def test_the_page_can_only_be_read(watched: tuple[Daemon, str]) -> None:
    _, address = watched
    answer = Answer(address, "/data.json", method="POST")

    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert Answer(address, "/page").status == 404


def test_the_figures_need_the_token_of_an_admin_and_the_document_does_not(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    tokens = tmp_path / "tokens.toml"
    admin = add_token(tokens, "operator", Role.ADMIN)
    other = add_token(tokens, "trainer", Role.JOB, ["*"])
    with Daemon(tmp_path / "state", {"metrics_listen": address, "token_file": str(tokens)}) as daemon:
        assert Answer(address, "/").status == 200
        assert Answer(address, "/data.json").status == 401
        assert Answer(address, "/data.json", Authorization="Bearer guessed").status == 401
        assert Answer(address, "/data.json", Authorization=f"Bearer {other}").status == 403
        assert Answer(address, "/data.json", Authorization=f"Bearer {admin}").json()["jobs"] == []
        assert str(daemon.state_dir) not in Answer(address, "/").text
        assert daemon.stop() == 0


def test_one_switch_leaves_the_metrics_without_the_page(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Daemon(tmp_path / "state", {"metrics_listen": address}, flags=["--no-page"]) as daemon:
        assert Answer(address, "/").status == 404
        assert Answer(address, "/data.json").status == 404
        assert "paramserver_build_info" in Answer(address, "/metrics").text
        assert daemon.stop() == 0
        assert "page at" not in daemon.log


def test_the_pictures_of_the_page_name_no_directory_of_the_machine_on_which_they_are_made(tmp_path: Path) -> None:
    if subprocess.run([*ON_A_NODE, str(tmp_path), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces")
    address = f"127.0.0.1:{free_port()}"
    with daemon_on_a_node(tmp_path, address) as daemon, Clients(daemon.address) as clients:
        clients.rank(Layout()).begin()
        found = Answer(address, "/data.json")
    assert f'"{SHOWN_AT}/paramserver' in found.text and '"node7"' in found.text
    # The clients need the socket's own path, which the page shows in its commands.
    assert str(tmp_path) not in found.text.replace(daemon.address, "")
