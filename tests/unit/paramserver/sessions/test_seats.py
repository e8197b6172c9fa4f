"""Each identity and each address may open a limited share of the sessions.

The last seats are kept: some for clients on this machine, the very last ones for operators.
"""

from __future__ import annotations

import pytest

from paramserver.security.principals import ANYONE, Principal, Role
from paramserver.sessions.seats import ClientStanding, SeatLimits, Seats, Visitor
from storage.base.errors import BudgetExceededError

ALICE = Principal(name="alice", role=Role.JOB, jobs=("alice-*",))
BOB = Principal(name="bob", role=Role.JOB, jobs=("bob",))
OPERATOR = Principal(name="operator", role=Role.ADMIN)
LIMITS = SeatLimits(total=10, reserved=2, per_identity=4, per_address=5)
MANY = SeatLimits(total=10, reserved=2, per_identity=99, per_address=99)


def remote(owner: Principal, host: str = "10.0.0.1", certificate: str = "") -> Visitor:
    return Visitor(owner=owner, peer=f"ipv4:{host}:4711", certificate=certificate)


def local(owner: Principal) -> Visitor:
    return Visitor(owner=owner, peer="unix:")


def fill(seats: Seats, visitor: Visitor) -> int:
    """Take seats until one is refused, and return how many the visitor got."""
    for taken in range(100):
        try:
            seats.take(visitor)
        except BudgetExceededError:
            return taken
    return 100


@pytest.mark.parametrize(
    ("visitor", "standing", "identity", "address"),
    [
        (remote(ALICE), ClientStanding.REMOTE, "token alice", "ipv4:10.0.0.1"),
        (local(ALICE), ClientStanding.LOCAL, "token alice", ""),
        (remote(OPERATOR), ClientStanding.OPERATOR, "", ""),
        (local(OPERATOR), ClientStanding.OPERATOR, "", ""),
        (local(ANYONE), ClientStanding.OPERATOR, "", ""),
        (remote(ANYONE), ClientStanding.REMOTE, "", "ipv4:10.0.0.1"),
        (remote(ANYONE, certificate="c"), ClientStanding.REMOTE, "certificate 'c'", "ipv4:10.0.0.1"),
        (Visitor(owner=BOB, peer="ipv6:%5B::1%5D:4711"), ClientStanding.REMOTE, "token bob", "ipv6:%5B::1%5D"),
    ],
)
def test_who_a_visitor_is(visitor: Visitor, standing: ClientStanding, identity: str, address: str) -> None:
    assert (visitor.standing, visitor.identity, visitor.address) == (standing, identity, address)


def test_the_last_seats_are_kept_in_two_steps_and_all_come_back() -> None:
    seats = Seats(MANY)
    order = [remote(ALICE), local(BOB), remote(OPERATOR)]
    assert [fill(seats, visitor) for visitor in order] == [6, 2, 2]
    for visitor in reversed(order):
        for _ in range({ClientStanding.REMOTE: 6}.get(visitor.standing, 2)):
            seats.release(visitor)
    assert [fill(seats, visitor) for visitor in order] == [6, 2, 2]


def test_an_identity_has_a_share_wherever_it_comes_from() -> None:
    seats = Seats(LIMITS)
    assert fill(seats, remote(ALICE)) == 4
    with pytest.raises(BudgetExceededError, match="max_sessions_per_identity = 4: token alice has 4 sessions open"):
        seats.take(local(ALICE))
    assert fill(seats, local(BOB)) == 4, "the limits of all together leave him that many"


def test_an_address_has_a_share_whoever_comes_from_it() -> None:
    seats = Seats(LIMITS)
    assert fill(seats, remote(ALICE)) == 4
    seats.take(remote(BOB))
    with pytest.raises(
        BudgetExceededError, match=r"max_sessions_per_address = 5: ipv4:10\.0\.0\.1 has 5 sessions open"
    ):
        seats.take(remote(BOB))
    seats.take(remote(BOB, host="10.0.0.2"))


def test_without_limits_a_job_of_many_ranks_leaves_a_quarter_to_others() -> None:
    seats = Seats(SeatLimits(total=4096, reserved=64))
    job = remote(ALICE)
    for _ in range(2944):
        seats.take(job)
    with pytest.raises(BudgetExceededError, match="token alice has 2944 sessions open, and the 1024 that are left"):
        seats.take(job)
    # Other tokens from other machines find the rest, whatever the first one has.
    for number in range(1024):
        seats.take(remote(BOB, host=f"10.0.1.{number % 200}"))
    with pytest.raises(BudgetExceededError, match="max_sessions: 3968 sessions are open"):
        seats.take(remote(BOB))


def test_without_limits_an_address_leaves_a_quarter_to_others() -> None:
    seats = Seats(SeatLimits(total=16, reserved=0))
    for _ in range(12):
        seats.take(remote(ANYONE))
    with pytest.raises(BudgetExceededError, match=r"ipv4:10\.0\.0\.1 has 12 sessions open, and the 4 that are left"):
        seats.take(remote(ANYONE))
    for number in range(2, 6):
        seats.take(remote(ANYONE, host=f"10.0.0.{number}"))
