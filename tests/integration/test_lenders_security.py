"""Memory of other daemons under mutual TLS and tokens: which borrower gets a loan, and which bytes it can reach."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from paramserver.contract.chunks import checksum
from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token, remove_token
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from paramserver.v1.parameter_store_pb2_grpc import ParameterStoreStub
from tests.integration.support.borrowing import Borrower, access, read, tier_of
from tests.integration.support.daemon import Daemon, admin_of
from tests.integration.support.guarded import Guarded, guarded_daemon
from tests.integration.support.store_client import Rank
from tests.integration.support.waiting import wait_until
from tests.unit.storage.builders import Layout

MIB = 1 << 20
UNKNOWN_LOAN = "the loan is unknown or has ended; borrow anew"


@pytest.fixture(scope="module")
def lender() -> Iterator[Guarded]:
    with guarded_daemon(host_budget="24MiB", lend_budget="16MiB", lend_per_borrower="8MiB") as daemon:
        yield daemon


@dataclass(slots=True, kw_only=True)
class BorrowingDaemon:
    """A daemon that borrows of the lender, and a job on it whose bits torch's optimizer checks.

    Attributes:
        files: the directory of the daemon's `token`, `ca.pem`, `node.pem` and `node-key.pem`, which a test may change.
    """

    daemon: Daemon
    files: Path
    rank: Rank
    lender: Guarded
    step: int = 0

    def show(self, *, token: str, name: str, certificates: Path | None = None, ca: Path | None = None) -> None:
        """Write the files that the daemon shows with its next attempts to borrow."""
        certificates = certificates or self.lender.certificates
        shutil.copy(ca or certificates / "ca.pem", self.files / "ca.pem")
        # A daemon that reads the files in between has a key that does not fit, cannot connect, and tries again.
        shutil.copy(certificates / f"{name}-key.pem", self.files / "node-key.pem")
        shutil.copy(certificates / f"{name}.pem", self.files / "node.pem")
        (self.files / "token").write_text(token)

    @property
    def figures(self) -> admin_pb.TierInfo.Lender:
        """The lender as this daemon sees it."""
        (figures,) = tier_of(self.daemon, pb.TIER_REMOTE).lenders
        return figures

    @property
    def events(self) -> list[str]:
        """The texts of all events about lenders, oldest first."""
        with admin_of(self.daemon.address) as admin:
            listed = admin.ListEvents(admin_pb.ListEventsRequest(kinds=["tier"]), timeout=10).events
        return [event.text for event in listed]

    def train(self, steps: int) -> None:
        """Train some more steps, and check each one's bits. All reads of a step are from NVMe or from the lender."""
        for _ in range(steps):
            self.step += 1
            with admin_of(self.daemon.address) as admin:
                admin.EvictCopies(admin_pb.EvictCopiesRequest(all_jobs=True), timeout=10)
            self.rank.train(self.step, self.step)
            self.rank.assert_at(self.step)


@contextmanager
def borrowing(lender: Guarded, directory: Path, token: str) -> Iterator[BorrowingDaemon]:
    """Run a daemon that borrows with a token, and with the certificate of node3."""
    files = directory / "files"
    files.mkdir()
    remote = {
        "lenders": [lender.address],
        "budget": "8MiB",
        "use": "always",
        "retry_seconds": 0.1,
        "token_file": str(files / "token"),
        "tls_ca": str(files / "ca.pem"),
        "tls_certificate": str(files / "node.pem"),
        "tls_key": str(files / "node-key.pem"),
    }
    with Daemon(directory / "state", {"remote": remote}) as daemon:
        rank = Rank(daemon.address, Layout(), run_id=secrets.token_hex(8)).begin()
        borrower = BorrowingDaemon(daemon=daemon, files=files, rank=rank, lender=lender)
        borrower.show(token=token, name="node3")
        yield borrower
        rank.close()


def loans_of(lender: Guarded) -> list[admin_pb.TierInfo.Loan]:
    """Return the loans that the lender has granted, as its operator sees them through the UNIX socket."""
    return list(tier_of(lender.daemon, pb.TIER_HOST, lender.tokens["operator"]).loans)


