"""States in the memory of other daemons: the bits of a run without lenders, on both ends what is said, nothing left."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app
from paramserver.contract.channel import channel_to
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.parameter_store_pb2_grpc import ParameterStoreStub
from paramserver.v1.store_admin_pb2_grpc import StoreAdminStub
from tests.faults.lenders import KINDS, LIE_KINDS, LINK_KINDS, play, train_without_lenders, why_no_links
from tests.integration.support.borrowing import Borrower, read, tier_of
from tests.integration.support.daemon import Daemon, admin_of

STEPS = 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of a run without lenders."""
    return train_without_lenders(tmp_path_factory.mktemp("whole"), STEPS)


def test_lenders_that_forge_replay_and_lie_change_no_bit(whole: Any, tmp_path: Path) -> None:
    # A lie counts only if the borrower reads while it lasts. On a busy machine that may happen in no strike of a round.
    for number in range(3):
        rng = random.Random(3 + number)
        found = play(tmp_path / f"lent-{number}", list(LIE_KINDS), STEPS, whole, rng, apart=False)
        check_nothing_is_lost(found)
        if found["wrong_blocks"]:
            return
    pytest.fail(f"no wrong block was counted: {found}")


def test_lenders_that_are_killed_stopped_and_emptied_change_no_bit(whole: Any, tmp_path: Path) -> None:
    found = play(tmp_path / "lent", list(KINDS), STEPS, whole, random.Random(3), apart=False)
    check_nothing_is_lost(found)
    assert found["losses"] > 0


def test_links_that_are_cut_and_slow_change_no_bit(whole: Any, tmp_path: Path) -> None:
    """Each daemon is in a network namespace of its own, so its TCP connections stand while its link is down."""
    if (refusal := why_no_links()) is not None:
        pytest.skip(refusal)
    found = play(tmp_path / "lent", list(LINK_KINDS), STEPS, whole, random.Random(3), apart=True)
    check_nothing_is_lost(found)


def check_nothing_is_lost(found: dict[str, Any]) -> None:
    """Check the findings of a round."""
    assert "error" not in found, found["error"]
    assert found["differences"] == [] and found["lent_bytes_left"] == [0, 0]
    assert found["hits"] > 0 and found["strikes"]


