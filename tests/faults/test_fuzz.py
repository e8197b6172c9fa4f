"""The campaign of requests, shortened: it calls all methods, finds nothing in the daemon, and finds a planted fault."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from paramserver.v1 import parameter_store_pb2 as pb
from tests.faults.fuzz_calls import METHODS, Call, Ending, what_is_wrong
from tests.faults.fuzz_requests import Known, Requests
from tests.unit.storage.builders import Layout

ROOT = Path(__file__).parents[2]
STORE = "/paramserver.v1.ParameterStore/"
CODE = grpc.StatusCode
# Methods that answer OK to any valid request, and INVALID_ARGUMENT to some spoiled ones.
ALWAYS_ANSWERED = ("GetTiers", "ListJobs", "OpenJob", "RegisterShards", "AcquireLeases", "CommitStep", "ListStoredJobs")


def fuzz(*flags: str) -> tuple[int, str]:
    """Run the campaign's program, and return its exit status and its output."""
    command = [sys.executable, "-m", "tests.faults.fuzz", *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


def drawn(seed: int, count: int) -> list[bytes]:
    """Return the first `count` requests of a generator for each method."""
    known = Known(session_id="s" * 32, layout=Layout(), jobs=["job", "other"], strangers=["0" * 32])
    requests = Requests(random.Random(seed), known)
    return [requests.spoiled(method.input_type) for _ in range(count) for method in METHODS.values()]


def test_a_thousand_requests_do_no_harm(tmp_path: Path) -> None:
    # Beside other tests, the disk may keep the daemon's event loop waiting for a file.
    status, output = fuzz("--calls=1000", "--seed=1", "--json", "--stall=5", f"--keep={tmp_path}")
    report: dict[str, Any] = json.loads(output)
    assert report["failures"] == []
    assert status == 0
    assert report["calls"] == 1000
    assert report["honest_steps"] > 0
    endings = {path.rpartition("/")[2]: set(codes) for path, codes in report["endings"].items()}
    for name in ALWAYS_ANSWERED:
        assert {"OK", "INVALID_ARGUMENT"} <= endings[name], name
    ours = [path for path in METHODS if path.startswith("/paramserver.")]
    assert all(report["endings"][path] for path in ours)
    assert {"CANCELLED", "NOT_FOUND", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"} <= set().union(*endings.values())


@pytest.mark.campaigns
@pytest.mark.parametrize("mutant", ["forget-ranges"])
def test_a_daemon_that_forgets_to_give_something_back_is_found(tmp_path: Path, mutant: str) -> None:
    _, output = fuzz("--calls=600", "--seed=1", "--json", f"--keep={tmp_path}", f"--mutant={mutant}", "--quiet=8")
    report: dict[str, Any] = json.loads(output)
    assert any("bytes were leaked" in failure["why"] for failure in report["failures"])


def test_what_a_seed_draws_is_always_the_same_and_some_of_it_is_no_message() -> None:
    requests = drawn(7, 30)
    assert requests == drawn(7, 30)
    assert requests != drawn(8, 30)
    parsed = 0
    for data, method in zip(requests, [*METHODS.values()] * 30, strict=True):
        try:
            GetMessageClass(method.input_type).FromString(data)
            parsed += 1
        except DecodeError:
            pass
    assert len(requests) / 2 < parsed < len(requests)


@pytest.mark.parametrize(
    ("method", "code", "wrong"),
    [
        ("ListVersions", CODE.UNKNOWN, "it ended with UNKNOWN"),
        ("ListVersions", CODE.INTERNAL, "it ended with INTERNAL"),
        ("ListVersions", CODE.UNAVAILABLE, "it ended with UNAVAILABLE"),
        ("ListVersions", CODE.DATA_LOSS, "it ended with DATA_LOSS"),
        ("ListVersions", CODE.DEADLINE_EXCEEDED, "it ended with DEADLINE_EXCEEDED"),
        ("ListVersions", CODE.CANCELLED, "it ended with CANCELLED"),
        ("ListVersions", None, "no end"),
        ("Read", CODE.INTERNAL, "it ended with INTERNAL"),
        ("ListVersions", CODE.NOT_FOUND, None),
        ("ListVersions", CODE.OK, None),
    ],
)
def test_a_call_may_not_end_in_every_way(method: str, code: grpc.StatusCode | None, wrong: str | None) -> None:
    call = Call(path=STORE + method, messages=(b"",), deadline_seconds=10.0)
    found = what_is_wrong(call, Ending(code=code, details="no end" if code is None else "why"))
    assert found == wrong or (wrong is not None and found is not None and wrong in found)


def test_calls_that_were_kept_are_sent_again_as_calls_of_the_new_session(tmp_path: Path) -> None:
    known = Known(session_id="a" * 32, layout=Layout(name="kept", numels=(16,), groups=("a",)), jobs=["kept"])
    requests = Requests(random.Random(1), known)
    valid = [requests.valid(METHODS[STORE + name].input_type) for name in ("OpenJob", "RegisterShards")]
    slab = pb.SlabName(group="a", kind=pb.KIND_PARAM)
    want = pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE)
    valid.append(pb.AcquireLeasesRequest(session_id=known.session_id, wants=[want]))
    release = pb.ReleaseLeasesRequest.Release(lease_id=77_001, publish=True)
    valid.append(pb.ReleaseLeasesRequest(session_id=known.session_id, releases=[release]))
    valid[0].resume = pb.RESUME_POLICY_AUTO
    valid[0].job = "kept"
    history = []
    for name, request in zip(("OpenJob", "RegisterShards", "AcquireLeases", "ReleaseLeases"), valid, strict=True):
        call = Call(path=STORE + name, messages=(request.SerializeToString(),), deadline_seconds=10.0)
        assert Call.from_json(call.to_json()) == call
        history.append(call.to_json() | {"granted": [77_001] if name == "AcquireLeases" else []})
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"why": "", "session": known.session_id, "history": history}))
    status, output = fuzz("--replay", str(kept))
    assert status == 0, output
    assert [line.split()[:2] for line in output.splitlines()[:4]] == [
        [STORE + name, "OK"] for name in ("OpenJob", "RegisterShards", "AcquireLeases", "ReleaseLeases")
    ]