@contextmanager
def served_with(lender: Guarded, files: Path) -> Iterator[None]:
    """Have the lender use the authority and the certificate of another directory for new connections."""
    names = ("ca.pem", "server-key.pem", "server.pem")
    before = {name: (lender.certificates / name).read_bytes() for name in names}
    try:
        for name in names:
            shutil.copy(files / name, lender.certificates / name)
        yield
    finally:
        for name, content in before.items():
            (lender.certificates / name).write_bytes(content)


# --- a borrower with the right credentials


def test_a_loan_outlives_new_certificates_and_a_new_token_gets_a_new_loan(lender: Guarded, tmp_path: Path) -> None:
    new = tmp_path / "new"
    make_certificates(new, ["127.0.0.1"], ["node3"], 1)
    with borrowing(lender, tmp_path, add_token(lender.token_file, "old", Role.BORROWER)) as borrower:
        wait_until(lambda: borrower.figures.state == "in use")
        borrower.train(2)
        (loan,) = loans_of(lender)
        assert loan.token == "old node3" and loan.size_bytes == 8 * MIB and loan.peer.startswith("ipv4:127.0.0.1:")
        first = borrower.figures
        assert first.hits > 0 and first.misses == 0 and loan.bytes_written > 0
        with served_with(lender, new):
            borrower.show(token=add_token(lender.token_file, "new", Role.BORROWER), name="node3", certificates=new)
            borrower.train(2)
            second = borrower.figures
            assert second.hits > first.hits and second.losses == 0
            assert [loan.token for loan in loans_of(lender)] == ["old node3"]
            remove_token(lender.token_file, "old")
            wait_until(lambda: borrower.figures.losses == 1 and borrower.figures.state == "in use")
            borrower.train(2)
            assert borrower.figures.hits > second.hits and borrower.figures.wrong_blocks == 0
            assert [loan.token for loan in loans_of(lender)] == ["new node3"]
    wait_until(lambda: not loans_of(lender))


# --- borrowers and lenders with wrong ones


@pytest.fixture(scope="module")
def refused(lender: Guarded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BorrowingDaemon]:
    """A daemon that the lender has never given a loan."""
    with borrowing(lender, tmp_path_factory.mktemp("refused"), "wrong") as borrower:
        yield borrower


# A function that shows other credentials to the lender, with a directory for the files that it needs.
Change = Callable[[BorrowingDaemon, Path], AbstractContextManager[None] | None]


def show_a_jobs_token(borrower: BorrowingDaemon, _: Path) -> None:
    borrower.show(token=borrower.lender.tokens["alice"], name="node3")


def show_an_unknown_token(borrower: BorrowingDaemon, _: Path) -> None:
    borrower.show(token="wrong", name="node3")


def show_a_certificate_of_another_authority(borrower: BorrowingDaemon, other: Path) -> None:
    make_certificates(other, ["127.0.0.1"], ["node3"], 1)
    ca = borrower.lender.certificates / "ca.pem"
    borrower.show(token=borrower.lender.tokens["node3"], name="node3", certificates=other, ca=ca)


def show_a_servers_certificate(borrower: BorrowingDaemon, _: Path) -> None:
    borrower.show(token=borrower.lender.tokens["node3"], name="server")


def show_an_empty_key(borrower: BorrowingDaemon, _: Path) -> None:
    """Empty the key, as a program does that is about to write it.

    The other files stay as they are, because the daemon would get a loan in a moment in which all are right.
    """
    (borrower.files / "node-key.pem").write_bytes(b"")


def trust_another_authority(borrower: BorrowingDaemon, other: Path) -> None:
    make_certificates(other, ["127.0.0.1"], ["node3"], 1)
    borrower.show(token=borrower.lender.tokens["node3"], name="node3", ca=other / "ca.pem")


@contextmanager
def reach_a_lender_with_the_certificate_of_another_address(borrower: BorrowingDaemon, other: Path) -> Iterator[None]:
    for name in ("ca.pem", "ca-key.pem"):
        shutil.copy(borrower.lender.certificates / name, other)
    make_certificates(other, ["node8.example.org"], ["node3"], 1)
    with served_with(borrower.lender, other):
        borrower.show(token=borrower.lender.tokens["node3"], name="node3")
        yield
        borrower.show(token="wrong", name="node3")