def printed(daemon: Daemon, verb: str, *arguments: str, credentials: tuple[str, ...] = ()) -> str:
    """Return what a verb of the admin tool prints, with single spaces."""
    command = [*credentials, verb, "--address", daemon.address, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    # The lines of a table are broken where the terminal ends.
    return " ".join(result.stdout.split())


def eventually(condition: Callable[[], Any]) -> Any:
    """Return the first true result of a function that is called again and again."""
    deadline = time.monotonic() + 20
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


def test_both_ends_show_the_loan_and_a_withdrawn_token_ends_it(tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens.toml", tmp_path / "borrower.token"
    mine.write_text(add_token(tokens, "node3", Role.BORROWER))
    admin_token = add_token(tokens, "operator", Role.ADMIN)
    (tmp_path / "operator.token").write_text(admin_token)
    lends = {"lend_budget": "8MiB", "lend_per_borrower": "4MiB", "token_file": str(tokens)}
    with Daemon(tmp_path / "lender", lends) as lender:
        remote = {"lenders": [lender.address], "budget": "64MiB", "token_file": str(mine), "retry_seconds": 0.1}
        with Daemon(tmp_path / "borrower", {"remote": remote}) as borrower:
            eventually(lambda: tier_of(borrower, pb.TIER_REMOTE).lenders[0].size_bytes)
            info = tier_of(borrower, pb.TIER_REMOTE).lenders[0]
            assert (info.address, info.state, info.size_bytes) == (lender.address, "on trial", 4 * MIB)
            borrowed = printed(borrower, "tiers")
            assert f"lender {lender.address}: on trial" in borrowed
            lent = printed(lender, "tiers", credentials=("--token-file", str(tmp_path / "operator.token")))
            assert "lent: 0 B of lend_budget 8.0 MiB" in lent and "(token node3" in lent
            (loan,) = tier_of(lender, pb.TIER_HOST, admin_token).loans
            assert loan.token == "node3" and loan.size_bytes == 4 * MIB and str(tmp_path / "borrower") in loan.borrower
            tokens.write_text(
                "".join(
                    f"[[token]]{entry}" for entry in tokens.read_text().split("[[token]]")[1:] if "node3" not in entry
                )
            )
            eventually(lambda: tier_of(borrower, pb.TIER_REMOTE).lenders[0].state == "away")
            with admin_of(borrower.address) as admin:
                events = admin.ListEvents(admin_pb.ListEventsRequest(kinds=["tier"]), timeout=10).events
            assert [event.subject for event in events] == ["remote", "remote"]
            assert "this lender lends 4.0 MiB" in events[0].text and "UNAUTHENTICATED" in events[1].text


def test_a_borrower_may_borrow_and_nothing_else_and_a_job_may_not(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    borrower = add_token(tokens, "node3", Role.BORROWER)
    job = add_token(tokens, "team", Role.JOB, ["*"])
    with Daemon(tmp_path / "lender", {"lend_budget": "4MiB", "token_file": str(tokens)}) as lender:
        with channel_to(lender.address, token=borrower) as channel:
            store, admin = ParameterStoreStub(channel), StoreAdminStub(channel)
            refused: list[Callable[[], Any]] = [
                lambda: next(
                    store.Session(iter([pb.SessionRequest(hello=pb.SessionRequest.Hello(client="c"))]), timeout=10)
                ),
                lambda: store.ListStoredJobs(pb.ListStoredJobsRequest(session_id="x"), timeout=10),
                lambda: admin.GetTiers(admin_pb.GetTiersRequest(), timeout=10),
                lambda: admin.KeepStep(admin_pb.KeepStepRequest(job="job", name="name"), timeout=10),
            ]
            codes = []
            for call in refused:
                with pytest.raises(grpc.RpcError) as error:
                    call()
                codes.append(error.value.code())
            assert codes == [grpc.StatusCode.PERMISSION_DENIED] * len(refused)
        with channel_to(lender.address, token=job) as channel:
            with pytest.raises(grpc.RpcError) as error:
                next(
                    ParameterStoreStub(channel).BorrowMemory(
                        iter([pb.BorrowMemoryRequest(borrower="b", size_bytes=1)]), timeout=10
                    )
                )
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_hostile_messages_of_a_borrower_are_refused_and_take_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path / "lender", {"lend_budget": "4MiB"}) as lender, channel_to(lender.address) as channel:
        store = ParameterStoreStub(channel)
        for request, code in (
            (pb.BorrowMemoryRequest(borrower="b"), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.BorrowMemoryRequest(borrower="", size_bytes=MIB), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as error:
                next(store.BorrowMemory(iter([request]), timeout=10))
            assert error.value.code() is code
        request = pb.BorrowMemoryRequest(borrower="b", size_bytes=MIB)
        with pytest.raises(grpc.RpcError, match="after the first message of BorrowMemory there must be none") as error:
            list(store.BorrowMemory(iter([request, request]), timeout=10))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        borrower = Borrower(channel, 2 * MIB)
        assert borrower.granted.size_bytes == 2 * MIB
        chunk = pb.Chunk(first_byte=0, data=b"x" * 4096)
        wrong = [
            (read(2 * MIB, 1), grpc.StatusCode.INVALID_ARGUMENT),
            (read(0, MIB + 1), grpc.StatusCode.INVALID_ARGUMENT),
            (read((1 << 64) - 1, 1), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.AccessLoanRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (pb.AccessLoanRequest(chunk=chunk), grpc.StatusCode.DATA_LOSS),
        ]
        for message, code in wrong:
            with pytest.raises(grpc.RpcError) as error:
                list(borrower.access(message))
            assert error.value.code() is code, message
        with pytest.raises(grpc.RpcError) as error:
            opening = pb.AccessLoanRequest(open=pb.AccessLoanRequest.Open(loan_id="0" * 32))
            list(store.AccessLoan(iter([opening]), timeout=10))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        # The loan has outlived all of that, and has taken nothing.
        assert [answer.WhichOneof("message") for answer in borrower.access(read(0, 4096))] == ["gone"]
        assert tier_of(lender, pb.TIER_HOST).lent_bytes == 0 and len(tier_of(lender, pb.TIER_HOST).loans) == 1
        borrower.close()
        eventually(lambda: not tier_of(lender, pb.TIER_HOST).loans)
        shown = json.loads(printed(lender, "accounts", "--json"))
        assert all(account["settled"] for account in shown["accounts"])
        assert lender.stop() == 0
        assert "Traceback" not in lender.log