@pytest.mark.parametrize(
    ("change", "told", "logged"),
    [
        (show_a_jobs_token, "PERMISSION_DENIED", "token alice is neither a borrower's nor an admin's"),
        (show_an_unknown_token, "UNAUTHENTICATED", "an unknown token"),
        (show_a_certificate_of_another_authority, "tls_client_ca has not signed", "CERTIFICATE_VERIFY_FAILED"),
        (show_a_servers_certificate, "tls_client_ca has not signed", "CERTIFICATE_VERIFY_FAILED"),
        (show_an_empty_key, "node-key.pem is empty", ""),
        (trust_another_authority, "CERTIFICATE_VERIFY_FAILED", ""),
        (reach_a_lender_with_the_certificate_of_another_address, "Hostname Verification Check failed", ""),
    ],
)
def test_without_the_right_credentials_there_is_no_loan_and_training_goes_on_from_nvme(
    refused: BorrowingDaemon, tmp_path: Path, change: Change, told: str, logged: str
) -> None:
    lender = refused.lender
    since = len(lender.daemon.log)
    with change(refused, tmp_path) or nullcontext():
        wait_until(lambda: told in refused.figures.problem)
        if logged:
            lender.wait_for_log(logged, since)
        refused.train(1)
        assert refused.figures.state == "away" and refused.figures.hits == refused.figures.losses == 0
        assert any(f"{lender.address}: no memory of this lender is used" in e and told in e for e in refused.events)
        assert f"lender {lender.address}:" in refused.daemon.log and told in refused.daemon.log
    assert not loans_of(lender)
    assert not [secret for secret in lender.tokens.values() if secret in refused.daemon.log + lender.daemon.log]


# --- loans of others


def channel_as(lender: Guarded, token: str, certificate: str) -> grpc.Channel:
    """Return a channel to the lender with a token and a certificate of these names."""
    files = lender.certificates
    return lender.channel(token, tls_certificate=files / f"{certificate}.pem", tls_key=files / f"{certificate}-key.pem")


def kept(data: bytes) -> pb.AccessLoanRequest:
    """Return the message that keeps bytes from the loan's first one on."""
    return pb.AccessLoanRequest(chunk=pb.Chunk(first_byte=0, data=data, checksum=checksum(0, data)))


def test_a_loan_is_reached_with_its_own_token_and_certificate_alone(lender: Guarded) -> None:
    secret = secrets.token_bytes(4096)
    with channel_as(lender, "node3", "node3") as channel:
        owner = Borrower(channel, 2 * MIB)
        assert [answer.WhichOneof("message") for answer in owner.access(kept(secret))] == ["kept"]
        strangers = (("node4", "node4"), ("node4", "node3"), ("node3", "node4"), ("operator", "node3"))
        for token, certificate in strangers:
            since = len(lender.daemon.log)
            with channel_as(lender, token, certificate) as other:
                store = ParameterStoreStub(other)
                for loan_id in (owner.granted.loan_id, "0" * 32):
                    with pytest.raises(grpc.RpcError) as error:
                        list(access(store, loan_id, read(0, 4096)))
                    assert (error.value.code(), error.value.details()) == (grpc.StatusCode.NOT_FOUND, UNKNOWN_LOAN)
            line = lender.wait_for_log(f"token {token} with certificate {certificate} asks for a loan", since)
            assert "refused AccessLoan from ipv4:127.0.0.1:" in line
        (answer,) = owner.access(read(0, 4096))
        assert answer.chunk.data == secret
        owner.close()
    wait_until(lambda: not loans_of(lender))
    # The next loan gets the same memory of the arena, without the bytes that were in it.
    with channel_as(lender, "node4", "node4") as channel:
        other_loan = Borrower(channel, 2 * MIB)
        _, answer = other_loan.access(kept(b"y"), read(0, 4096))
        assert answer.chunk.data == b"y" + bytes(4095)
        other_loan.close()
    wait_until(lambda: not loans_of(lender))
